"""Interval arithmetic over whole tiles: what a mask expression can be anywhere inside a tile.

An interval holds every value that `evaluation.Points` gives for a pair of the tile: both take the
same operations in the same order, and rounding is monotone. The ends are not-a-number where a value
of the tile may be: the truth of what depends on it stays open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import sympy
import torch

from tilegen.masks.language.evaluation import (
    Points,
    floor_divide,
    maximum,
    minimum,
    nonzero,
    power,
    read,
    wrapped,
)
from tilegen.masks.language.extremes import BoxExtremes
from tilegen.masks.language.nodes import MAX_SHIFT, Bits, BitXor, ShiftLeft, ShiftRight
from tilegen.masks.language.widths import Wrapped

LARGEST = 2**62
"""Largest integer that is bounded: beyond it sums and products may wrap around."""

Tables = dict[tuple[int, tuple[int, ...]], BoxExtremes]
"""Extremes of captured tensors by the identity of the tensor and by dimensions; all evaluations of
one mask share them."""


_INCREASING = (torch.floor, torch.sign, minimum, maximum)
"""Functions that never fall as an argument rises."""


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


class TileBounds(Points):
    """The walk of `Points` with intervals and verdicts, one per tile, in the place of numbers and
    truths: each method does with intervals what the function of its name does with tensors."""

    def __init__(
        self,
        captured: Sequence[torch.Tensor],
        values: Mapping[sympy.Symbol, Interval],
        device: torch.device,
        tables: Tables,
    ) -> None:
        super().__init__(captured, values, device)
        self._tables = tables

    def constant(self, value: torch.Tensor) -> Interval | Verdict:
        return Verdict(value, ~value) if value.dtype == torch.bool else _single(value)

    def apply(self, function: Callable[..., torch.Tensor], *args: Any) -> Any:
        if function in _INCREASING:
            return _increasing(function, *args)
        own = getattr(self, function.__name__, None)
        if own is None:
            # How another function is rounded may depend on where in a tensor its argument stands.
            return _anything(reduce(torch.add, (value.lo for value in args)))
        return own(*args)

    def to(self, value: Interval, dtype: torch.dtype) -> Interval:
        return _increasing(lambda end: end.to(dtype), value)

    def long(self, value: Interval) -> Interval:
        if not value.is_single:  # what is not a number may become any integer
            value = Interval(value.lo.nan_to_num(-LARGEST), value.hi.nan_to_num(LARGEST))
        return _increasing(lambda end: end.clamp(-LARGEST, LARGEST).long(), value)

    def add(self, left: Interval, right: Interval) -> Interval:
        return _unless_wrapped(_increasing(torch.add, left, right), _size(left) + _size(right))

    def mul(self, left: Interval, right: Interval) -> Interval:
        return _unless_wrapped(
            _hull([a * b for a in left.ends for b in right.ends]),
            _size(left) * _size(right),
        )

    def div(self, left: Interval, right: Interval) -> Interval:
        quotient = _hull([a / b for a in left.ends for b in right.ends])
        if right.is_single:
            return quotient
        has_one_sign = (right.lo > 0) | (right.hi < 0)
        return _where(has_one_sign, quotient, _anything(quotient.lo))

    def floor_divide(self, left: Interval, right: Interval) -> Interval:
        divisors = list(right.ends)
        if not right.is_single:  # those around 0 too; that one counts as 1
            one = torch.ones_like(right.lo)
            divisors += [torch.clamp(end, right.lo, right.hi) for end in (-one, one)]
        return _hull([floor_divide(a, b) for a in left.ends for b in divisors])

    def remainder(self, left: Interval, right: Interval) -> Interval:
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

    def bits(self, operation: type[Bits], left: Interval, right: Interval) -> Interval:
        compute = operation.of
        if left.is_single and right.is_single:
            return _single(compute(left.lo, right.lo))
        if operation in (ShiftLeft, ShiftRight):
            shifts = [end.clamp(0, MAX_SHIFT) for end in right.ends]
            ends = [compute(a, b) for a in left.ends for b in shifts]
            # Shifts beyond either end, and the largest, clear the bits or leave the sign.
            beyond = (right.lo < 0) | (right.hi >= MAX_SHIFT)
            most = torch.full_like(right.lo, MAX_SHIFT + 1)
            last = [torch.where(beyond, compute(a, most), ends[0]) for a in left.ends]
            found = _hull(ends + last)
            if operation is ShiftRight:
                return found
            return _unless_wrapped(found, _size(left) * 2.0 ** _size(_hull(shifts)))
        # Above the highest bit in which its ends differ, all values of an interval are the same.
        open_left, open_right = (_ones(end.lo ^ end.hi) for end in (left, right))
        least = compute(left.lo & ~open_left, right.lo & ~open_right)
        most = compute(left.lo | open_left, right.lo | open_right)
        if operation is BitXor:
            unknown = open_left | open_right
            least = compute(left.lo, right.lo) & ~unknown
            most = least | unknown
        # Where the sign is open, so is every bit that any end has below its sign.
        sizes = (end ^ (end >> 63) for end in (*left.ends, *right.ends))
        ones = _ones(reduce(torch.bitwise_or, sizes))
        either = _unless_wrapped(Interval(~ones, ones), ones.double())
        return _where((least >= 0) & (most < 0), either, Interval(least, most))

    def wrapped(self, kind: type[Wrapped], value: Interval) -> Interval:
        if value.is_single:
            return _single(wrapped(kind, value.lo))
        fits = (value.lo >= kind.low) & (value.hi <= kind.high)
        ends = (torch.full_like(value.lo, end) for end in (kind.low, kind.high))
        return _where(fits, value, Interval(*ends))

    def power(self, base: Interval, exponent: int) -> Interval:
        base = base if exponent % 2 else self.abs(base)
        found = _increasing(lambda value: power(value, exponent), base)
        return _unless_wrapped(found, _size(base) ** exponent)

    def sqrt(self, value: Interval) -> Interval:  # which rounds exactly
        negative = value.lo < 0
        root = _increasing(lambda end: end.clamp(min=0).sqrt(), value)
        return _where(negative, _anything(value.lo), root)

    def abs(self, value: Interval) -> Interval:
        if value.is_single:
            return _single(value.lo.abs())
        outside = torch.maximum(value.lo, -value.hi)
        return Interval(outside.clamp(min=0), torch.maximum(-value.lo, value.hi))

    def lt(self, left: Interval, right: Interval) -> Verdict:
        return Verdict(left.hi < right.lo, left.lo >= right.hi)

    def le(self, left: Interval, right: Interval) -> Verdict:
        return Verdict(left.hi <= right.lo, left.lo > right.hi)

    def eq(self, left: Interval, right: Interval) -> Verdict:
        return Verdict(
            (left.lo == right.hi) & (left.hi == right.lo),
            (left.hi < right.lo) | (left.lo > right.hi),
        )

    def logical_and(self, left: Verdict, right: Verdict) -> Verdict:
        return Verdict(left.always & right.always, left.never | right.never)

    def logical_or(self, left: Verdict, right: Verdict) -> Verdict:
        return Verdict(left.always | right.always, left.never & right.never)

    def logical_not(self, truth: Verdict) -> Verdict:
        return Verdict(truth.never, truth.always)

    def where(self, condition: Verdict, left: Interval, right: Interval) -> Interval:
        undecided = _hull([*left.ends, *right.ends])
        return _where(condition.always, left, _where(condition.never, right, undecided))

    def read(self, tensor: torch.Tensor, indices: list[Interval]) -> Interval:
        boxed = tuple(dim for dim, index in enumerate(indices) if not index.is_single)
        if not boxed or not tensor.numel():
            return _single(read(tensor, [index.lo for index in indices]))
        first: list[torch.Tensor] = []
        last: list[torch.Tensor] = []
        everywhere = beyond = torch.zeros((), dtype=torch.bool, device=self._device)
        for index, size in zip(indices, tensor.shape, strict=True):
            wraps = index.hi < 0
            lo, hi = (torch.where(wraps, end + size, end) for end in (index.lo, index.hi))
            # Both ends of a range around 0 are inside the tensor, at its two ends.
            everywhere = everywhere | ((lo < 0) & (hi >= 0))
            beyond = beyond | (lo < 0) | (hi >= size)
            first.append(lo.clamp(0, size - 1))
            last.append(hi.clamp(0, size - 1))
        table = self._table(tensor, boxed)
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

    def _table(self, tensor: torch.Tensor, boxed: tuple[int, ...]) -> BoxExtremes:
        key = (id(tensor), boxed)
        if key not in self._tables:
            self._tables[key] = BoxExtremes(tensor, boxed)
        return self._tables[key]


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


def _unless_wrapped(found: Interval, size: torch.Tensor) -> Interval:
    """Return an interval of integers, or all of them where their `size` may leave 64 bits."""
    if found.lo.is_floating_point():
        return found
    wraps = size >= LARGEST
    if not bool(wraps.any()):
        return found
    # The least integer has no absolute value.
    largest = torch.full_like(found.lo, torch.iinfo(torch.int64).max)
    return _where(wraps, Interval(-largest, largest), found)


def _anything(like: torch.Tensor) -> Interval:
    """Return the interval of what may not be a number either."""
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
