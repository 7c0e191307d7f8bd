"""Interval arithmetic over whole tiles: what a mask expression can be anywhere inside a tile.

An interval holds every value that `evaluation.points` gives for a pair of the tile: both take the
same operations in the same order, and rounding is monotone. The ends are not-a-number where a value
of the tile may be: the truth of what depends on it stays open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch

from tilegen.masks.language.elements import BOUNDS
from tilegen.masks.language.evaluation import (
    Domain,
    Walk,
    bits_of,
    clamp_max,
    clamp_min,
    floor_divide,
    nonzero,
    power,
    read,
    wrapped,
)
from tilegen.masks.language.expr import Expr
from tilegen.masks.language.extremes import BoxExtremes
from tilegen.masks.language.functions import ELEMENTARY
from tilegen.masks.language.integers import MAX_SHIFT
from tilegen.masks.language.limits import LARGEST

Tables = dict[tuple[int, tuple[int, ...]], BoxExtremes]
"""Extremes of captured tensors by the identity of the tensor and by dimensions; all evaluations of
one mask share them."""


@dataclass(frozen=True)
class Interval:
    """lo <= value <= hi, one element per tile. A value that is the same all over a tile has lo and
    hi the same object."""

    lo: torch.Tensor
    hi: torch.Tensor

    @property
    def is_single(self) -> bool:
        """Whether every tile has one value."""
        return self.lo is self.hi

    @property
    def ends(self) -> tuple[torch.Tensor, ...]:
        """Both bounds, or the one value."""
        return (self.lo,) if self.is_single else (self.lo, self.hi)


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
    return Verdict(value, ~value) if value.dtype == torch.bool else _single(value)


def _unknown(*args: Any) -> Interval:
    """Return the bounds of any other function: how it is rounded may depend on where in a tensor
    its argument stands."""
    return _anything(reduce(torch.add, (one.lo for one in args if isinstance(one, Interval))))


def whole(value: Interval) -> Interval:
    """Return the integers that numbers are rounded to."""
    if not value.is_single:  # what is not a number may become any integer
        value = Interval(value.lo.nan_to_num(-LARGEST), value.hi.nan_to_num(LARGEST))
    return _increasing(lambda end: end.double().clamp(-LARGEST, LARGEST).long(), value)


def _add(left: Interval, right: Interval) -> Interval:
    return _unless_wrapped(_increasing(torch.add, left, right), _size(left) + _size(right))


def _mul(left: Interval, right: Interval) -> Interval:
    return _unless_wrapped(
        _hull([a * b for a in left.ends for b in right.ends]),
        _size(left) * _size(right),
    )


def _divide(left: Interval, right: Interval) -> Interval:
    quotient = _hull([a / b for a in left.ends for b in right.ends])
    if right.is_single:
        return quotient
    has_one_sign = (right.lo > 0) | (right.hi < 0)
    return _where(has_one_sign, quotient, _anything(quotient.lo))


def _floor_divide(left: Interval, right: Interval) -> Interval:
    divisors = list(right.ends)
    if not right.is_single:  # those around 0 too; that one counts as 1
        ones = torch.ones_like(right.lo)
        divisors += [torch.clamp(end, right.lo, right.hi) for end in (-ones, ones)]
    return _hull([floor_divide(a, b) for a in left.ends for b in divisors])


def _remainder(left: Interval, right: Interval) -> Interval:
    zero = torch.zeros_like(right.lo)
    least, most = torch.minimum(right.lo + 1, zero), torch.maximum(right.hi - 1, zero)
    natural = (left.lo >= 0) & (right.lo >= 0)
    anything = Interval(least, torch.where(natural, torch.minimum(most, left.hi), most))
    if not right.is_single:
        return anything
    # Between two multiples of the divisor the remainder only increases.
    divisor = nonzero(right.lo)
    multiples = [floor_divide(end, divisor) * divisor for end in (left.lo, left.hi)]
    between = Interval(left.lo - multiples[0], left.hi - multiples[1])
    if left.is_single:
        return _single(between.lo)
    return _where(multiples[0] == multiples[1], between, anything)


def _bits(operation: str, left: Interval, right: Interval) -> Interval:
    compute = partial(bits_of, operation)
    if left.is_single and right.is_single:
        return _single(compute(left.lo, right.lo))
    if operation in ("shl", "shr"):
        shifts = [end.clamp(0, MAX_SHIFT) for end in right.ends]
        ends = [compute(a, b) for a in left.ends for b in shifts]
        # Shifts beyond either end, and the largest, clear the bits or leave the sign.
        beyond = (right.lo < 0) | (right.hi >= MAX_SHIFT)
        most = torch.full_like(right.lo, MAX_SHIFT + 1)
        last = [torch.where(beyond, compute(a, most), ends[0]) for a in left.ends]
        rests = _hull(ends + last)
        if operation == "shr":
            return rests
        return _unless_wrapped(rests, _size(left) * 2.0 ** _size(_hull(shifts)))
    # Above the highest bit in which its ends differ, all values of an interval are the same.
    open_left, open_right = (_ones(end.lo ^ end.hi) for end in (left, right))
    least = compute(left.lo & ~open_left, right.lo & ~open_right)
    most = compute(left.lo | open_left, right.lo | open_right)
    if operation == "bitxor":
        unknown = open_left | open_right
        least = compute(left.lo, right.lo) & ~unknown
        most = least | unknown
    # Where the sign is open, so is every bit that any end has below its sign.
    sizes = (end ^ (end >> 63) for end in (*left.ends, *right.ends))
    ones = _ones(reduce(torch.bitwise_or, sizes))
    either = _unless_wrapped(Interval(~ones, ones), ones.double())
    return _where((least >= 0) & (most < 0), either, Interval(least, most))


def _wrapped(dtype: str, value: Interval) -> Interval:
    if value.is_single:
        return _single(wrapped(dtype, value.lo))
    low, high = BOUNDS[dtype]
    fits = (value.lo >= low) & (value.hi <= high)
    ends = (torch.full_like(value.lo, end) for end in (low, high))
    return _where(fits, value, Interval(*ends))


def _power(base: Interval, exponent: int) -> Interval:
    base = base if exponent % 2 else _abs(base)
    powers = _increasing(lambda value: power(value, exponent), base)
    return _unless_wrapped(powers, _size(base) ** exponent)


def _root(value: Interval) -> Interval:  # which rounds exactly
    negative = value.lo < 0
    root = _increasing(lambda end: end.clamp(min=0).sqrt(), value)
    return _where(negative, _anything(value.lo), root)


def _abs(value: Interval) -> Interval:
    if value.is_single:
        return _single(value.lo.abs())
    outside = torch.maximum(value.lo, -value.hi)
    return Interval(outside.clamp(min=0), torch.maximum(-value.lo, value.hi))


def _choice(condition: Verdict, left: Interval, right: Interval) -> Interval:
    undecided = _hull([*left.ends, *right.ends])
    return _where(condition.always, left, _where(condition.never, right, undecided))


def _read(tables: Tables, tensor: torch.Tensor, indices: list[Interval]) -> Interval:
    boxed = tuple(dim for dim, index in enumerate(indices) if not index.is_single)
    if not boxed or not tensor.numel():
        return _single(read(tensor, [index.lo for index in indices]))
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


def _single(value: torch.Tensor) -> Interval:
    return Interval(value, value)


def _hull(values: Sequence[torch.Tensor]) -> Interval:
    if len(values) == 1:
        return _single(values[0])
    return Interval(reduce(torch.minimum, values), reduce(torch.maximum, values))


def _size(value: Interval) -> torch.Tensor:
    """Return the largest magnitude in an interval, in double, which no sum or product leaves."""
    return torch.maximum(value.lo.double().abs(), value.hi.double().abs())


def _ones(value: torch.Tensor) -> torch.Tensor:
    """Return a value with all bits set below its highest; -1 for a negative one."""
    for shift in (1, 2, 4, 8, 16, 32):
        value = value | (value >> shift)
    return value


def _unless_wrapped(interval: Interval, size: torch.Tensor) -> Interval:
    """Return an interval of integers, or all of them where their `size` may leave 64 bits."""
    if interval.lo.is_floating_point():
        return interval
    wraps = size >= LARGEST
    if not bool(wraps.any()):
        return interval
    # The least integer has no absolute value.
    largest = torch.full_like(interval.lo, torch.iinfo(torch.int64).max)
    return _where(wraps, Interval(-largest, largest), interval)


def _anything(like: torch.Tensor) -> Interval:
    """Return the interval of values that may be NaN."""
    unknown = torch.full_like(like, torch.nan)
    return Interval(unknown, unknown.clone())


def _increasing(function: Callable[..., torch.Tensor], *arguments: Interval) -> Interval:
    lo = function(*(argument.lo for argument in arguments))
    if all(argument.is_single for argument in arguments):
        return _single(lo)
    return Interval(lo, function(*(argument.hi for argument in arguments)))


def _where(condition: torch.Tensor, left: Interval, right: Interval) -> Interval:
    return Interval(
        torch.where(condition, left.lo, right.lo), torch.where(condition, left.hi, right.hi)
    )


def intervals(tables: Tables) -> Domain:
    """Return the domain of intervals of numbers and verdicts of truths."""
    return {**_INTERVALS, "read": partial(_read, tables)}


def _cast(value: Interval, dtype: torch.dtype) -> Interval:
    if dtype == torch.int64:
        return whole(value)
    return _increasing(lambda end: end.to(dtype), value)


def _sign(value: Interval) -> Interval:
    if value.is_single:
        return _single(value.lo.sign())
    # The sign of NaN is 0, and that of an end that may be NaN is any.
    lo, hi = value.lo.sign(), value.hi.sign()
    return Interval(lo.masked_fill(value.lo.isnan(), -1), hi.masked_fill(value.hi.isnan(), 1))


def _negative(value: Interval) -> Interval:
    return _single(-value.lo) if value.is_single else Interval(-value.hi, -value.lo)


_INTERVALS: Domain = {
    "constant": _constant,
    "cast": _cast,
    "wrap": _wrapped,
    "bits": _bits,
    **dict.fromkeys(("pow", *ELEMENTARY), _unknown),
    "add": _add,
    "neg": _negative,
    "mul": _mul,
    "div": _divide,
    "power": _power,
    "sqrt": _root,
    "floordiv": _floor_divide,
    "mod": _remainder,
    "max": partial(_increasing, torch.maximum),
    "min": partial(_increasing, torch.minimum),
    "clamp_min": partial(_increasing, clamp_min),
    "clamp_max": partial(_increasing, clamp_max),
    "abs": _abs,
    "sign": _sign,
    "floor": partial(_increasing, torch.floor),
    "where": _choice,
    "and": lambda a, b: Verdict(a.always & b.always, a.never | b.never),
    "or": lambda a, b: Verdict(a.always | b.always, a.never & b.never),
    "not": lambda a: Verdict(a.never, a.always),
    "lt": lambda a, b: Verdict(a.hi < b.lo, a.lo >= b.hi),
    "le": lambda a, b: Verdict(a.hi <= b.lo, a.lo > b.hi),
    "eq": lambda a, b: Verdict((a.lo == b.hi) & (a.hi == b.lo), (a.hi < b.lo) | (a.lo > b.hi)),
}
