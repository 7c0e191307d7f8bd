"""Masks and scores compute in PyTorch's dtypes: narrow integers wrap, bools are no numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import tilegen
from tilegen.errors import Unsupported
from tilegen.masks.language.evaluation import evaluate
from tilegen.masks.mask import Mask

N = 40
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*INTEGERS, torch.bool, torch.float16, torch.bfloat16, torch.float32)
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **{
        name: getattr(operator, name)
        for name in ("add", "sub", "mul", "floordiv", "mod", "and_", "or_", "xor", "lt", "eq")
    },
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "where": lambda x, y: torch.where(x > y, x, y + y),
    "maximum": torch.maximum,
    "square": lambda x, y: (x - y) ** 2,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}
UNARY: dict[str, Callable[[Any], Any]] = {
    "invert": operator.invert,
    "neg": operator.neg,
    "abs": abs,
    **{str(one).removeprefix("torch."): (lambda x, to=one: x.to(to)) for one in INTEGERS},
    "bool": lambda x: x.bool() + x.bool(),
    "byte": lambda x: x.byte() - x.byte() - 1,
    "times": lambda x: 3 * x - 20,
    "few": lambda x: x > 300,
}


def table(dtype: torch.dtype, seed: int, *, divides: bool = False) -> torch.Tensor:
    """Return elements over the whole range of integers of a dtype, or small multiples of a half."""
    random = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(N, generator=random) < 0.5
    if dtype.is_floating_point:
        values = torch.randint(-6, 7, (N,), generator=random) / 2
    else:
        # Squares of those of 64 bits have as many.
        info = torch.iinfo(torch.int16 if dtype == torch.int64 else dtype)
        values = torch.randint(info.min // 2, info.max // 2, (N,), generator=random) * 2 + 1
        values[:4] = torch.tensor([info.min, info.max, 3, 5])
        values[4:8] = torch.arange(4)
    return (torch.where(values == 0, 1, values) if divides else values).to(dtype)


def check(op: Callable[..., Any], *tables: torch.Tensor) -> None:
    """Compare a mask and a score of an operation with PyTorch: equal, or refused as there."""
    rows, columns = torch.arange(N)[:, None], torch.arange(N)[None]

    def at(q: Any, k: Any) -> Any:
        return op(*(one[index] for one, index in zip(tables, (q, k), strict=False)))

    try:
        expected = at(rows, columns).expand(N, N)
    except (RuntimeError, TypeError):
        with pytest.raises(Unsupported, match="expected an operation that PyTorch has, got "):
            tilegen.predicate(lambda b, h, q, k: at(q, k) > 0)
        return

    def keep(b: Any, h: Any, q: Any, k: Any) -> Any:
        return at(q, k) == expected[q, k]

    assert create_mask(keep, None, None, N, N, device="cpu").all()
    assert kept(tilegen.predicate(keep)).all()
    if expected.dtype != torch.bool:
        score = tilegen.score(lambda s, b, h, q, k: s + at(q, k))
        assert torch.allclose(changed(score), expected.float(), rtol=1e-6, atol=0)


def kept(mask: Mask, length: int = N) -> torch.Tensor:
    index = torch.arange(length)
    return mask.kept(index[:, None], index[None], length, length)


def changed(score: Any) -> torch.Tensor:
    zero, index = torch.zeros((), dtype=torch.int64), torch.arange(N)
    pair = {"b": zero, "h": zero, "q": index[:, None], "k": index[None]}
    s = torch.zeros(N, N)
    return evaluate(score.form.expression(), score.captured, s=s, seqlen_q=N, seqlen_kv=N, **pair)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_two_values_of_a_dtype(name: str, dtype: torch.dtype) -> None:
    check(BINARY[name], table(dtype, 0), table(dtype, 1, divides=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_a_value_of_a_dtype(name: str, dtype: torch.dtype) -> None:
    check(UNARY[name], table(dtype, 0))


LENGTH = 330
I8, U8 = table(torch.int8, 2), table(torch.uint8, 3)
ROWS = torch.randint(-128, 128, (LENGTH, 3), dtype=torch.int8, generator=torch.manual_seed(0))
HUNDREDS = torch.full((LENGTH,), 100, dtype=torch.int8)
UP = torch.arange(LENGTH).to(torch.uint8)
LARGE = torch.full((LENGTH,), 50000, dtype=torch.int32)
LOW = torch.arange(LENGTH) < 32
NARROW, BYTE = torch.tensor(100, dtype=torch.int8), torch.tensor(200, dtype=torch.uint8)
SHIFTS = torch.tensor([0, 1, 7, 8, 31, 32, 62, 63, 64, -1, -64]).repeat(30)


def doubled(x: Any) -> Any:
    x *= 2
    return x


MASKS: dict[str, Callable[[Any, Any], Any]] = {
    "int8 sums": lambda q, k: HUNDREDS[q] + HUNDREDS[k] > 0,
    "uint8 distances": lambda q, k: UP[q] - UP[k] <= 10,
    "sums of bools": lambda q, k: LOW[q] + LOW[k] > 1,
    "sums of comparisons": lambda q, k: ((q > 3) + (k > 5)) == 2,
    "a sum of many": lambda q, k: sum([q > 3, k > 5, q > k]) == 2,
    "products of bools": lambda q, k: (LOW[q] * LOW[k]) | (q == k),
    "short": lambda q, k: (q * 1000).short() > 0,
    "int": lambda q, k: (q * 100_000_000).int() > 0,
    "bytes": lambda q, k: q.to(torch.uint8) == k.to(torch.uint8),
    "type_as": lambda q, k: q.type_as(UP[k]) == k.to(UP),
    "int32 products": lambda q, k: LARGE[q] * LARGE[k] > 0,
    "int32 beside a number": lambda q, k: LARGE[q] * 50000 > k,
    "an int8 beside an index": lambda q, k: HUNDREDS[q] + k > 120,
    "a number that does not fit": lambda q, k: UP[q] // 300 == UP[k] // 300,
    "int8 tensors without dimensions": lambda q, k: NARROW + HUNDREDS[k] > q - 90,
    "a uint8 beside an int8": lambda q, k: BYTE + HUNDREDS[k] > 250 + q,
    "rows beside an index": lambda q, k: (ROWS[q] == k).any(-1),
    "rows beside a row": lambda q, k: (ROWS[q] + ROWS[k] > 0).all(-1),
    "sums of rows": lambda q, k: ROWS[q].sum() + ROWS[k].sum() > 0,
    "narrow sums of rows": lambda q, k: ROWS[q].sum(dtype=torch.int8) < ROWS[k].prod(),
    "largest of rows": lambda q, k: ROWS[q].amax() - ROWS[k].amin() > 0,
    "scalar products": lambda q, k: torch.dot(ROWS[q], ROWS[k]) > 0,
    "counts": lambda q, k: (ROWS[q] > 0).sum() == (ROWS[k] > 0).sum(),
    "any of bools": lambda q, k: (ROWS[q] > ROWS[k]).amax() & (q >= k),
    "narrow rows as wide": lambda q, k: (ROWS[q].long() * ROWS[k].to(torch.int16)).sum() > 0,
    "shifts": lambda q, k: (q << SHIFTS[k]) > (k >> SHIFTS[q]),
    "shifts of int32": lambda q, k: (LARGE[q] << SHIFTS[k].int()) > (LARGE[k] >> SHIFTS[q].int()),
    "shifts by a distance": lambda q, k: (1 << (q - k)) > 8,
    "powers of two": lambda q, k: 2 ** (q - k) > 8,
    "a choice between bools": lambda q, k: (q > k).where(k % 3 == 0, q < 100),
    "in place": lambda q, k: doubled(HUNDREDS[q] - k.to(torch.int8)) > 0,
    "a wide row beside an index": lambda q, k: torch.where(q > k, ROWS[q], k).amax() > 120,
    "a sign of narrow": lambda q, k: torch.sign(UP[q] - UP[k]) > 0,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_agree_with_create_mask(name: str) -> None:
    fn = MASKS[name]
    expected = create_mask(lambda b, h, q, k: fn(q, k), None, None, LENGTH, LENGTH, device="cpu")[
        0, 0
    ]
    mask = tilegen.predicate(lambda b, h, q, k: fn(q, k))
    assert torch.equal(kept(mask, LENGTH).expand(LENGTH, LENGTH), expected)
