"""Intervals that lie in others, whatever the tile and the lengths are."""

from __future__ import annotations

import itertools

import pytest
import sympy

from tilegen.masks import causal, global_tokens, parse_mask, sliding_window
from tilegen.masks.language.symbols import FIRST, LAST, SEQLEN_KV
from tilegen.masks.mask import Side
from tilegen.masks.tiles.closed_form import Interval, stream_sets
from tilegen.masks.tiles.containment import is_at_most, outermost

BOUNDS = [
    *(-sympy.oo, sympy.oo, sympy.S.Zero, sympy.Integer(5), FIRST, LAST, FIRST + 3, LAST - 4),
    *(sympy.Max(0, FIRST - 2), sympy.Min(LAST + 1, SEQLEN_KV), sympy.Max(7, LAST)),
    *(sympy.Min(64, SEQLEN_KV), SEQLEN_KV, SEQLEN_KV - 3, 2 * FIRST, sympy.floor(LAST / 2)),
]
PLACES = [
    {FIRST: first, LAST: first + more, SEQLEN_KV: length}
    for first, more, length in itertools.product((0, 1, 4, 9), (0, 3, 8), (1, 6, 70))
]


@pytest.mark.parametrize("left", BOUNDS, ids=str)
def test_what_is_at_most_another_is_so_everywhere(left: sympy.Expr) -> None:
    for right in BOUNDS:
        if is_at_most(left, right):
            assert all(left.xreplace(at) <= right.xreplace(at) for at in PLACES), right


def test_what_is_at_most_another_is_known() -> None:
    for left, right in (
        *((FIRST, LAST), (FIRST, LAST + 1), (sympy.Max(0, FIRST - 2), LAST), (0, FIRST)),
        *((sympy.Min(64, LAST + 1, SEQLEN_KV), sympy.Min(LAST + 1, SEQLEN_KV)), (FIRST, sympy.oo)),
    ):
        assert is_at_most(sympy.sympify(left), right)
        assert left == right or not is_at_most(right, sympy.sympify(left))


def test_an_interval_that_may_be_empty_holds_none_that_is_not() -> None:
    guarded, free = Interval(FIRST, LAST, (LAST - 9,)), Interval(FIRST, LAST)
    within = Interval(FIRST + 1, LAST)
    assert outermost([guarded, free]) == [free]
    assert outermost([free, guarded]) == [free]
    assert outermost([guarded, within]) == [guarded, within]
    assert outermost([within, guarded, free]) == [free]
    assert outermost([free, free]) == [free]


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_masks_have_no_range_within_another(side: Side) -> None:
    """Each had three live and three dropped intervals."""
    sets = stream_sets((causal() & (global_tokens(64) | sliding_window(255))).general, side)
    assert (len(sets.live), len(sets.dropped)) == (2, 2)
    one = stream_sets(parse_mask("causal|window(0,0)").general, side)
    assert len(one.live) == 1
    assert one.full is not None
