"""Bounds of integers, in formulas and in tiles, hold every value, by brute force."""

from __future__ import annotations

from functools import partial
from itertools import product
from random import Random
from typing import Any

import pytest
import torch

from tests.support.expression_trees import integer, t1
from tilegen.masks.language.algebra import as_expr, cast, where
from tilegen.masks.language.bounds import LARGEST, Interval, Ranges, bounded, limits
from tilegen.masks.language.elements import BOUNDS
from tilegen.masks.language.evaluation import points
from tilegen.masks.language.expr import SEQLEN_KV, B, Expr, H, K, Q
from tilegen.masks.language.functions import bits
from tilegen.masks.language.integers import BITS, bits_of
from tilegen.masks.language.value_bounds import Sizes, intervals, tile_bounds

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", BITS)
def test_bits_of_tiles(name: str) -> None:
    """The ends of intervals of both signs, narrow and wide."""
    random = Random(0)
    compute = intervals({})["bits"]
    for _ in range(400):
        left = sorted(random.randint(-40, 200) for _ in range(2))
        right = sorted(random.randint(-40, 200) for _ in range(2))
        if name in ("shl", "shr"):
            right = sorted(random.randint(0, 9) for _ in range(2))
        if random.random() < 0.5:
            left[1] = min(left[1], left[0] + random.randint(0, 9))
        given = (Interval(*(torch.tensor([end]) for end in ends)) for ends in (left, right))
        actual = compute(name, *given)
        values = _all(name, left, right)
        assert int(actual.lo) <= min(values) <= max(values) <= int(actual.hi), (left, right)


def _all(name: str, left: list[int], right: list[int]) -> list[int]:
    every = product(range(left[0], left[1] + 1), range(right[0], min(right[1], right[0] + 20) + 1))
    return [bits_of(name, a, b) for a, b in every]


RULES: dict[str, Any] = {
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b if b else a,
    "mod": lambda a, b: a % b if b else 0,
    **{name: partial(bits_of, name) for name in BITS},
}


@pytest.mark.parametrize("name", RULES)
def test_rules_over_numbers_of_python(name: str) -> None:
    """Ends of both signs, some of them infinite: every value lies within, and some are reached."""
    random, ranges, reached = Random(1), Ranges(), 0
    rule = partial(ranges.bits, name) if name in BITS else getattr(ranges, name)
    for _ in range(400):
        ends = [sorted(random.randint(-20, 40) for _ in range(2)) for _ in range(2)]
        some = [range(low, high + 1) for low, high in ends]
        values = [RULES[name](a, b) for a, b in product(*some)]
        low, high = rule(*(Interval(*pair) for pair in ends))
        assert low <= min(values) <= max(values) <= high, ends
        reached += low == min(values)
        open_ends = [Interval(low, random.choice([high, 2**1024])) for low, high in ends]
        low, high = rule(*open_ends)
        assert low <= min(values) <= max(values) <= high, open_ends
    assert reached > 20


def test_unbounded_values_stay_unbounded() -> None:
    """Bits of numbers of both signs can be any, and so can what is computed with them."""
    unbounded = bits("bitxor", K - Q, Q)
    tile = {Q: Interval(torch.tensor([0]), torch.tensor([1])), K: _single(0)}
    given = {Q: torch.tensor([0, 1]), K: torch.tensor([0])}
    for expr in (
        unbounded + 3,
        2 * unbounded,
        unbounded - K,
        bits("shl", unbounded, 2 * Q),
        unbounded // (Q + 1) - 5,
        abs(unbounded) + Q,
    ):
        values = points([], given, CPU)(expr)
        actual = tile_bounds([], tile, CPU, {})(expr)
        assert int(actual.lo) <= int(values.min()) <= int(values.max()) <= int(actual.hi), expr


def _single(value: int) -> Interval:
    number = torch.tensor([value])
    return Interval(number, number)


@pytest.mark.parametrize("seed", range(120))
def test_integer_formulas(seed: int) -> None:
    """Positions are below 12, so that few of the bounds are reached, and none is passed."""
    random = Random(seed)
    expr: Any = _with_bits(random, integer(random, 3))
    axes = [torch.arange(n).view([-1 if i == axis else 1 for i in range(4)])
            for axis, n in enumerate((2, 3, 12, 12))]  # fmt: skip
    captured = [torch.zeros(3, 10), torch.arange(7) % 5 - 2, torch.arange(5) % 3 == 0]
    given = dict(zip((B, H, Q, K), axes, strict=True)) | {SEQLEN_KV: torch.tensor(12)}
    values = points(captured, given, CPU)(expr).clamp(-LARGEST, LARGEST)  # beyond: anything
    known: dict[Any, tuple[int, int]] = {B: (0, 1), H: (0, 2), Q: (0, 11), K: (0, 11)}
    known |= {SEQLEN_KV: (12, 12), 1: (-2, 2)}
    known |= {2: (0, 1)}
    for low, high in (limits(expr), bounded(expr, 12)):
        assert low <= int(values.min()) <= int(values.max()) <= high
    low, high = Sizes(known, set()).bounds(expr)
    assert low <= int(values.min()) <= int(values.max()) <= high
    tile = {
        symbol: Interval(torch.tensor([low]), torch.tensor([high]))
        for symbol, (low, high) in known.items()
        if symbol in given
    }
    actual = tile_bounds(captured, tile, CPU, {})(expr)
    assert int(actual.lo) <= int(values.min()) <= int(values.max()) <= int(actual.hi)


def _with_bits(random: Random, expr: Expr) -> Expr:
    operation = random.choice([*BITS, *BOUNDS, None])
    if operation is None:
        return expr
    if operation in BOUNDS:
        narrow = cast(expr * random.choice([1, 40, 9000]), operation)
        return (where(narrow, 1, 0) if operation == "bool" else narrow) + K
    if operation in ("shl", "shr"):
        return bits(operation, expr, random.choice([Q % 4, 9 * (K - Q), t1(K) * 33]))
    return bits(operation, expr, random.choice([K, -H - 1, as_expr(21)]))
