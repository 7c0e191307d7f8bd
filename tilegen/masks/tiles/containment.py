"""Intervals that lie in others, and so add nothing to their union."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import sympy

from tilegen.masks.language.symbols import FIRST, LAST

if TYPE_CHECKING:
    from tilegen.masks.tiles.closed_form import Interval

_SPAN = sympy.Dummy(integer=True, nonnegative=True)
"""The last stationary index less the first."""


def outermost(intervals: Sequence[Interval]) -> list[Interval]:
    """Leave out intervals that lie in another one for certain, of equal ones all but the first."""
    found: list[Interval] = []
    for one in intervals:
        if not any(_lies_in(one, other) for other in found):
            found = [*(other for other in found if not _lies_in(other, one)), one]
    return found


def _lies_in(one: Interval, other: Interval) -> bool:
    """Whether an interval lies in another one whatever the tile and the lengths are."""
    if not set(other.guards) <= set(one.guards):  # the other may be empty where this is not
        return False
    return is_at_most(other.lo, one.lo) and is_at_most(one.hi, other.hi)


def is_at_most(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether a bound is at most another one for certain; False where that is not known."""
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
