"""Intervals that lie in others, and so add nothing to their union."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from tilegen.masks.language.expr import FIRST, LAST, Expr
from tilegen.masks.language.limits import limits
from tilegen.masks.language.rewriting import replaced


class Bounded(Protocol):
    """An interval [lo, hi) that is empty where one of its guards does not hold; None stands for no
    end."""

    @property
    def lo(self) -> Expr | None: ...
    @property
    def hi(self) -> Expr | None: ...
    @property
    def guards(self) -> Iterable[Expr]: ...


T = TypeVar("T", bound=Bounded)
_SPAN = Expr("symbol", "int64", (), "span")
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
    """Return whether an interval lies in another whatever the tile and the lengths are."""
    if not set(outer.guards) <= set(inner.guards):  # the outer may be empty where the inner is not
        return False
    starts = outer.lo is None or (inner.lo is not None and is_at_most(outer.lo, inner.lo))
    ends = outer.hi is None or (inner.hi is not None and is_at_most(inner.hi, outer.hi))
    return starts and ends


def is_at_most(left: Expr, right: Expr) -> bool:
    """Return whether a bound is surely at most another bound; False where that is not known."""
    if left is right:
        return True
    if left.op == "max":
        return all(is_at_most(one, right) for one in left.args)
    if right.op == "min":
        return all(is_at_most(left, one) for one in right.args)
    if left.op == "min" and any(is_at_most(one, right) for one in left.args):
        return True
    if right.op == "max" and any(is_at_most(left, one) for one in right.args):
        return True
    return limits(replaced(right - left, {LAST: FIRST + _SPAN}))[0] >= 0
