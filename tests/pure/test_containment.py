"""Intervals contained in others, whatever the tile and the lengths are."""

from __future__ import annotations

import itertools

import pytest

from tilegen.masks import causal, global_tokens, parse_mask, sliding_window
from tilegen.masks.language.algebra import as_expr, maximum, minimum
from tilegen.masks.language.expr import FIRST, LAST, SEQLEN_KV, Expr, const
from tilegen.masks.language.rewriting import replaced
from tilegen.masks.mask import Side
from tilegen.masks.tiles.closed_form import Interval, stream_sets
from tilegen.masks.tiles.containment import is_at_most, outermost

BOUNDS = [
    *(as_expr(0), as_expr(5), FIRST, LAST, FIRST + 3, LAST - 4),
    *(maximum(0, FIRST - 2), minimum(LAST + 1, SEQLEN_KV), maximum(7, LAST)),
    *(minimum(64, SEQLEN_KV), SEQLEN_KV, SEQLEN_KV - 3, 2 * FIRST, LAST // 2),
]
PLACES = [
    {FIRST: const(first), LAST: const(first + more), SEQLEN_KV: const(length)}
    for first, more, length in itertools.product((0, 1, 4, 9), (0, 3, 8), (1, 6, 70))
]


@pytest.mark.parametrize("left", BOUNDS, ids=str)
def test_ordered_expressions_are_ordered_everywhere(left: Expr) -> None:
    for right in BOUNDS:
        if is_at_most(left, right):
            assert all(replaced(left, at).value <= replaced(right, at).value for at in PLACES), (
                right
            )


def test_ordered_expressions_are_recognised() -> None:
    for left, right in (
        *((FIRST, LAST), (FIRST, LAST + 1), (maximum(0, FIRST - 2), LAST), (0, FIRST)),
        *((minimum(64, LAST + 1, SEQLEN_KV), minimum(LAST + 1, SEQLEN_KV)),),
    ):
        assert is_at_most(as_expr(left), right)
        assert not is_at_most(right, as_expr(left))


def test_an_interval_that_may_be_empty_contains_no_other() -> None:
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
    item = stream_sets(parse_mask("causal|window(0,0)").general, side)
    assert len(item.live) == 1
    assert item.full is not None
