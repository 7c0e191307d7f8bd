"""The mask compiler against brute force over the dense boolean matrix."""

import itertools

import numpy as np
import pytest

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks import Mask, causal, full, parse_mask, sliding_window
from tilegen.masks.form import Form
from tilegen.masks.language.algebra import minimum
from tilegen.masks.mask import Side
from tilegen.masks.tiles.spans import FIRST, LAST, SEQLEN_KV, stream_sets
from tilegen.masks.tiles.tile_ranges import TileRanges, tile_ranges

MASKS = [
    "full",
    "causal",
    "causal(bottom_right)",
    "window(7,0)",
    "window(0,0)",
    "window(5,9)",
    "window(-1,3)",
    "window(2,-1,bottom_right)",
    "window(20,40,bottom_right)",
    "causal&window(33,9,bottom_right)",
    "causal&window(4,6,bottom_right)",
    "causal(bottom_right)&window(9,9)",
    "prefix_lm(20)",
    "global(5)",
    "global(5)|window(9,9)",
    "causal&(global(20)|window(7,-1))",
    "causal&(kv_prefix(4)|window(8,-1))",
    "~window(5,5)",
    "~causal",
    "causal|window(2,-1,bottom_right)",
    "window(30,30)&~window(9,0)",
    "window(3,3)|window(3,3,bottom_right)",
    "~full",
    "kv_prefix(33)&~kv_prefix(10)",
]
LENGTHS = [(1, 1), (7, 40), (40, 7), (64, 64), (33, 70), (100, 37), (1, 50), (50, 1)]
BLOCKS = [(16, 16), (16, 32), (32, 16), (8, 64)]


def dense(mask: Mask, seqlen_q: int, seqlen_kv: int) -> np.ndarray:
    """Every pair, one by one: shares only the definition of the mask."""
    return mask.pairs(seqlen_q, seqlen_kv)


def classes(ranges: TileRanges, tiles: int) -> list[list[str]]:
    """The class of every tile, from the ranges; that none is in two of them is checked on the
    way."""
    results = [["empty"] * tiles for _ in range(ranges.visited.size)]
    for name, pieces in zip(("partial", "full"), ranges.pieces, strict=True):
        for lo, hi in pieces:
            lo, hi = (np.broadcast_to(edge, ranges.visited.shape).ravel() for edge in (lo, hi))
            for i, row in enumerate(results):
                assert lo[i] <= hi[i]
                for t in range(lo[i], hi[i]):
                    assert row[t] == "empty"
                    row[t] = name
    return results


def expected_classes(keep: np.ndarray, stationary: int, block: int) -> list[list[str]]:
    results: list[list[str]] = []
    for first in range(0, keep.shape[0], stationary):
        rows = keep[first : first + stationary]
        tiles = [rows[:, t : t + block] for t in range(0, keep.shape[1], block)]
        results.append(
            [
                "full"
                if tile.all() and tile.shape[1] == block
                else "partial"
                if tile.any()
                else "empty"
                for tile in tiles
            ]
        )
    return results


@pytest.mark.parametrize("text", MASKS)
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_tile_classes_equal_brute_force(text: str, side: Side) -> None:
    mask = parse_mask(text)
    for (seqlen_q, seqlen_kv), (block_m, block_n) in itertools.product(LENGTHS, BLOCKS):
        keep = dense(mask, seqlen_q, seqlen_kv)
        block, length = block_n, seqlen_kv
        stationary = block_m
        if side == "columns":
            keep, block, stationary, length = keep.T, block_m, block_n, seqlen_q
        ranges = tile_ranges(
            mask, side, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, block_m=block_m, block_n=block_n
        )
        where = (text, side, seqlen_q, seqlen_kv, block_m, block_n)
        expected = expected_classes(keep, stationary, block)
        assert classes(ranges, -(-length // block)) == expected, where
        visited = [
            (i, t) for i, row in enumerate(expected) for t, c in enumerate(row) if c != "empty"
        ]
        assert ranges.visited_tiles == len(visited)
        assert ranges.full_tiles == sum(row.count("full") for row in expected)
        assert ranges.visited_rows == sum(min(block, length - t * block) for _, t in visited)


def test_causal_bounds_are_the_textbook_ones() -> None:
    sets = stream_sets(causal(), "rows")
    assert sets.full is not None
    assert [str(one.lo) for one in sets.live] == ["0"]
    assert [one.hi for one in sets.live] == [minimum(LAST + 1, SEQLEN_KV)]
    assert sets.full.hi == minimum(FIRST + 1, SEQLEN_KV)


@pytest.mark.parametrize("text", MASKS)
def test_notation_round_trips(text: str) -> None:
    assert parse_mask(text).notation == text
    assert parse_mask(parse_mask(text).notation) == parse_mask(text)


def test_and_is_canonical() -> None:
    assert causal() & sliding_window(3, 0) == sliding_window(3, 0) & causal()
    assert causal() & full() == causal()
    assert causal() & causal() == causal()
    assert full() & full() == full()
    assert sliding_window(-1, -1) == full()
    assert hash(causal() & sliding_window(3, 0)) == hash(sliding_window(3, 0) & causal() & causal())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "causal(",
        "caus",
        "window(1)",
        "window(1,2,3)",
        "window(-2,0)",
        "causal&",
        "window(1,2,sideways)",
    ],
)
def test_malformed_notation_gets_one_clear_error(text: str) -> None:
    with pytest.raises(InvalidProblem, match=r"must be|expected a mask"):
        parse_mask(text)


def test_windows_are_validated() -> None:
    for bad in (-2, 1.5, "3", True, 2**40):
        with pytest.raises(InvalidProblem, match="window left"):
            sliding_window(bad)  # type: ignore[arg-type]


_MOD = Form("mod", lambda at, side: at.q % 3 <= at.k)


def test_masks_that_cannot_be_solved_are_named() -> None:
    with pytest.raises(Unsupported, match="the term q%3"):
        stream_sets(Mask.of(_MOD), "rows")
