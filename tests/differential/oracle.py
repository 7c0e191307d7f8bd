"""The correct results of a problem: dense attention in fp64, with the effect of rounding."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.differential import meaning
from tests.differential.meaning import Changed, Kept, Pairs
from tests.differential.problems import Problem
from tests.differential.requests import inside, only, starts
from tilegen.check.reference import Inputs
from tilegen.masks.dropout import Dropout

INF = float("inf")
Results = dict[str, torch.Tensor]


class Unclear(Exception):
    """A problem whose answer depends on rounding, or is NaN: unsuitable for a test."""


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Let PyTorch turn integers into this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def evaluate(text: str, problem: Problem, tables: dict[str, Any], names: dict[str, Any]) -> Any:
    """Evaluate a source text with these names."""
    sizes = {"rows": problem.rows, "columns": problem.columns}
    return eval(text, {"torch": torch, **sizes, **names, **tables})


def pairs(problem: Problem) -> Pairs:
    sizes = problem.batch, problem.heads, problem.rows, problem.columns
    return Pairs.of(*sizes, problem.requests)


def kept(problem: Problem, tables: dict[str, Any]) -> torch.Tensor:
    """Return the mask as PyTorch computes it, (batch, heads, rows, columns).

    Raises Unclear if the result depends on rounding.
    """
    actual = _kept(problem, problem.keeps, tables)
    if _is_whole(problem.keeps, tables):
        return actual
    wide = {name: _wide(table) for name, table in tables.items()}
    with default_dtype(torch.float64):
        with Margins() as margins:
            exact = _kept(problem, problem.keeps, wide)
        moved = [_kept(problem, text, wide) for text in _with_moved_literals(problem.keeps)]
    if margins.narrow or any(not torch.equal(actual, other) for other in (exact, *moved)):
        raise Unclear("the mask depends on rounding")
    return actual


def _kept(problem: Problem, text: str, tables: dict[str, Any]) -> torch.Tensor:
    mask: Kept = evaluate(text, problem, tables, meaning.NAMES)
    with torch.no_grad():
        keep = mask.keep(pairs(problem))
    if keep.dtype != torch.bool:
        raise Unclear(f"a mask of {keep.dtype}")
    if problem.requests:
        keep = keep & inside(problem)
    return keep.expand(problem.batch, problem.heads, problem.rows, problem.columns)


def _is_whole(text: str, tables: dict[str, Any]) -> bool:
    """Return True if a text computes with integers alone."""
    floats = any(isinstance(t, float) or is_float(t) for t in tables.values())
    return not floats and not any(mark in text for mark in ("torch", ".", "/ "))


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _wide(table: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Return a table in fp64, a new leaf where it was one."""
    if not is_float(table):
        return table
    return table.detach().to(dtype).requires_grad_(table.requires_grad)


def _with_moved_literals(text: str) -> Iterator[str]:
    """Yield a source text with its decimals a millionth larger, and smaller."""
    for factor in (1 + 1e-6, 1 - 1e-6):
        tree = ast.parse(text, mode="eval")
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=float() as value) if not (value * 1024).is_integer():
                    node.value = value * factor
                case _:
                    pass
        yield ast.unparse(tree)


class Margins(TorchFunctionMode):
    """Notices comparisons and roundings of floats that other arithmetic may decide otherwise."""

    NARROW = 1e-5
    COMPARE = frozenset(("lt", "le", "gt", "ge", "eq", "ne", "__lt__", "__le__", "__gt__",
                         "__ge__", "__eq__", "__ne__"))  # fmt: skip
    ROUND = frozenset(("floor", "ceil", "trunc", "round", "int", "long", "to"))
    DIVIDE = frozenset(("floor_divide", "__floordiv__", "remainder", "__mod__", "fmod", "div"))

    SHARE = frozenset(("maximum", "minimum", "max", "min"))

    def __init__(self) -> None:
        """`narrow` says whether any was seen, `tied` whether the larger or smaller of two equal
        values was, whose gradient PyTorch shares and kernels give to the first."""
        super().__init__()
        self.narrow = self.tied = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if args and any(is_float(one) for one in args):
            with torch.no_grad():
                if name in self.COMPARE:
                    self._look(args[0], args[1])
                elif name in self.ROUND and not _to_float(args, kwargs):
                    self._look(args[0], torch.round(args[0]))
                elif name in self.DIVIDE and (name != "div" or kwargs.get("rounding_mode")):
                    quotient = args[0] / args[1]
                    self._look(quotient, torch.round(quotient))
                elif name in self.SHARE and len(args) > 1 and is_float(args[1]):
                    self.tied |= bool((args[0] == args[1]).any())
        return func(*args, **kwargs)

    def _look(self, value: Any, other: Any) -> None:
        value, other = torch.as_tensor(value), torch.as_tensor(other)
        apart = (value - other).abs()
        near = apart <= self.NARROW * (1 + torch.maximum(value.abs(), other.abs()))
        self.narrow |= bool(((apart > 0) & near).any())


def _to_float(args: Any, kwargs: Any) -> bool:
    dtypes = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, torch.dtype)]
    return any(dtype.is_floating_point for dtype in dtypes)


def require_clear_score(problem: Problem, x: Inputs, tables: dict[str, Any]) -> None:
    """Raise Unclear where a score jumps within rounding, as floor(s) does."""
    raw = x.q.double() @ x.k.double().repeat_interleave(problem.heads // problem.heads_kv, 1).mT
    wide = {name: _wide(table) for name, table in tables.items()}
    with torch.no_grad(), default_dtype(torch.float64):

        def changed(text: str) -> torch.Tensor:
            made: Changed = evaluate(text, problem, wide, meaning.NAMES)
            return torch.as_tensor(made.change(raw * problem.factor, pairs(problem)))

        with Margins() as margins:
            exact = changed(problem.score)
        moved = [changed(text) for text in _with_moved_literals(problem.score)]
    near = (torch.allclose(exact, other, atol=1e-3, rtol=1e-3) for other in moved)
    if margins.narrow or not all(near):
        raise Unclear("the score depends on rounding")
    if margins.tied and problem.trained:
        raise Unclear("gradients hang on which of two equal values is taken")


def dropped(problem: Problem) -> torch.Tensor | None:
    """Return the factor of each pair's weight, (batch, heads, rows, columns), with PyTorch seeded
    by the problem's seed; None if nothing is dropped."""
    if not problem.dropout:
        return None
    torch.manual_seed(problem.seed)
    drawn = Dropout.drawn(problem.dropout, torch.device("cpu"))
    if not problem.requests:
        return drawn.factors(problem.batch, problem.heads, problem.rows, problem.columns)
    queries, keys = (starts(each).tolist() for each in zip(*problem.requests, strict=True))
    whole = drawn.factors(1, problem.heads, queries[-1], keys[-1])[0]  # by places among all tokens
    values = whole.new_zeros((problem.batch, problem.heads, problem.rows, problem.columns))
    for value, i, j, (rows, columns) in zip(values, queries, keys, problem.requests, strict=False):
        value[:, :rows, :columns] = whole[:, i : i + rows, j : j + columns]
    return values


# --------------------------------------------------------------------------------------------------
# Attention


@dataclass(frozen=True)
class Noise:
    """Rounding errors as in kernels: fp32 in sums, the inputs' precision in stored values.

    `scale` 0 gives none.
    """

    narrow: float
    generator: torch.Generator
    scale: float = 1.0
    single: float = 2.0**-24

    def of(self, value: torch.Tensor, size: torch.Tensor, *, stored: bool = False) -> torch.Tensor:
        """Return a value with an error in proportion to a size; an infinite one has none."""
        if not self.scale:
            return value
        unit = self.single + (self.narrow if stored else 0.0)
        moved = torch.randn(value.shape, generator=self.generator, dtype=torch.float64)
        return value + self.scale * unit * moved.to(value.dtype) * size.nan_to_num(posinf=0.0)

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.of(a @ b, a.abs() @ b.abs() if self.scale else a)


NONE = Noise(0.0, torch.Generator(), 0.0)


class Roundings(TorchFunctionMode):
    """Gives what a score's function computes the rounding errors that other arithmetic would make.

    What follows multiplies them as its slope says: a cosine of a large argument, by as much as the
    argument is rounded. An operation whose result is exact has no error; one with a constant has an
    error that all elements share, as `x / 7` may be `x` times a seventh that is rounded once.
    """

    CONSTANT = frozenset(("div", "true_divide", "__truediv__", "__rtruediv__", "mul", "multiply",
                          "__mul__", "__rmul__", "pow", "__pow__", "__rpow__"))  # fmt: skip

    POWERS = frozenset(("pow", "__pow__", "__rpow__"))

    def __init__(self, noise: Noise) -> None:
        """`noise` is the size of an error."""
        super().__init__()
        self._noise = noise

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        actual = func(*args, **kwargs)
        if not is_float(actual):
            return actual
        with torch.no_grad(), default_dtype(torch.float64):
            exact = func(*map(_widened, args), **{k: _widened(v) for k, v in kwargs.items()})
            rounded = actual != exact
            size = actual.abs().nan_to_num(posinf=0.0) * rounded
            if func.__name__ in self.POWERS:  # computed as 2 to a number that is rounded
                size *= 1 + actual.abs().log2().nan_to_num(0, 0, 0).abs()
            shared = torch.zeros(())
            if func.__name__ in self.CONSTANT and any(isinstance(v, int | float) for v in args):
                shared = self._noise.of(shared, torch.ones(()))
            error = self._noise.of(torch.zeros_like(size), size) + shared * size
        return actual + error.to(actual.dtype)


def _widened(value: Any) -> Any:
    return value.detach().double() if is_float(value) else value


NARROW = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 0.0}
SAMPLES = 4
ROOM = 4.0
"""Errors may be as large as the largest of some samples, times this."""


def reference(
    problem: Problem,
    x: Inputs,
    dlse: torch.Tensor | None,
    keep: torch.Tensor,
    factors: torch.Tensor | None,
    tables: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    noise: Noise = NONE,
) -> Results:
    """Return out, lse and all gradients: dq, dk, dv and `d<name>` of trained tables.

    `factors` are those that weights are multiplied by. Computes in `dtype`; with noise, the score's
    own function in fp32, with its Roundings.
    """
    x, group = x.to(dtype), problem.heads // problem.heads_kv
    k, v = (one.repeat_interleave(group, 1) for one in (x.k, x.v))
    inner = torch.float32 if noise.scale else dtype
    tables = {name: _wide(table, inner) for name, table in tables.items()}
    made: Changed = evaluate(problem.score or "Changed()", problem, tables, meaning.NAMES)
    sink = made.sink

    def scores() -> tuple[torch.Tensor, ...]:
        """Return raw scores, a leaf, changed ones, and the logits of what is kept."""
        raw = noise.product(x.q, k.mT) * problem.factor
        changed = raw = raw.to(inner).requires_grad_()
        if problem.score:
            errors = Roundings(noise) if noise.scale else contextlib.nullcontext()
            with default_dtype(torch.promote_types(inner, torch.float32)), errors:
                changed = torch.as_tensor(made.change(raw, pairs(problem))).expand(raw.shape)
        logits = changed.detach().to(dtype).masked_fill(~keep, -INF)
        return raw, changed, noise.of(logits, logits.abs())

    raw, changed, logits = scores()
    lse = logits.logsumexp(-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.detach().to(dtype)[:, None])
    lse = noise.of(lse, lse.abs() + 1)
    finite = lse.masked_fill(lse == -INF, 0.0)
    drop = torch.ones(()).to(dtype) if factors is None else factors.to(dtype)
    p = (logits - finite[..., None]).exp()
    p = noise.of(p, p, stored=True)
    out = noise.product(p * drop, v)
    out = noise.of(out, out.abs(), stored=True)
    results = {"out": out, "lse": lse}
    if not problem.backward:
        return only(problem, results)
    if noise.scale:  # a backward computes scores anew, with other errors than lse has
        raw, changed, logits = scores()
        p = (logits - finite[..., None]).exp()
        p = noise.of(p, p, stored=True)
    delta = noise.of((x.dout * out).sum(-1), (x.dout * out).abs().sum(-1))
    if dlse is not None:
        delta = delta - dlse.to(dtype)
    ds = p * (drop * noise.product(x.dout, v.mT) - delta[..., None])
    leaves = [tables[name] for name in problem.trained]
    draw, *rest = _grads(changed, [raw, *leaves], noise.of(ds, ds.abs()).to(changed.dtype))
    draw = noise.of(draw.to(dtype), draw.abs().to(dtype), stored=True)
    dk, dv = noise.product(draw.mT, x.q), noise.product((p * drop).mT, x.dout)
    grouped = (problem.batch, problem.heads_kv, group, problem.columns, -1)
    results |= {
        "dq": noise.product(draw, k) * problem.factor,
        "dk": dk.view(grouped).sum(2) * problem.factor,
        "dv": dv.view(grouped).sum(2),
    }
    results |= {name: noise.of(one, one.abs(), stored=True) for name, one in results.items()}
    for name, leaf, gradient in zip(problem.trained, leaves, rest, strict=True):
        if leaf is sink:
            weights = (leaf.detach().to(dtype)[:, None] - finite).exp()
            gradient = -(weights * delta).masked_fill(lse == -INF, 0.0).sum((0, 2))
        results[f"d{name}"] = gradient.to(dtype)
    return only(problem, results)


def _grads(y: torch.Tensor, leaves: list[torch.Tensor], dy: torch.Tensor) -> list[torch.Tensor]:
    grads = (
        torch.autograd.grad(y, leaves, dy, allow_unused=True)
        if y.requires_grad
        else [None] * len(leaves)
    )
    return [
        torch.zeros_like(leaf) if one is None else one
        for leaf, one in zip(leaves, grads, strict=True)
    ]


def floors(
    problem: Problem,
    x: Inputs,
    dlse: torch.Tensor | None,
    keep: torch.Tensor,
    factors: torch.Tensor | None,
    tables: dict[str, Any],
    exact: Results,
) -> dict[str, float]:
    """Return how far rounding alone may move each result."""
    given = (problem, x, dlse, keep, factors, tables)
    largest = dict.fromkeys(exact, 0.0)
    for seed in range(SAMPLES):
        noise = Noise(NARROW[problem.dtype], torch.Generator().manual_seed(seed))
        rounded = reference(*given, noise=noise)
        require_numbers(problem, rounded)  # in fp32 a factor may vanish, and -inf * 0 is NaN
        for name, tensor in rounded.items():
            apart = (tensor - exact[name]).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
            largest[name] = max(largest[name], ROOM * float(apart.max()))
    return largest


def require_numbers(problem: Problem, exact: Results) -> None:
    """Raise Unclear for results that are no numbers, as of the logarithm of a negative one."""
    for name, tensor in exact.items():
        good = tensor.isfinite() | (tensor == -INF) if name == "lse" else tensor.isfinite()
        if not good.all():
            raise Unclear(f"{name} is not finite")
