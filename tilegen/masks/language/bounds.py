"""Rules for the smallest and the largest value of an integer: one set, over numbers of Python and
over tensors with an element for each tile."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

from tilegen.masks.language.elements import BOUNDS
from tilegen.masks.language.expr import SEQLEN_KV, SEQLEN_Q, Expr

MAX_SHIFT = 63
"""Largest shift of 64-bit integers whose result differs from the result of larger shifts."""
_BITS: dict[str, Callable[[Any, Any], Any]] = {
    "bitand": operator.and_,
    "bitor": operator.or_,
    "bitxor": operator.xor,
}


class Interval(NamedTuple):
    """lo <= value <= hi. A value that is surely the same has lo and hi the same object."""

    lo: Any
    hi: Any

    @property
    def is_single(self) -> bool:
        """Whether there is one value."""
        return self.lo is self.hi

    @property
    def ends(self) -> tuple[Any, ...]:
        """Both bounds, or the one value."""
        return (self.lo,) if self.is_single else (self.lo, self.hi)


def single(value: Any) -> Interval:
    """Return the interval of one value."""
    return Interval(value, value)


def increasing(function: Callable[..., Any], *arguments: Interval) -> Interval:
    """Return the bounds of a function that rises with each argument."""
    lo = function(*(argument.lo for argument in arguments))
    if all(argument.is_single for argument in arguments):
        return single(lo)
    return Interval(lo, function(*(argument.hi for argument in arguments)))


class Ranges:
    """The rules, by the names of operations, over Python's integers: these have any size."""

    minimum: Callable[[Any, Any], Any] = staticmethod(min)
    maximum: Callable[[Any, Any], Any] = staticmethod(max)
    like: Callable[[Any, int], Any] = staticmethod(lambda _, value: value)
    """Returns a number of the kind of another."""
    where: Callable[..., Any] = staticmethod(
        lambda condition, then, otherwise: then if condition else otherwise
    )

    @staticmethod
    def floor_divide(left: Any, right: Any) -> Any:
        """Return a quotient rounded down, `left` itself where the divisor is 0."""
        return left // right if right else left

    @staticmethod
    def bits_of(operation: str, left: Any, right: Any) -> Any:
        """Return an operation on the bits of two numbers."""
        match operation:
            case "shl":
                return left << right if 0 <= right <= MAX_SHIFT else 0
            case "shr":
                return left >> (right if 0 <= right <= MAX_SHIFT else MAX_SHIFT)
            case _:
                return _BITS[operation](left, right)

    @staticmethod
    def ones(value: Any) -> Any:
        """Return a number with all bits set below its highest; -1 for a negative one."""
        return (1 << value.bit_length()) - 1 if value >= 0 else -1

    def hull(self, values: Sequence[Any]) -> Interval:
        """Return the interval that holds some values."""
        if len(values) == 1:
            return single(values[0])
        return Interval(reduce(self.minimum, values), reduce(self.maximum, values))

    def either(self, condition: Any, left: Interval, right: Interval) -> Interval:
        """Return one of two intervals."""
        return Interval(*(self.where(condition, *ends) for ends in zip(left, right, strict=True)))

    def mul(self, left: Interval, right: Interval) -> Interval:
        """Return the bounds of a product."""
        return self.hull([a * b for a in left.ends for b in right.ends])

    def power(self, base: Interval, exponent: int) -> Interval:
        """Return the bounds of a power, computed by multiplication."""
        base = base if exponent % 2 else self.abs(base)
        return increasing(lambda value: reduce(operator.mul, [value] * exponent), base)

    def abs(self, value: Interval) -> Interval:
        """Return the bounds of a number without its sign."""
        if value.is_single:
            return single(abs(value.lo))
        outside = self.maximum(value.lo, -value.hi)
        low = self.maximum(outside, self.like(outside, 0))
        return Interval(low, self.maximum(-value.lo, value.hi))

    def floordiv(self, left: Interval, right: Interval) -> Interval:
        """Return the bounds of a quotient rounded down."""
        divisors = list(right.ends)
        if not right.is_single:  # those around 0 too; that one counts as 1
            ones = (self.like(right.lo, one) for one in (-1, 1))
            divisors += [self.clamped(one, *right) for one in ones]
        return self.hull([self.floor_divide(a, b) for a in left.ends for b in divisors])

    def mod(self, left: Interval, right: Interval) -> Interval:
        """Return the bounds of a remainder, which has the sign of the divisor."""
        zero = self.like(right.lo, 0)
        least, most = self.minimum(right.lo + 1, zero), self.maximum(right.hi - 1, zero)
        natural = (left.lo >= 0) & (right.lo >= 0)
        anything = Interval(least, self.where(natural, self.minimum(most, left.hi), most))
        if not right.is_single:
            return anything
        # Between two multiples of the divisor the remainder only increases.
        divisor = self.where(right.lo == 0, self.like(right.lo, 1), right.lo)
        multiples = [self.floor_divide(end, divisor) * divisor for end in (left.lo, left.hi)]
        between = Interval(left.lo - multiples[0], left.hi - multiples[1])
        if left.is_single:
            return single(between.lo)
        return self.either(multiples[0] == multiples[1], between, anything)

    def bits(self, operation: str, left: Interval, right: Interval) -> Interval:
        """Return the bounds of an operation on bits."""
        compute = partial(self.bits_of, operation)
        if left.is_single and right.is_single:
            return single(compute(left.lo, right.lo))
        if operation in ("shl", "shr"):
            ends = [compute(a, b) for a in left.ends for b in self.shifts(right).ends]
            # Shifts beyond either end, and the largest, clear the bits or leave the sign.
            beyond = (right.lo < 0) | (right.hi >= MAX_SHIFT)
            most = self.like(right.lo, MAX_SHIFT + 1)
            last = [self.where(beyond, compute(a, most), ends[0]) for a in left.ends]
            return self.hull(ends + last)
        # Above the highest bit in which its ends differ, all values of an interval are the same.
        open_left, open_right = (self.ones(end.lo ^ end.hi) for end in (left, right))
        least = compute(left.lo & ~open_left, right.lo & ~open_right)
        most = compute(left.lo | open_left, right.lo | open_right)
        if operation == "bitxor":
            unknown = open_left | open_right
            least = compute(left.lo, right.lo) & ~unknown
            most = least | unknown
        # Where the sign is open, so is every bit that any end has below its sign.
        sizes = (self.where(end < 0, ~end, end) for end in (*left.ends, *right.ends))
        ones = self.ones(reduce(operator.or_, sizes))
        is_open = (least >= 0) & (most < 0)
        return self.either(is_open, Interval(~ones, ones), Interval(least, most))

    def shifts(self, value: Interval) -> Interval:
        """Return the bounds of a shift, within those of other results."""
        least, most = (self.like(value.lo, end) for end in (0, MAX_SHIFT))
        return self.hull([self.clamped(end, least, most) for end in value.ends])

    def clamped(self, value: Any, least: Any, most: Any) -> Any:
        """Return the number of a range that is nearest to a value."""
        return self.minimum(self.maximum(value, least), most)


# --------------------------------------------------------------------------------------------------
# Limits of integers, at any length and up to a length


LARGEST = 2**62
"""Largest integer that is bounded: beyond it sums and products may wrap around."""
MAX_LENGTH = 2**28
"""Longest sequence of a call with a mask or score that computes with positions."""
LENGTH = 2**22
"""Longest sequence for which floats of positions are taken for exact: PyTorch rounds them at
2**24."""
_INFINITE = 2**1024
"""The end of a range that has none: a number, with which rules compute as with others."""
_HUGE = 2**512
"""Bound of ends that stand for none: rules change them by factors far smaller."""
ANYTHING = Interval(-_INFINITE, _INFINITE)
_OF_KIND: dict[str, Interval] = {
    "bool": Interval(0, 1),
    "natural": Interval(0, BOUNDS["int32"][1]),
    **{kind: Interval(*ends) for kind, ends in BOUNDS.items()},
}
_RANGES = Ranges()


def limits(expr: Expr) -> Interval:
    """Return the smallest and the largest value of an integer, for sequences of any length."""
    if expr.limits is None:
        least = int(expr in (SEQLEN_Q, SEQLEN_KV))
        object.__setattr__(expr, "limits", _range(expr, limits, Interval(least, _INFINITE)))
    known: Interval = expr.limits
    return known


def bounded(expr: Expr, length: int = LENGTH) -> Interval:
    """Return the smallest and the largest value of an integer, for sequences of up to `length`."""
    known: dict[Expr, Interval] = {}

    def of(part: Expr) -> Interval:
        if part not in known:
            known[part] = _range(part, of, Interval(0, length))
        return known[part]

    return of(expr)


def _range(expr: Expr, of: Callable[[Expr], Interval], symbol: Interval) -> Interval:
    """Return the range of an integer, from those of its arguments and of symbols."""
    match expr.op:
        case "const":
            return _held(single(expr.value))
        case "symbol":
            return symbol
        case "load":
            return _OF_KIND.get(expr.value[1], _OF_KIND.get(expr.dtype, ANYTHING))
        case "cast":
            return _OF_KIND.get(expr.dtype, ANYTHING)
        case "sign":
            return Interval(-1, 1)
        case "where":
            return _RANGES.hull([end for arg in expr.args[1:] for end in of(arg)])
        case "abs":
            return _held(_RANGES.abs(of(expr.args[0])))
        case "power" if expr.value <= MAX_SHIFT:
            return _held(_RANGES.power(of(expr.args[0]), expr.value))
        case "mul":
            return reduce(lambda left, right: _held(_RANGES.mul(left, right)), map(of, expr.args))
        case "add":
            return _held(increasing(lambda *ends: sum(ends), *map(of, expr.args)))
        case "max" | "min":
            return increasing(max if expr.op == "max" else min, *map(of, expr.args))
        case "floordiv" | "mod":
            return _held(getattr(_RANGES, expr.op)(*map(of, expr.args)))
        case "bitand" | "bitor" | "bitxor" | "shr":  # bits that are shifted left wrap around
            return _held(_RANGES.bits(expr.op, *map(of, expr.args)))
        case _:
            return ANYTHING


def _held(ends: Interval) -> Interval:
    """Return the range of a number that may wrap around beyond LARGEST."""
    if ends.lo >= -LARGEST and ends.hi <= LARGEST:
        return ends
    lo = ends.lo if ends.lo > -_HUGE else -_INFINITE
    hi = ends.hi if ends.hi < _HUGE else _INFINITE
    wraps = any(LARGEST < abs(end) < _INFINITE for end in (lo, hi)) or lo > LARGEST
    return ANYTHING if wraps else Interval(lo, hi)
