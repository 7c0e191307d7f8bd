"""Intervals that lie in others, and so add nothing to their union."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import sympy

from tilegen.masks.language.symbols import FIRST, LAST


class Bounded(Protocol):
    """An interval [lo, hi) that is empty where one of its guards does not hold."""

    @property
    def lo(self) -> sympy.Expr: ...
    @property
    def hi(self) -> sympy.Expr: ...
    @property
    def guards(self) -> Iterable[Any]: ...


T = TypeVar("T", bound=Bounded)
_SPAN = sympy.Dummy(integer=True, nonnegative=True)
"""The last stationary index less the first."""


def outermost(intervals: Sequence[T]) -> list[T]:
    """Leave out intervals that surely lie in another interval; of equal intervals keep the
    first."""
    kept: list[T] = []
    for interval in intervals:
        if not any(_lies_in(interval, other) for other in kept):
            kept = [*(other for other in kept if not _lies_in(other, interval)), interval]
    return kept


def _lies_in(inner: Bounded, outer: Bounded) -> bool:
    """Whether an interval lies in another interval whatever the tile and the lengths are."""
    if not set(outer.guards) <= set(inner.guards):  # the outer may be empty where the inner is not
        return False
    return is_at_most(outer.lo, inner.lo) and is_at_most(inner.hi, outer.hi)


def is_at_most(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether a bound is surely at most another bound; False where that is not known."""
    if left == right or left == -sympy.oo or right == sympy.oo:
        return True
    if left.is_infinite or right.is_infinite:
        return False
    if isinstance(left, sympy.Max):
        return all(is_at_most(one, right) for one in left.args)
    if isinstance(right, sympy.Min):
        return all(is_at_most(left, one) for one in right.args)
    if isinstance(left, sympy.Min) and any(is_at_most(one, right) for one in left.args):
        return True
    if isinstance(right, sympy.Max) and any(is_at_most(left, one) for one in right.args):
        return True
    difference = sympy.expand((right - left).xreplace({LAST: FIRST + _SPAN}))
    return difference.is_nonnegative is True
