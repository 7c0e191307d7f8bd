"""The model's counts for masks without a closed form equal their lists."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import tilegen
from tests.support.mask_zoo import ZOO, Case
from tilegen.masks import Mask
from tilegen.masks.form import Shape, TiledShape
from tilegen.masks.mask import Side
from tilegen.masks.tensors import tensors_of
from tilegen.masks.tiles import tile_ranges
from tilegen.masks.tiles.tile_lists import build
from tilegen.masks.tiles.tile_ranges import TileRanges, is_solved, typical

BLOCKS = [(16, 16), (64, 32), (16, 64), (128, 64), (48, 16), (40, 24), (256, 256)]


def counted(mask: Mask, side: Side, shape: TiledShape) -> list[list[int]]:
    """Return tiles visited and full, and visited last ones, of each stationary tile, from lists of
    just these tiles."""
    mask = typical(mask).realized(shape)
    tensors = tensors_of(mask, shape, torch.device("cpu"))
    lists = build(mask.predicate(side), tensors, shape, device="cpu", side=side)
    starts, tiles = lists.starts.tolist(), lists.tiles.tolist()
    last = (shape.columns if side == "rows" else shape.rows) - 1
    results: list[list[int]] = []
    for first, middle, end in zip(starts[:-2:2], starts[1::2], starts[2::2], strict=True):
        results.append([end - first, middle - first, tiles[first:end].count(last)])
    return results


def said(ranges: TileRanges) -> list[list[int]]:
    parts = (ranges.visited, ranges.full, ranges.ends)
    return np.stack([part.reshape(-1) for part in parts], axis=1).tolist()


@pytest.fixture(scope="module")
def unsolved() -> list[Case]:
    """Masks without a closed form, which takes seconds to find out."""
    return [one for one in ZOO if not is_solved(one.mask, "rows")]


@pytest.mark.slow
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_tiles_put_together_are_those_of_lists(unsolved: list[Case], side: Side) -> None:
    assert len(unsolved) > 9
    for case, blocks in itertools.product(unsolved, BLOCKS):
        shape = Shape(2, 2, case.seqlen_q, case.seqlen_kv).tiled(*blocks)
        assert said(tile_ranges.listed_ranges(case.mask, side, shape)) == counted(
            case.mask, side, shape
        ), (case.name, blocks)


@pytest.mark.parametrize("grid, window", [((128, 32), (7, 5)), ((16, 18, 16), (3, 5, 3))])
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_large_neighborhoods_are_counted_on_fewer_rows(
    grid: tuple[int, ...], window: tuple[int, ...], side: Side
) -> None:
    mask = tilegen.neighborhood(grid, window)
    points = int(np.prod(grid))
    for blocks in ((64, 64), (128, 32), (32, 16)):
        shape = Shape(1, 1, points, points).tiled(*blocks)
        ours = tile_ranges.listed_ranges(mask, side, shape)
        exact = np.array(counted(mask, side, shape))
        assert tile_ranges._fewer_rows(grid, window) != grid
        assert ours.visited.size == len(exact)
        assert ours.visited_tiles == pytest.approx(exact[:, 0].sum(), rel=0.05)
        assert ours.full_tiles == pytest.approx(exact[:, 1].sum(), rel=0.1, abs=8)


def test_a_long_neighborhood_is_never_classified_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    built = tile_ranges._built

    def note(mask: Mask, shape: TiledShape) -> tuple[tile_ranges.Flags, tile_ranges.Flags]:
        seen.append(shape.seqlen_q)
        return built(mask, shape)

    monkeypatch.setattr(tile_ranges, "_built", note)
    mask = tilegen.neighborhood((4096, 64), (5, 5))
    for blocks in ((64, 64), (16, 32)):
        shape = Shape(1, 1, 4096 * 64, 4096 * 64).tiled(*blocks)
        tile_ranges.listed_ranges(mask, "rows", shape)
    assert seen == [2048, 2048]


def board(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Every other block of 96, however far away: tiles grow with the length."""
    return ((q // 96) + (k // 96)) % 2 == 0


def near_board(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Blocks of a board within 60 rows: tiles do not grow, but for the first and last ones."""
    return board(b, h, q, k) & ((q - k).abs() < 60)


def far_board(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Blocks whose numbers share few bits: tiles grow, but less than the length does."""
    return ((q // 64) & (k // 64)) == 0


GROWING = {"as the length": (board, 4.0), "not": (near_board, 1.0), "slower": (far_board, 2.25)}


@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("name", GROWING)
def test_tiles_beyond_the_counted_lengths_are_extrapolated(name: str, side: Side) -> None:
    function, growth = GROWING[name]
    mask = tilegen.predicate(function)
    assert not is_solved(mask, side)
    long, short = (
        Shape(1, 1, n, n).tiled(64, 64) for n in (4 * tile_ranges.LONGEST, tile_ranges.LONGEST)
    )
    ours, before = (tile_ranges.listed_ranges(mask, side, shape) for shape in (long, short))
    assert ours.visited.mean() / before.visited.mean() == pytest.approx(growth, rel=0.08)
    exact = np.array(counted(mask, side, long))
    assert ours.visited_tiles == pytest.approx(exact[:, 0].sum(), rel=0.08)
    assert ours.full_tiles == pytest.approx(exact[:, 1].sum(), rel=0.15, abs=8)
