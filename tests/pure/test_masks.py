"""The mask compiler against brute force over the dense boolean matrix."""

import itertools
from typing import Any

import numpy as np
import pytest
import sympy

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks import Mask, causal, full, parse_mask, sliding_window
from tilegen.masks.compiler import FIRST, LAST, SEQLEN_KV, stream_bounds, tile_ranges
from tilegen.masks.mask import Full

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
    "causal&window(33,0)",
    "causal&window(4,6,bottom_right)",
    "causal(bottom_right)&window(9,9)",
]
LENGTHS = [(1, 1), (7, 40), (40, 7), (64, 64), (33, 70), (100, 37), (1, 50), (50, 1)]
BLOCKS = [(16, 16), (16, 32), (32, 16), (8, 64)]


def dense(mask: Mask, seqlen_q: int, seqlen_kv: int) -> np.ndarray:
    """Every pair, one by one, with Python integers: shares only the definition of the mask."""
    return np.array(
        [
            [bool(mask.keep(q, k, seqlen_q, seqlen_kv)) for k in range(seqlen_kv)]
            for q in range(seqlen_q)
        ]
    )


@pytest.mark.parametrize("text", MASKS)
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_tile_classes_equal_brute_force(text: str, side: str) -> None:
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
        visited_rows = 0
        for i, first in enumerate(range(0, keep.shape[0], stationary)):
            rows = keep[first : first + stationary]
            for t in range(-(-length // block)):
                tile = rows[:, t * block : (t + 1) * block]
                visited = ranges.lo[i] <= t < ranges.hi[i]
                is_full = ranges.full_lo[i] <= t < ranges.full_hi[i]
                where = (text, side, seqlen_q, seqlen_kv, block_m, block_n, i, t)
                assert visited == tile.any(), where
                assert is_full == (tile.all() and tile.shape[1] == block), where
                visited_rows += tile.shape[1] if visited else 0
            assert ranges.lo[i] <= ranges.full_lo[i] <= ranges.full_hi[i] <= ranges.hi[i]
        assert ranges.visited_rows == visited_rows


def test_causal_bounds_are_the_textbook_ones() -> None:
    bounds = stream_bounds(causal(), "rows")
    assert bounds.live.lo == 0
    assert bounds.live.hi == sympy.Min(LAST + 1, SEQLEN_KV)
    assert bounds.full.hi == sympy.Min(FIRST + 1, SEQLEN_KV)


@pytest.mark.parametrize("text", MASKS)
def test_notation_round_trips(text: str) -> None:
    assert parse_mask(text).notation == text
    assert parse_mask(parse_mask(text).notation) == parse_mask(text)


def test_and_is_canonical() -> None:
    assert causal() & sliding_window(3, 0) == sliding_window(3, 0) & causal()
    assert causal() & full() == causal()
    assert causal() & causal() == causal()
    assert full() & full() == Full()
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


class _Mod(Mask):
    notation = "mod"

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any) -> Any:
        return sympy.Mod(q, 3) <= k


class _Either(Mask):
    notation = "either"

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any) -> Any:
        return (k <= q) | (k <= 5)


@pytest.mark.parametrize("mask", [_Mod(), _Either()])
def test_what_the_compiler_cannot_solve_is_named(mask: Mask) -> None:
    with pytest.raises(Unsupported, match="expected"):
        stream_bounds(mask, "rows")
