"""Interval arithmetic over whole tiles: what a mask expression can be anywhere inside a tile.

An interval holds every value that `evaluation.points` gives for a pair of the tile: both take the
same operations in the same order, and rounding is monotone. The ends are not-a-number where a value
of the tile may be: the truth of what depends on it stays open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch

from tilegen.masks.language.bounds import (
    LARGEST,
    MAX_LENGTH,
    Interval,
    Ranges,
    increasing,
    limits,
    single,
)
from tilegen.masks.language.elements import BOUNDS
from tilegen.masks.language.evaluation import (
    Domain,
    Walk,
    bits_of,
    clamp_max,
    clamp_min,
    floor_divide,
    read,
    wrapped,
)
from tilegen.masks.language.expr import FIRST, LAST, SEQLEN_KV, SEQLEN_Q, B, Expr, H, K, Q, slot_of
from tilegen.masks.language.extremes import BoxExtremes
from tilegen.masks.language.functions import ELEMENTARY

Tables = dict[tuple[int, tuple[int, ...]], BoxExtremes]
"""Extremes of captured tensors by the identity of the tensor and by dimensions; all evaluations of
one mask share them."""


@dataclass(frozen=True)
class Verdict:
    """Whether a condition surely holds, or surely fails, for all pairs of a tile."""

    always: torch.Tensor
    never: torch.Tensor


def tile_bounds(
    captured: Sequence[torch.Tensor],
    values: Mapping[Expr, Interval],
    device: torch.device,
    tables: Tables,
) -> Walk:
    """Return the walk that computes intervals and verdicts, one per tile; `values` stands for the
    symbols."""
    return Walk(intervals(tables), captured, values.get, device)


def _constant(value: torch.Tensor) -> Interval | Verdict:
    return Verdict(value, ~value) if value.dtype == torch.bool else single(value)


def _unknown(*args: Any) -> Interval:
    """Return the bounds of any other function: how it is rounded may depend on where in a tensor
    its argument stands."""
    return _anything(reduce(torch.add, (one.lo for one in args if isinstance(one, Interval))))


def whole(value: Interval) -> Interval:
    """Return the integers that numbers are rounded to."""
    if not value.is_single:  # what is not a number may become any integer
        value = Interval(value.lo.nan_to_num(-LARGEST), value.hi.nan_to_num(LARGEST))
    return increasing(lambda end: end.double().clamp(-LARGEST, LARGEST).long(), value)


def _add(left: Interval, right: Interval) -> Interval:
    return _unless_wrapped(increasing(torch.add, left, right), _size(left) + _size(right))


def _divide(left: Interval, right: Interval) -> Interval:
    quotient = _RULES.hull([a / b for a in left.ends for b in right.ends])
    if right.is_single:
        return quotient
    has_one_sign = (right.lo > 0) | (right.hi < 0)
    return _RULES.either(has_one_sign, quotient, _anything(quotient.lo))


def _wrapped(dtype: str, value: Interval) -> Interval:
    if value.is_single:
        return single(wrapped(dtype, value.lo))
    low, high = BOUNDS[dtype]
    fits = (value.lo >= low) & (value.hi <= high)
    ends = (torch.full_like(value.lo, end) for end in (low, high))
    return _RULES.either(fits, value, Interval(*ends))


def _root(value: Interval) -> Interval:  # which rounds exactly
    negative = value.lo < 0
    root = increasing(lambda end: end.clamp(min=0).sqrt(), value)
    return _RULES.either(negative, _anything(value.lo), root)


def _choice(condition: Verdict, left: Interval, right: Interval) -> Interval:
    undecided = _RULES.hull([*left.ends, *right.ends])
    return _RULES.either(condition.always, left, _RULES.either(condition.never, right, undecided))


def _read(tables: Tables, tensor: torch.Tensor, indices: list[Interval]) -> Interval:
    boxed = tuple(dim for dim, index in enumerate(indices) if not index.is_single)
    if not boxed or not tensor.numel():
        return single(read(tensor, [index.lo for index in indices]))
    first: list[torch.Tensor] = []
    last: list[torch.Tensor] = []
    everywhere = beyond = torch.zeros((), dtype=torch.bool, device=tensor.device)
    for index, size in zip(indices, tensor.shape, strict=True):
        wraps = index.hi < 0
        lo, hi = (torch.where(wraps, end + size, end) for end in (index.lo, index.hi))
        # Both ends of a range around 0 are inside the tensor, at its two ends.
        everywhere = everywhere | ((lo < 0) & (hi >= 0))
        beyond = beyond | (lo < 0) | (hi >= size)
        first.append(lo.clamp(0, size - 1))
        last.append(hi.clamp(0, size - 1))
    key = (id(tensor), boxed)
    if key not in tables:
        tables[key] = BoxExtremes(tensor, boxed)
    table = tables[key]
    # Ranges that are not used must not make the others' blocks large.
    last = [torch.where(everywhere, lo, hi) for lo, hi in zip(first, last, strict=True)]
    low, high = table.of(
        [first[dim] for dim in range(tensor.dim()) if dim not in boxed],
        [first[dim] for dim in boxed],
        [last[dim] for dim in boxed],
    )
    smallest, largest = table.everywhere
    low, high = torch.where(everywhere, smallest, low), torch.where(everywhere, largest, high)
    if not low.is_floating_point():
        low, high = low.long(), high.long()
    return Interval(
        torch.where(beyond, low.clamp(max=0), low), torch.where(beyond, high.clamp(min=0), high)
    )


def _size(value: Interval) -> torch.Tensor:
    """Return the largest magnitude in an interval, in double, which no sum or product leaves."""
    return torch.maximum(value.lo.double().abs(), value.hi.double().abs())


def _unless_wrapped(interval: Interval, size: torch.Tensor) -> Interval:
    """Return an interval of integers, or all of them where their `size` may leave 64 bits."""
    if interval.lo.is_floating_point():
        return interval
    wraps = size >= LARGEST
    if not bool(wraps.any()):
        return interval
    # The least integer has no absolute value.
    largest = torch.full_like(interval.lo, torch.iinfo(torch.int64).max)
    return _RULES.either(wraps, Interval(-largest, largest), interval)


def _anything(like: torch.Tensor) -> Interval:
    """Return the interval of values that may be NaN."""
    unknown = torch.full_like(like, torch.nan)
    return Interval(unknown, unknown.clone())


class _Tiles(Ranges):
    """The rules over tensors of 64-bit integers, or of floats, one element per tile."""

    minimum = staticmethod(torch.minimum)
    maximum = staticmethod(torch.maximum)
    like = staticmethod(torch.full_like)
    where = staticmethod(torch.where)
    floor_divide = staticmethod(floor_divide)
    bits_of = staticmethod(bits_of)

    @staticmethod
    def ones(value: torch.Tensor) -> torch.Tensor:
        for shift in (1, 2, 4, 8, 16, 32):
            value = value | (value >> shift)
        return value

    def mul(self, left: Interval, right: Interval) -> Interval:
        return _unless_wrapped(super().mul(left, right), _size(left) * _size(right))

    def power(self, base: Interval, exponent: int) -> Interval:
        return _unless_wrapped(super().power(base, exponent), _size(base) ** exponent)

    def bits(self, operation: str, left: Interval, right: Interval) -> Interval:
        result = super().bits(operation, left, right)
        if operation == "shl" and not result.is_single:
            return _unless_wrapped(result, _size(left) * 2.0 ** _size(self.shifts(right)))
        return result if result.is_single else _unless_wrapped(result, _size(result))


_RULES = _Tiles()


def intervals(tables: Tables) -> Domain:
    """Return the domain of intervals of numbers and verdicts of truths."""
    return {**_INTERVALS, "read": partial(_read, tables)}


def _cast(value: Interval, dtype: torch.dtype) -> Interval:
    if dtype == torch.int64:
        return whole(value)
    return increasing(lambda end: end.to(dtype), value)


def _sign(value: Interval) -> Interval:
    if value.is_single:
        return single(value.lo.sign())
    # The sign of NaN is 0, and that of an end that may be NaN is any.
    lo, hi = value.lo.sign(), value.hi.sign()
    return Interval(lo.masked_fill(value.lo.isnan(), -1), hi.masked_fill(value.hi.isnan(), 1))


def _negative(value: Interval) -> Interval:
    return single(-value.lo) if value.is_single else Interval(-value.hi, -value.lo)


_INTERVALS: Domain = {
    "constant": _constant,
    "cast": _cast,
    "wrap": _wrapped,
    "bits": _RULES.bits,
    **dict.fromkeys(("pow", *ELEMENTARY), _unknown),
    "add": _add,
    "neg": _negative,
    "mul": _RULES.mul,
    "div": _divide,
    "power": _RULES.power,
    "sqrt": _root,
    "floordiv": _RULES.floordiv,
    "mod": _RULES.mod,
    "max": partial(increasing, torch.maximum),
    "min": partial(increasing, torch.minimum),
    "clamp_min": partial(increasing, clamp_min),
    "clamp_max": partial(increasing, clamp_max),
    "abs": _RULES.abs,
    "sign": _sign,
    "floor": partial(increasing, torch.floor),
    "where": _choice,
    "and": lambda a, b: Verdict(a.always & b.always, a.never | b.never),
    "or": lambda a, b: Verdict(a.always | b.always, a.never & b.never),
    "not": lambda a: Verdict(a.never, a.always),
    "lt": lambda a, b: Verdict(a.hi < b.lo, a.lo >= b.hi),
    "le": lambda a, b: Verdict(a.hi <= b.lo, a.lo > b.hi),
    "eq": lambda a, b: Verdict((a.lo == b.hi) & (a.hi == b.lo), (a.hi < b.lo) | (a.lo > b.hi)),
}


# --------------------------------------------------------------------------------------------------
# Integers of kernels, in 32 or 64 bits


Bounds = tuple[int, int]
"""Smallest and largest value, both inclusive."""

INT32: Bounds = BOUNDS["int32"]
ANYTHING: Bounds = (-LARGEST, LARGEST)
"""Bounds of integers of which nothing is known."""
REALS = (-math.inf, math.inf)
KNOWN: dict[Expr | int, Bounds] = {
    **{symbol: (0, MAX_LENGTH - 1) for symbol in (Q, K, FIRST, LAST)},
    **{symbol: (1, MAX_LENGTH) for symbol in (SEQLEN_Q, SEQLEN_KV)},
    **{symbol: (0, 2**31 - 1) for symbol in (B, H)},
}
"""Bounds of symbols."""


class Sizes:
    """Bounds of the integers in a kernel: those of one tile that holds all positions of the longest
    sequences."""

    def __init__(self, known: Mapping[Expr | int, Bounds], wide: set[int]) -> None:
        """`known` bounds symbols, and by slot the elements of captured tensors; those in `wide`
        slots have 64 bits."""
        self._known = KNOWN | dict(known)
        self._wide = wide
        self._bounds = Walk(intervals({}), (), self._of_leaf, torch.device("cpu"))

    def _of_leaf(self, expr: Expr) -> Interval:
        name = slot_of(expr) if expr.op == "load" else expr
        low, high = self._known.get(name, ANYTHING if expr.is_int else REALS)
        if expr.is_int:
            least, most = limits(expr)
            low, high = max(low, least), min(high, most)
        return Interval(*(torch.tensor(end, device="cpu") for end in (low, high)))

    def bounds(self, expr: Expr) -> Bounds:
        """Return the bounds of a number."""
        ends = whole(self._bounds(expr))
        return int(ends.lo), int(ends.hi)

    def is_natural(self, expr: Expr) -> bool:
        """Return whether an integer is surely not negative, as clipped indices are."""
        return limits(expr)[0] >= 0 or self.bounds(expr)[0] >= 0

    def is_positive(self, expr: Expr) -> bool:
        """Return whether an integer is surely above 0."""
        return limits(expr)[0] > 0 or self.bounds(expr)[0] > 0

    def fits(self, expr: Expr) -> bool:
        """Return whether an integer surely fits into 32 bits."""
        low, high = self.bounds(expr)
        return INT32[0] <= low and high <= INT32[1]

    def is_wide(self, expr: Expr) -> bool:
        """Return whether the source of an integer has 64 bits."""
        match expr.op:
            case "const":
                return not self.fits(expr)
            case "symbol":
                return expr in (B, H)
            case "load":
                return slot_of(expr) in self._wide
            case "add" | "mul" | "power" | "shl" if not self.fits(expr):
                return True
            case "where":
                return any(map(self.is_wide, expr.args[1:]))
            case "cast" if expr.dtype in BOUNDS:
                return False
            case "cast":  # of a float
                return True
            case _:
                return any(map(self.is_wide, expr.args))
