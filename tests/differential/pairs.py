"""Random masks and scores judged pair by pair: `python -m tests.differential.pairs --count 20000`.

Each is a line of Python over tables of all dtypes. PyTorch evaluates it on real tensors of indices,
masks by `create_mask`; tilegen traces it, evaluates the predicate, sorts tiles into classes, and
runs some functions in kernels. Nothing of tilegen takes part in what is expected.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import track
from torch.nn.attention.flex_attention import create_mask

import tilegen
from tests.support.tiles import brute_force, found_classes
from tilegen.errors import Unsupported
from tilegen.masks.language.evaluation import evaluate

ROWS, COLUMNS, BATCH, HEADS = 21, 26, 2, 2
INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
SIZE = 13
"""Elements of each table; the length of a row is 3."""


def _table(dtype: str, random: torch.Generator) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.rand(SIZE, generator=random) < 0.5
    if kind.is_floating_point:
        halves = torch.randint(-9, 10, (SIZE,), generator=random) / 2
        halves[:3] = torch.tensor([torch.nan, torch.inf, 0.1])
        return halves.to(kind)
    info = torch.iinfo(kind)
    low, high = max(info.min, -(2**20)), min(info.max, 2**20)
    table = torch.randint(-4, 9, (SIZE,), generator=random).clamp(min=low)
    table[:4] = torch.tensor([low, high, 100, 3])
    return table.to(kind)


_RANDOM = torch.Generator().manual_seed(0)
TABLES = {f"t_{dtype}": _table(dtype, _RANDOM) for dtype in (*INTEGERS, *FLOATS)}
TABLES |= {f"f_{dtype}": TABLES[f"t_{dtype}"].nan_to_num(2, 3) for dtype in FLOATS}
TABLES |= {f"r_{dtype}": _table(dtype, _RANDOM)[:12].view(4, 3) for dtype in (*INTEGERS, *FLOATS)}


def _integer(random: Random, depth: int) -> str:
    if depth == 0:
        name = random.choice(INTEGERS)
        at = random.choice([f"q % {SIZE}", f"k % {SIZE}", f"(q + k) % {SIZE}", "b", "h"])
        return random.choice(
            ["q", "k", "q", "k", "h", str(random.randint(-3, 9)), f"t_{name}[{at}]"]
        )
    left, other = _integer(random, depth - 1), _integer(random, random.randrange(depth))
    number, name = random.randint(1, 9), random.choice(INTEGERS)
    return random.choice(
        [
            *(f"({left} {sign} {other})" for sign in ("+", "-", "*", "&", "|", "^")),
            *(f"({left} {sign} {number})" for sign in ("//", "%", ">>", "<<", "*")),
            *(f"torch.{function}({left}, {other})" for function in ("maximum", "minimum")),
            f"(k - q + {left}).abs()",
            f"(-{left})",
            f"(~{left})",
            f"torch.div({left}, {number}, rounding_mode='trunc')",
            f"torch.where({_condition(random, depth - 1)}, {left}, {other})",
            f"(q + {left}).to(torch.{name})",
            f"(k * {left}).add_({other})",
            f"({_condition(random, depth - 1)}) + ({_condition(random, depth - 1)})",
            f"r_{name}[q % 4].sum()",
            f"torch.sign(q - {left})",
            f"torch.clamp(k + {left}, -{number}, {number})",
            # What becomes of a float that no integer holds is not defined.
            f"(f_{random.choice(FLOATS)}[k % {SIZE}] * 3 + (q - {other}).clamp(-9, 9) / 4)"
            f".to(torch.{random.choice(INTEGERS[3:])})",
        ]
    )


def _number(random: Random, depth: int) -> str:
    if depth == 0:
        name = random.choice(FLOATS)
        at = random.choice([f"q % {SIZE}", f"k % {SIZE}", f"(k - q) % {SIZE}"])
        return random.choice(
            [f"t_{name}[{at}]", f"t_{name}[{at}]", "0.5", "-1.75", "0.1", "q * 0.3"]
        )
    left, other = _number(random, depth - 1), _number(random, random.randrange(depth))
    name = random.choice(FLOATS)
    return random.choice(
        [
            *(f"({left} {sign} {other})" for sign in ("+", "-", "*", "/")),
            f"({left} + {_integer(random, depth - 1)})",
            f"({_integer(random, depth - 1)} / {random.randint(2, 9)})",
            *(f"torch.{function}({left}, {other} + q)" for function in ("maximum", "minimum")),
            *(f"torch.{function}({left} - k)" for function in ("floor", "sqrt", "abs", "sign")),
            f"torch.where({_condition(random, depth - 1)}, {left}, {other})",
            f"(q - {left}).to(torch.{name})",
            f"(k * {left}).mul_({random.randint(2, 5)})",
            f"torch.clamp(q - {left}, max={random.randint(1, 9)}.5)",
            f"({left} * k) ** {random.choice(['2', '3', '0.5'])}",
            f"r_{name}[k % 4].amax()",
            f"torch.relu({left} + q)",
        ]
    )


def _condition(random: Random, depth: int) -> str:
    sign = random.choice(["<", "<=", ">", ">=", "==", "!="])
    if depth <= 0:
        at = random.choice([f"q % {SIZE}", f"k % {SIZE}"])
        return random.choice([f"(q {sign} k)", f"(q - k {sign} 4)", f"t_bool[{at}]"])
    value = random.choice([_integer, _integer, _number])
    compared = f"(q * 0 + {value(random, depth)} {sign} {value(random, random.randrange(depth))})"
    other = _condition(random, depth - 1)
    return random.choice(
        [compared, compared, f"({compared} & {other})", f"({compared} | ~{other})",
         f"(~({compared} ^ {other}))", f"torch.logical_or({compared}, {other})"]
    )  # fmt: skip


def source(random: Random, *, is_score: bool) -> str:
    """Return the source of a random function."""
    if is_score:  # which are computed in single precision
        text = f"lambda s, b, h, q, k: s + {_number(random, random.randint(1, 3))}"
        return re.sub("bfloat16|float16|float64", "float32", text)
    return f"lambda b, h, q, k: {_condition(random, random.randint(1, 3))}"


@dataclass
class Report:
    """Outcomes of random functions."""

    judged: int = 0
    kernels: int = 0
    """Functions that were run in kernels."""
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds of tilegen alone."""

    def __str__(self) -> str:
        total = self.judged + sum(self.refused.values())
        lines = [
            f"{total} functions that PyTorch computes: {self.judged} judged "
            f"({self.kernels} in kernels), "
            f"{sum(self.refused.values())} refused, {len(self.wrong)} wrong, "
            f"{len(self.crashed)} crashed; {1e3 * self.seconds / max(1, total):.1f} ms each",
            *(f"  {count:5} refused: {reason}" for reason, count in self.refused.most_common(20)),
            *(f"  wrong: {one}" for one in self.wrong[:20]),
            *(f"  crashed: {one}" for one in self.crashed[:20]),
        ]
        return "\n".join(lines)


def judge(
    text: str, report: Report, *, is_score: bool, tiles: bool = False, kernels: bool = False
) -> None:
    """Run one function in PyTorch and in tilegen, and note the outcome."""
    function = eval(text, {"torch": torch, **TABLES})
    try:
        expected = (_scores if is_score else _mask)(function)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
        return  # PyTorch has no such operation
    start = time.perf_counter()
    try:
        wrong = (_wrong_score if is_score else _wrong_mask)(function, expected, tiles)
        if kernels and not wrong:
            wrong = _wrong_kernel(function, expected, is_score)
            report.kernels += 1
    except Unsupported as refusal:
        report.refused[_reason(str(refusal))] += 1
        return
    except Exception as error:
        report.crashed.append(f"{text}: {type(error).__name__}: {error}")
        return
    finally:
        report.seconds += time.perf_counter() - start
    report.judged += 1
    if wrong:
        report.wrong.append(f"{text}: {wrong}")


def _mask(function: Callable[..., Any]) -> torch.Tensor:
    mask = create_mask(function, BATCH, HEADS, ROWS, COLUMNS, device="cpu")
    if mask.dtype != torch.bool:
        raise TypeError("no mask")
    return mask


def _indices() -> tuple[torch.Tensor, ...]:
    sizes = (BATCH, HEADS, ROWS, COLUMNS)
    return tuple(
        torch.arange(n).view([-1 if i == axis else 1 for i in range(4)])
        for axis, n in enumerate(sizes)
    )


LOGITS = torch.linspace(-3, 3, ROWS * COLUMNS).view(ROWS, COLUMNS)


def _scores(function: Callable[..., Any], s: torch.Tensor = LOGITS) -> torch.Tensor:
    s = s.expand(BATCH, HEADS, -1, -1)
    wrapped = function
    for axes in ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None),
                 (0, 0, None, None, None)):  # fmt: skip
        wrapped = torch.vmap(wrapped, in_dims=axes)
    return wrapped(s, *(index.flatten() for index in _indices())).float()


def _wrong_mask(function: Callable[..., Any], expected: torch.Tensor, tiles: bool) -> str:
    mask = tilegen.predicate(function)
    b, h, q, k = _indices()
    kept = mask.kept(q, k, ROWS, COLUMNS, b, h).expand(expected.shape)
    if not torch.equal(kept, expected):
        return f"{int((kept != expected).sum())} pairs of {mask}"
    if not tiles:
        return ""
    classes, listed = found_classes(
        mask, "rows", seqlen_q=ROWS, seqlen_kv=COLUMNS, block_m=4, block_n=8, batch=BATCH,
        heads=HEADS,
    )  # fmt: skip
    truth = brute_force(expected.numpy(), "rows", 4, 8, listed=listed)
    classes = np.broadcast_to(classes, truth.shape)
    # A closed form may visit too much; lists are exact.
    lost = ((truth > 0) & (classes == 0)) | ((truth < 2) & (classes == 2))
    return f"tiles of {mask}" if lost.any() or (listed and (truth != classes).any()) else ""


def _wrong_score(function: Callable[..., Any], expected: torch.Tensor, _: bool) -> str:
    score = tilegen.score(function)
    b, h, q, k = _indices()
    actual = evaluate(
        score.expression(), score.captured, b=b, h=h, q=q, k=k, s=LOGITS, seqlen_q=ROWS,
        seqlen_kv=COLUMNS,
    ).expand(expected.shape)  # fmt: skip
    # Scores round nothing to 16 bits, so that they may differ by what that loses.
    close = torch.isclose(actual, expected, rtol=2e-2, atol=2e-2, equal_nan=True)
    return "" if close.float().mean() > 0.97 else f"{int((~close).sum())} pairs of {score}"


def _wrong_kernel(function: Callable[..., Any], expected: torch.Tensor, is_score: bool) -> str:
    """Compare attention under a function with a softmax in fp64."""
    if is_score and not expected.isfinite().all():
        return ""  # what a softmax makes of such rows is not defined
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(BATCH, HEADS, n, 16, generator=generator) for n in (ROWS, COLUMNS, COLUMNS)
    )
    if is_score:
        q = torch.zeros_like(q)  # the score is then that of 0
        logits = _scores(function, torch.zeros(ROWS, COLUMNS)).double()
        out = tilegen.attention(q, k, v, score=tilegen.score(function))
    else:
        logits = (q.double() @ k.double().mT / 4).masked_fill(~expected, -torch.inf)
        out = tilegen.attention(q, k, v, mask=tilegen.predicate(function))
    weights = logits.softmax(-1).nan_to_num(0)  # rows that see nothing are 0
    error = (out - weights @ v.double()).abs().max()
    return "" if error < (2e-2 if is_score else 1e-4) else f"kernels of it, by {float(error):.2g}"


def _reason(text: str) -> str:
    words = text.partition(", got")
    return f"{words[0]}{words[1]}{words[2][:40]}" if len(words[0]) < 60 else words[0][:90]


def run(seed: int, count: int, *, kernels: int = 0, progress: bool = False) -> Report:
    """Judge `count` random functions, every fourth a score; tiles of every other mask, and every
    `kernels`-th in kernels (0: none)."""
    random, report = Random(seed), Report()
    numbers = track(range(count)) if progress else range(count)
    for i in numbers:
        is_score = i % 4 == 3
        in_kernels = bool(kernels) and i % kernels == 0
        text = source(random, is_score=is_score)
        judge(text, report, is_score=is_score, tiles=i % 2 == 0, kernels=in_kernels)
    return report


def main(
    count: Annotated[int, typer.Option(help="Random functions.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Of the functions.")] = 1,
    kernels: Annotated[int, typer.Option(help="Run every so many in kernels; 0: none.")] = 10,
) -> None:
    """Judge random masks and scores; exit 1 where any is wrong or crashes."""
    report = run(seed, count, kernels=kernels, progress=True)
    print(report)
    raise typer.Exit(1 if report.wrong or report.crashed else 0)


if __name__ == "__main__":
    typer.run(main)
