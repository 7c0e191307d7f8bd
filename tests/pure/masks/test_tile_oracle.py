"""Which tiles a mask leaves, against isl: exact integer sets, and another theory than ours.

Never a tile too few: none that holds a kept pair is left out, none that runs without mask code
holds a dropped one. Tiles that need not be visited, or need no mask code, are counted in a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.conftest import CheckGolden
from tilegen.masks import (
    Mask,
    causal,
    dilated,
    global_tokens,
    neighborhood,
    predicate,
    prefix_lm,
    sliding_window,
    streaming,
)
from tilegen.masks.form import TiledShape
from tilegen.masks.tiles import tile_ranges
from tilegen.masks.tiles.tile_lists import TileLists, build

isl = pytest.importorskip("islpy", reason="needs islpy")
Tiles = frozenset[tuple[int, int]]
"""(row of tiles, column of tiles)."""


@dataclass(frozen=True)
class Found:
    """The tiles that are visited, and those of them that run without mask code."""

    live: Tiles
    full: Tiles


@dataclass(frozen=True)
class Exact(Found):
    """What isl finds: tiles with a kept pair, and those with nothing but kept pairs. A tile of the
    streamed side that crosses the end of the sequence is never full."""


# --------------------------------------------------------------------------------------------------
# The oracle


def exact(keep: str, shape: TiledShape, side: Literal["rows", "columns"]) -> Exact:
    """Return the tiles of `keep`, a condition on q and k in isl's notation."""
    inside = f"0 <= q < {shape.seqlen_q} and 0 <= k < {shape.seqlen_kv}"
    tile = f"i = floor(q / {shape.block_m}) and j = floor(k / {shape.block_n})"
    kept = isl.Set(f"{{ [q, k] : {inside} and ({keep}) }}")
    # The tiles that are looked at reach beyond the streamed sequence, where nothing is kept.
    rows = shape.rows * shape.block_m if side == "columns" else shape.seqlen_q
    columns = shape.columns * shape.block_n if side == "rows" else shape.seqlen_kv
    dropped = isl.Set(f"{{ [q, k] : 0 <= q < {rows} and 0 <= k < {columns} }}").subtract(kept)
    to_tile = isl.Map(f"{{ [q, k] -> [i, j] : {tile} }}")
    live, partial = points(kept.apply(to_tile)), points(dropped.apply(to_tile))
    return Exact(live, live - partial)


def points(tiles: Any) -> Tiles:
    """Return the points of a set, which isl finds by scanning it."""
    results: list[tuple[int, int]] = []

    def add(point: Any) -> None:
        i, j = (point.get_coordinate_val(isl.dim_type.set, at).to_python() for at in (0, 1))
        results.append((i, j))

    tiles.foreach_point(add)
    return frozenset(results)


# --------------------------------------------------------------------------------------------------
# Ours


def ranges(mask: Mask, shape: TiledShape, side: Literal["rows", "columns"]) -> Found:
    """Return the ranges of the closed form; other masks raise Unsupported."""
    sizes = dict(seqlen_q=shape.seqlen_q, seqlen_kv=shape.seqlen_kv)
    visited = tile_ranges.tile_ranges(
        mask, side, **sizes, block_m=shape.block_m, block_n=shape.block_n
    )
    partial, full = (
        [
            (stationary, streamed)
            for low, high in part
            for stationary in range(low.shape[2])
            for streamed in range(int(low[0, 0, stationary]), int(high[0, 0, stationary]))
        ]
        for part in visited.pieces
    )
    assert len({*partial, *full}) == len(partial) + len(full), "a tile is visited twice"
    return _turned([*partial, *full], full, side)


def lists(mask: Mask, shape: TiledShape, side: Literal["rows", "columns"]) -> Found:
    """Return the contents of the exact lists."""
    keep = mask.predicate(side)
    tile_lists: TileLists = build(keep, (), shape, device="cpu", side=side)
    starts, streamed = tile_lists.starts.tolist(), tile_lists.tiles.tolist()
    live = [
        (at // 2, tile)
        for at in range(2 * tile_lists.num_stationary)
        for tile in streamed[starts[at] : starts[at + 1]]
    ]
    full = [
        (at, tile)
        for at in range(tile_lists.num_stationary)
        for tile in streamed[starts[2 * at] : starts[2 * at + 1]]
    ]
    return _turned(live, full, side)


def _turned(live: list[tuple[int, int]], full: list[tuple[int, int]], side: str) -> Found:
    """Return pairs of stationary and streamed tiles as rows and columns of tiles."""
    if side == "columns":
        live, full = ([(i, j) for j, i in pairs] for pairs in (live, full))
    return Found(frozenset(live), frozenset(full))


def never_too_few(entry: Found, expected: Exact) -> None:
    """Fail where a tile is missing, or runs without the mask code that it needs."""
    assert not expected.live - entry.live, "live tiles are missing"
    assert not entry.full - expected.full, "tiles run without mask code that need it"
    assert entry.full <= entry.live


# --------------------------------------------------------------------------------------------------
# Masks of every kind


def _user(fn: Callable[..., Any]) -> Mask:
    return predicate(lambda b, h, q, k: fn(q, k))


MASKS: dict[str, tuple[Mask, str]] = {
    "causal": (causal(), "k <= q"),
    "window": (sliding_window(20, 3), "q - 20 <= k <= q + 3"),
    "prefix": (prefix_lm(37), "k <= q or k < 37"),
    "global and window": (
        global_tokens(9) | sliding_window(20, 20),
        "q < 9 or k < 9 or -20 <= q - k <= 20",
    ),
    "streaming": (streaming(4, 30), "k <= q and (q - 30 <= k or k < 4)"),
    "no window": (~sliding_window(25, 10), "k < q - 25 or k > q + 10"),
    "causal from a row on": (_user(lambda q, k: (k <= q) & (q >= 50)), "k <= q and q >= 50"),
    "dilated": (dilated(4), "(q - k) mod 4 = 0"),
    "dilated window": (
        dilated(3) & sliding_window(40, 0),
        "(q - k) mod 3 = 0 and q - 40 <= k <= q",
    ),
    "sum of remainders": (_user(lambda q, k: (q + 2 * k) % 5 == 1), "(q + 2k) mod 5 = 1"),
    "two to three": (_user(lambda q, k: 2 * q >= 3 * k), "2q >= 3k"),
    "three to two, both ways": (
        _user(lambda q, k: (3 * q - 2 * k).abs() <= 25),
        "-25 <= 3q - 2k <= 25",
    ),
    "thin band of slope 5/7": (
        _user(lambda q, k: (5 * q >= 7 * k) & (5 * q <= 7 * k + 1)),
        "7k <= 5q <= 7k + 1",
    ),
    "wide band of slope 5": (
        _user(lambda q, k: (5 * k >= q) & (k <= 5 * q + 7)),
        "5k >= q and k <= 5q + 7",
    ),
    "chunks": (_user(lambda q, k: q // 100 == k // 100), "floor(q / 100) = floor(k / 100)"),
    "causal chunks": (
        _user(lambda q, k: k // 24 <= q // 24),
        "floor(k / 24) <= floor(q / 24)",
    ),
    "chunks of two sizes": (
        _user(lambda q, k: q // 30 >= k // 20),
        "floor(q / 30) >= floor(k / 20)",
    ),
    "checkerboard": (
        _user(lambda q, k: (q // 16 + k // 16) % 2 == 0),
        "(floor(q / 16) + floor(k / 16)) mod 2 = 0",
    ),
    "diagonal within chunks": (
        _user(lambda q, k: q % 32 >= k % 32),
        "q mod 32 >= k mod 32",
    ),
    "neighborhood": (neighborhood(150, 31), "exists c : (c = q or c = 15 or c = 134) and"
                     " (q < 15 implies c = 15) and (q > 134 implies c = 134) and"
                     " (15 <= q <= 134 implies c = q) and c - 15 <= k <= c + 15"),
}  # fmt: skip
SHAPES = [TiledShape(1, 1, 150, 150, *blocks) for blocks in ((32, 16), (16, 64), (4, 2))]
SIDES: tuple[Literal["rows", "columns"], ...] = ("rows", "columns")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.block_m}x{shape.block_n}")
@pytest.mark.parametrize("name", MASKS)
def test_no_tile_too_few(name: str, shape: TiledShape) -> None:
    mask, keep = MASKS[name]
    for side in SIDES:
        expected = exact(keep, shape, side)
        assert lists(mask, shape, side).live == expected.live
        never_too_few(lists(mask, shape, side), expected)
        if tile_ranges.is_solved(mask, side):
            never_too_few(ranges(mask, shape, side), expected)


@pytest.mark.slow
def test_tiles_too_many(golden: CheckGolden) -> None:
    """Count tiles that are visited, or run mask code, without need."""
    head = f"{'mask':24} {'tiles':6} {'on chip':8} {'as':6} {'live':>5} {'wasted':>8}"
    lines = [f"{head} {'full':>5} {'mask wasted':>15}"]
    exactly = 0
    for name, (mask, keep) in MASKS.items():
        for shape in SHAPES:
            for side in SIDES:
                expected = exact(keep, shape, side)
                solved = tile_ranges.is_solved(mask, side)
                actual = (ranges if solved else lists)(mask, shape, side)
                counts = [
                    (len(expected.live), len(actual.live) - len(expected.live)),
                    (len(expected.full), len(expected.full) - len(actual.full)),
                ]
                if counts[0][1] == counts[1][1] == 0:
                    exactly += 1
                    continue
                lines.append(
                    f"{name:24} {f'{shape.block_m}x{shape.block_n}':6} {side:8}"
                    f" {'ranges' if solved else 'lists':6} {counts[0][0]:5} {counts[0][1]:8}"
                    f" {counts[1][0]:5} {counts[1][1]:15}"
                )
    golden("\n".join([*lines, f"exactly isl's tiles in the other {exactly} cases"]) + "\n")


# --------------------------------------------------------------------------------------------------
# Masks that nobody thought of


@dataclass(frozen=True)
class Condition:
    """The same condition for tilegen and for isl."""

    keep: Callable[[Any, Any], Any]
    text: str


def _affine(a: int, b: int, c: int) -> Condition:
    return Condition(lambda q, k: a * q + b * k + c >= 0, f"{a}q + {b}k + {c} >= 0")


def _modular(a: int, b: int, modulus: int, rest: int) -> Condition:
    return Condition(
        lambda q, k: (a * q + b * k) % modulus == rest % modulus,
        f"({a}q + {b}k) mod {modulus} = {rest % modulus}",
    )


def _floors(number: int, other: int, shift: int) -> Condition:
    return Condition(
        lambda q, k: q // number >= (k + shift) // other,
        f"floor(q / {number}) >= floor((k + {shift}) / {other})",
    )


def _both(condition: Condition, other: Condition) -> Condition:
    return Condition(
        lambda q, k: condition.keep(q, k) & other.keep(q, k),
        f"({condition.text}) and ({other.text})",
    )


def _either(condition: Condition, other: Condition) -> Condition:
    return Condition(
        lambda q, k: condition.keep(q, k) | other.keep(q, k),
        f"({condition.text}) or ({other.text})",
    )


def _neither(condition: Condition) -> Condition:
    return Condition(lambda q, k: ~condition.keep(q, k), f"not ({condition.text})")


FACTORS = st.sampled_from([-3, -2, -1, -1, 1, 1, 2, 3, 5])
SIMPLE = st.one_of(
    st.builds(_affine, FACTORS, FACTORS, st.integers(-30, 30)),
    st.builds(_affine, FACTORS, st.just(0), st.integers(-30, 30)),
    st.builds(_affine, st.just(0), FACTORS, st.integers(-30, 30)),
    st.builds(_modular, FACTORS, FACTORS, st.integers(2, 7), st.integers(0, 6)),
    st.builds(_floors, st.integers(1, 12), st.integers(1, 12), st.integers(-9, 9)),
)
CONDITIONS = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.builds(_both, inner, inner), st.builds(_either, inner, inner), st.builds(_neither, inner)
    ),
    max_leaves=4,
)
TILED = st.builds(
    TiledShape,
    batch=st.just(1),
    heads=st.just(1),
    seqlen_q=st.integers(1, 60),
    seqlen_kv=st.integers(1, 60),
    block_m=st.sampled_from([1, 4, 16, 32]),
    block_n=st.sampled_from([2, 8, 16, 64]),
)


@given(condition=CONDITIONS, shape=TILED)
@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
def test_no_tile_too_few_of_random_masks(condition: Condition, shape: TiledShape) -> None:
    mask = _user(condition.keep)
    for side in SIDES:
        expected = exact(condition.text, shape, side)
        assert lists(mask, shape, side).live == expected.live
        never_too_few(lists(mask, shape, side), expected)
        if tile_ranges.is_solved(mask, side):
            never_too_few(ranges(mask, shape, side), expected)


def test_the_oracle_is_brute_force() -> None:
    """What isl says of a mask is what counting its pairs says."""
    shape = SHAPES[0]
    q, k = torch.arange(150)[:, None], torch.arange(150)
    keep = torch.zeros(160, 160, dtype=torch.bool)
    keep[:150, :150] = 2 * q >= 3 * k
    tiled = keep.view(5, 32, 10, 16).transpose(1, 2)
    rows = torch.arange(160).view(5, 32)[:, None, :, None] >= 150
    live, full = tiled.any(-1).any(-1), (tiled | rows).all(-1).all(-1)
    actual = exact("2q >= 3k", shape, "rows")
    assert actual.live == {(int(i), int(j)) for i, j in live.nonzero()}
    assert actual.full == {(int(i), int(j)) for i, j in (live & full).nonzero()}
