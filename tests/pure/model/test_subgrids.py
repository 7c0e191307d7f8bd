"""The densest sub-grids of masks: bounds against all choices of rows and columns, and against
schedules."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import sympy as sp
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.mask_zoo import ZOO, Case
from tilegen.masks import causal, documents, full, parse_mask, prefix_lm, sliding_window
from tilegen.masks.mask import Mask
from tilegen.model import symbols
from tilegen.model.bounds import pattern_bound
from tilegen.model.mask_size import Bands, mask_size
from tilegen.model.subgrids import (
    PRECISION,
    Subgrids,
    by_degrees,
    counted,
    densest_nested,
    of_staircase,
    spanned_by_all_heads,
    subgrids,
)
from tilegen.model.symbols import H_kv, M, N, P, d_qk, g, k, nnz, u, w_b
from tilegen.theory.schedules import SCHEDULES

Pairs = NDArray[np.bool_]
TIGHT = 1 + 3 * PRECISION


# --------------------------------------------------------------------------------------------------
# The least that may be said: all sub-grids of a small mask


def most_kept(pairs: Pairs, group: int) -> list[int]:
    """e_G(k) for every k, of one key-value head: all choices of columns, each with the best rows of
    all query heads."""
    rows = [sum(int(kept) << at for at, kept in enumerate(row)) for row in pairs] * group
    columns = pairs.shape[1]
    most = [0] * (len(rows) + columns + 1)
    for chosen in range(1 << columns):
        seen = sorted(((row & chosen).bit_count() for row in rows), reverse=True)
        for at, total in enumerate(itertools.accumulate(seen, initial=0), chosen.bit_count()):
            most[at] = max(most[at], total)
    return list(itertools.accumulate(most, max))


def of_two_heads(most: list[int]) -> list[int]:
    """The same, of two key-value heads of one mask."""
    last = len(most) - 1
    return [
        max(most[i] + most[at - i] for i in range(max(0, at - last), min(at, last) + 1))
        for at in range(2 * last + 1)
    ]


@cache
def _allowed() -> Callable[..., float]:
    return sp.lambdify((k, u, w_b, g), spanned_by_all_heads(), "math")


def allowed(bounds: Subgrids, at: int, group: int) -> float:
    return _allowed()(at, bounds.per_row, bounds.width, group)


def bands_of(pairs: Pairs) -> Bands:
    live = np.flatnonzero(pairs.any(1))
    kept = pairs[live]
    return Bands(
        first=live,
        size=np.ones_like(live),
        degree=kept.sum(1),
        low=kept.argmax(1),
        end=pairs.shape[1] - kept[:, ::-1].argmax(1),
    )


def by_pairs(pairs: Pairs, group: int) -> Subgrids:
    return counted(bands_of(pairs), bands_of(pairs.T), group)


@st.composite
def intervals(draw: st.DrawFn) -> Pairs:
    """Masks whose rows keep an interval each: bands, staircases, documents, and with holes."""
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    pairs = np.zeros((rows, columns), dtype=bool)
    for row in pairs:
        low, end = draw(st.integers(0, columns)), draw(st.integers(0, columns))
        row[low:end] = True
    if draw(st.booleans()):
        pairs = np.sort(pairs, axis=0)
    return pairs


@st.composite
def any_pairs(draw: st.DrawFn) -> Pairs:
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    flags = st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns)
    return np.array(draw(flags)).reshape(rows, columns)


@given(st.one_of(intervals(), any_pairs()), st.integers(1, 3))
def test_no_subgrid_has_more_than_is_allowed(pairs: Pairs, group: int) -> None:
    """For every number of rows and columns, in one head and in two."""
    actual, most = by_pairs(pairs, group), most_kept(pairs, group)
    for exact in (most, of_two_heads(most)):
        assert all(kept <= allowed(actual, at, group) + 1e-9 for at, kept in enumerate(exact))


SIDE = 9
FAMILIES: dict[str, Mask] = {
    "full": full(),
    "causal": causal(),
    **{f"prefix {columns}": prefix_lm(columns) for columns in (1, 3, 6, 8)},
    **{f"window {left} {right}": sliding_window(left, right)
       for left, right in ((0, 0), (2, 0), (1, 2), (4, 3), (8, 8))},
}  # fmt: skip


@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize("name", FAMILIES)
def test_closed_forms_hold(name: str, group: int) -> None:
    mask = FAMILIES[name]
    bounds = subgrids(mask, SIDE, SIDE, group)
    pairs = np.array(mask.pairs(SIDE, SIDE))
    most = most_kept(pairs, group)
    for exact in (most, of_two_heads(most)):
        assert all(kept <= allowed(bounds, at, group) + 1e-9 for at, kept in enumerate(exact))
    assert bounds.family == name.split()[0]
    assert bounds.per_row >= by_pairs(pairs, group).per_row / TIGHT


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (1, 9), (9, 1)])
@pytest.mark.parametrize("text", ["full", "causal", "causal(bottom_right)", "window(3,1)"])
def test_lengths_may_differ(text: str, shape: tuple[int, int]) -> None:
    mask = parse_mask(text)
    for group in (1, 4):
        most, bounds = most_kept(np.array(mask.pairs(*shape)), group), subgrids(mask, *shape, group)
        assert all(kept <= allowed(bounds, at, group) + 1e-9 for at, kept in enumerate(most))


# --------------------------------------------------------------------------------------------------
# How tight it is


def test_bounds_of_staircases_are_reached() -> None:
    """A causal mask has sub-grids as dense as its closed form says, but for rounding."""
    for group in (1, 2, 4, 8):
        side = 4096
        counts = np.ones(side, dtype=np.int64)
        reached = densest_nested(np.arange(1, side + 1), group * counts)
        said = float(of_staircase().subs({N: side, g: group}))
        assert reached <= said * TIGHT
        assert said <= 1.001 * reached
        assert said < 0.9 * by_degrees(side, side, group)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.3, 0.5, 0.6, 0.8, 0.99])
def test_bounds_of_prefixes_are_reached(share: float) -> None:
    """Beside staircases: with all rows and few columns more than the prefix, and with those of the
    prefix alone."""
    side = 4096
    columns = int(share * side)
    degrees = np.maximum(np.arange(1, side + 1), columns)
    for group in (1, 2, 8):
        reached = densest_nested(degrees, group * np.ones(side, dtype=np.int64))
        bounds = subgrids(prefix_lm(columns), side, side, group)
        assert bounds.family == "prefix"
        assert reached <= bounds.per_row * TIGHT
        assert bounds.per_row <= 1.001 * reached


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("pairs", [np.tril(np.ones((8, 8), bool)), np.tri(8, 6, -1, bool)])
def test_nested_rows_are_exact(pairs: Pairs, group: int) -> None:
    most = most_kept(pairs, group)
    exact = max(kept / at for at, kept in enumerate(most) if at)
    assert exact <= by_pairs(pairs, group).per_row <= exact * TIGHT


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=8),
)
def test_the_densest_is_found(rows: list[tuple[int, int]]) -> None:
    degrees, counts = (np.array(one) for one in zip(*rows, strict=True))
    each = sorted(np.repeat(degrees, counts).tolist(), reverse=True)
    exact = max(
        sum(min(degree, across) for degree in each[:down]) / (down + across)
        for down in range(1, len(each) + 1)
        for across in range(1, max(each) + 1)
    )
    assert exact <= densest_nested(degrees, counts) <= exact * TIGHT


def test_documents_are_as_dense_as_the_longest() -> None:
    """Each is a part of its own, and a causal one has fewer scores for its rows than a full one."""
    ids = np.repeat(np.arange(40), 25)
    whole, own = documents(ids.tolist()), documents(ids.tolist()) & causal()
    assert subgrids(whole, 1000, 1000, 1).per_row == 12.5
    expected = subgrids(causal(), 25, 25, 1).per_row
    assert subgrids(own, 1000, 1000, 1).per_row == pytest.approx(expected, rel=0.02)
    assert subgrids(own, 1000, 1000, 1).width == 25


def test_a_prefix_is_between_causal_and_full() -> None:
    densities = [subgrids(prefix_lm(p), 500, 500, 2).per_row for p in (1, 100, 300, 500)]
    assert densities == sorted(densities)
    assert densities[0] == pytest.approx(subgrids(causal(), 500, 500, 2).per_row, rel=0.01)
    assert densities[-1] == pytest.approx(subgrids(full(), 500, 500, 2).per_row, rel=1e-5)


def test_long_sequences_are_counted_in_bands() -> None:
    """Beyond 16384 rows; what is said stays on the safe side."""
    mask = prefix_lm(10) & sliding_window(None, 20)
    short, long = (subgrids(mask, n, n, 1) for n in (2**14, 2**16))
    assert long.per_row / short.per_row == pytest.approx(4, rel=1e-3)
    assert long.family is None


# --------------------------------------------------------------------------------------------------
# The zoo

ONE_HEAD = [case for case in ZOO if not case.varies]


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("case", ONE_HEAD, ids=str)
def test_the_masks_of_the_zoo(case: Case, group: int) -> None:
    """What tiles say of a mask is never less than what its pairs say, and no more than degrees do;
    and sub-grids that a search finds have no more."""
    lengths = case.seqlen_q, case.seqlen_kv
    bounds, pairs = subgrids(case.mask, *lengths, group), case.oracle[0, 0]
    degree = mask_size(case.mask, *lengths).degree
    assert by_pairs(pairs, group).per_row / TIGHT <= bounds.per_row
    assert bounds.per_row <= by_degrees(degree, degree, group)
    counts = pairs.astype(np.int64)
    for columns in (1, 3, 10, 25, 50):
        chosen = np.argsort(-counts.sum(0), kind="stable")[:columns]
        for _ in range(3):
            rows = np.argsort(-counts[:, chosen].sum(1), kind="stable")
            kept = group * np.cumsum(counts[np.ix_(rows, chosen)].sum(1))
            sizes = group * np.arange(1, len(kept) + 1) + len(chosen)
            for at, entries in zip(sizes.tolist(), kept.tolist(), strict=True):
                assert entries <= allowed(bounds, at, group) + 1e-9
            best = rows[: int(np.argmax(kept / sizes)) + 1]
            chosen = np.argsort(-counts[best].sum(0), kind="stable")[:columns]


HEAD_DIM = 2
STREAMING = [
    name for name, one in SCHEDULES.items() if one.flops != 0 and "mla" not in name and
    one.words().has(symbols.V_kv, symbols.V_q)
]  # fmt: skip
TILES = [(1, 1), (2, 2), (4, 1), (1, 4), (8, 4), (16, 16), (5, 40)]


@cache
def _evaluated(name: str) -> tuple[Callable[..., int], Callable[..., int]]:
    """Return words and footprint of a schedule; all words equal, one buffer, no splits."""
    names = ("N_q", "N_kv", "V_kv", "V_q", "B_r", "B_c", "g")
    arguments = [getattr(symbols, one) for one in names]
    ones = dict.fromkeys(("n", "n_s", "kappa", "B_d", "B_e", "B_k"), 1)
    numbers = {getattr(symbols, one): value for one, value in ones.items()}
    numbers |= {symbols.d_qk: HEAD_DIM, symbols.d_v: HEAD_DIM}
    schedule = SCHEDULES[name]
    return tuple(  # type: ignore[return-value]
        sp.lambdify(arguments, one.subs(numbers), "math")
        for one in (schedule.words(), schedule.footprint)
    )


@cache
def _bound() -> Callable[..., float]:
    results = {H_kv: 1, P: 1, d_qk: HEAD_DIM}
    return sp.lambdify((M, g, nnz, u, w_b), pattern_bound().subs(results), "math")


def visited(pairs: Pairs, rows: int, columns: int) -> tuple[int, int]:
    """V_kv and V_q: the columns that row tiles visit, and the rows that column tiles visit."""
    sides = [np.arange(0, n, b) for n, b in zip(pairs.shape, (rows, columns), strict=True)]
    heights, widths = (np.diff(at, append=n) for at, n in zip(sides, pairs.shape, strict=True))
    live = np.logical_or.reduceat(np.logical_or.reduceat(pairs, sides[0], 0), sides[1], 1)
    return int((live * widths).sum()), int((live * heights[:, None]).sum())


def check_schedules(pairs: Pairs, bounds: Subgrids, group: int) -> float:
    """Assert that no schedule moves less than the bound with what it holds on chip; return how
    close the closest comes."""
    closest = 0.0
    for tile in TILES:
        both = visited(pairs, *tile)
        for name in STREAMING:
            words, held = (one(*pairs.shape, *both, *tile, group) for one in _evaluated(name))
            least = _bound()(held, group, int(pairs.sum()), bounds.per_row, bounds.width)
            assert least <= words, (name, tile)
            closest = max(closest, least / words)
    return closest


@pytest.mark.parametrize("case", ONE_HEAD, ids=str)
def test_no_schedule_beats_the_bound_of_a_mask(case: Case) -> None:
    for group in (1, 3):
        bounds = subgrids(case.mask, case.seqlen_q, case.seqlen_kv, group)
        check_schedules(case.oracle[0, 0], bounds, group)


@given(intervals(), st.integers(1, 20), st.integers(1, 3))
def test_no_schedule_beats_the_bound_of_a_drawn_mask(pairs: Pairs, times: int, group: int) -> None:
    """The drawn mask, every row and column of it repeated."""
    larger = pairs.repeat(times, 0).repeat(times, 1)
    check_schedules(larger, by_pairs(larger, group), group)


def test_the_bound_says_something() -> None:
    """At 400 rows the best schedule moves a few times what it says, under every kind of mask."""
    for mask in (full(), causal(), sliding_window(50, 0)):
        bounds = subgrids(mask, 400, 400, 1)
        pairs = np.tril(np.ones((400, 400), bool)) if mask != full() else np.ones((400, 400), bool)
        if mask == sliding_window(50, 0):
            pairs &= ~np.tril(pairs, -51)
        assert check_schedules(pairs, bounds, 1) > 0.05
