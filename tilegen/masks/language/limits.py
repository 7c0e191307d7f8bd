"""Smallest and largest values of integer expressions, as Python numbers. They simplify
comparisons, and show which floats are exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from tilegen.masks.language.bounds import MAX_SHIFT, Interval, Ranges, increasing, single
from tilegen.masks.language.elements import BOUNDS
from tilegen.masks.language.expr import SEQLEN_KV, SEQLEN_Q, Expr

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
