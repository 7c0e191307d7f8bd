"""The tiles of masks without a closed form, counted from their lists for the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tilegen.kernels.config import BLOCK_SIZES
from tilegen.masks.expression_mask import typical
from tilegen.masks.mask import Mask, Side
from tilegen.masks.shapes import Shape, TiledShape
from tilegen.masks.tensors import tensors_of
from tilegen.masks.tiles.closed_form import predicate
from tilegen.masks.tiles.tile_lists import build
from tilegen.masks.tiles.visits import TileRanges
from tilegen.masks.usual import Neighborhood

LONGEST = 2048
"""Most rows or columns for which tiles are counted where nothing ties a mask to its lengths."""
FINE = (64, 32, 16)
"""Sides of the tiles that others are put together from, so that one list serves many."""
MAX_FINE = 2**24
"""Most tiles of a FINE side that are held at once, in two bytes each."""

Flags = NDArray[np.bool_]


@lru_cache(maxsize=512)
def listed_ranges(mask: Mask, side: Side, shape: TiledShape) -> TileRanges:
    """Return the tiles every stationary tile visits.

    Exact for masks with their tensors, and up to LONGEST for others, where typical tensors stand
    for missing ones. Tiles of longer sequences are scaled: the number that a tile visits grows on
    as it did before. The number that a tile of a neighborhood visits does not grow with the rows of
    its grid.
    """
    shrink = max(shape.seqlen_q, shape.seqlen_kv) / LONGEST
    if shrink > 1 and not _is_tied(mask):
        return _scaled(mask, side, shape, shrink)
    if shrink > 1 and isinstance(mask, Neighborhood):
        lower = _lower(mask)
        if lower != mask and max(shape.block_m, shape.block_n) <= BLOCK_SIZES[-1]:
            points = math.prod(lower.grid)
            few = Shape(1, 1, points, points).tiled(shape.block_m, shape.block_n)
            return _stretched(listed_ranges(lower, side, few), side, shape)
    live, full = _tiles(mask, shape)
    if side == "columns":
        live, full = live.swapaxes(2, 3), full.swapaxes(2, 3)
    length, block = _streamed(side, shape)
    ends = live[..., -1].astype(np.int64)
    return TileRanges(visited=live.sum(3), full=full.sum(3), ends=ends, block=block, length=length)


def _tiles(mask: Mask, shape: TiledShape) -> tuple[Flags, Flags]:
    """Return which tiles (batch, heads, rows, columns) keep anything, and which keep all."""
    short = max(shape.seqlen_q, shape.seqlen_kv) <= LONGEST  # one list of the finest serves all
    for side in FINE[-1:] if short else FINE:
        fine = shape.tiled(side, side)
        fits = not (shape.block_m % side or shape.block_n % side)
        if fits and fine.rows * fine.columns <= MAX_FINE:
            live, full = _built(mask, fine)
            by = (shape.block_m // side, shape.block_n // side)
            return _joined(live, by, np.any), _joined(full, by, np.all)
    return _built(mask, shape)


@lru_cache(maxsize=12)
def _built(mask: Mask, shape: TiledShape) -> tuple[Flags, Flags]:
    """Return the same as `_tiles`, from lists."""
    mask = typical(mask).realized(shape)
    tensors = tensors_of(mask, shape, torch.device("cpu"))
    lists = build(predicate(mask, "rows"), tensors, shape, device="cpu", side="rows")
    live, full = lists.flags(shape.columns)
    return live.numpy(), full.numpy()


def _joined(flags: Flags, by: tuple[int, int], how: Callable[..., Any]) -> Flags:
    """Return the flags of tiles that are `by` fine tiles high and wide; beyond the end all flags
    are false."""
    batch, heads, *fine = flags.shape
    rows, columns = (-(-size // step) for size, step in zip(fine, by, strict=True))
    whole = np.zeros((batch, heads, rows * by[0], columns * by[1]), dtype=np.bool_)
    whole[..., : fine[0], : fine[1]] = flags
    return how(whole.reshape(batch, heads, rows, by[0], columns, by[1]), axis=(3, 5))


def _lower(mask: Neighborhood) -> Neighborhood:
    """Return the mask on a grid of fewer rows, where every point still sees as many others."""
    stride = math.prod(mask.grid[1:])
    rows = max(2 * mask.window[0], -(-LONGEST // stride))
    return Neighborhood((min(rows, mask.grid[0]), *mask.grid[1:]), mask.window)


def _scaled(mask: Mask, side: Side, shape: TiledShape, shrink: float) -> TileRanges:
    """Return the tiles at `shape` from those of sequences shorter by `shrink` and by twice it."""

    def shorter(by: float) -> TileRanges:
        lengths = (max(1, round(n / by)) for n in (shape.seqlen_q, shape.seqlen_kv))
        tiled = Shape(1, 1, *lengths).tiled(shape.block_m, shape.block_n)
        return listed_ranges(mask, side, tiled)

    near, half = shorter(shrink), shorter(2 * shrink)
    growth = float(near.visited.mean() / max(half.visited.mean(), 1e-9))
    factor = shrink ** min(1.0, max(0.0, math.log2(growth))) if growth > 0 else 1.0
    return _stretched(near, side, shape, factor)


def _stretched(near: TileRanges, side: Side, shape: TiledShape, factor: float = 1.0) -> TileRanges:
    """Return the tiles at `shape` from those of shorter sequences, `factor` times as many each."""
    tiles = shape.rows if side == "rows" else shape.columns
    same = np.arange(tiles) * near.visited.shape[-1] // tiles
    length, block = _streamed(side, shape)
    limit = -(-length // block)
    return TileRanges(
        visited=np.minimum(np.rint(near.visited[..., same] * factor).astype(np.int64), limit),
        full=np.minimum(np.rint(near.full[..., same] * factor).astype(np.int64), limit),
        ends=near.ends[..., same],
        block=block,
        length=length,
    )


def _streamed(side: Side, shape: TiledShape) -> tuple[int, int]:
    """Return the length and the tile of what streams."""
    if side == "rows":
        return shape.seqlen_kv, shape.block_n
    return shape.seqlen_q, shape.block_m


def _is_tied(mask: Mask) -> bool:
    """Whether a mask has a meaning at its own lengths only."""
    return (
        isinstance(mask, Neighborhood)
        or any(not value.is_stand_in for value in mask.values)
        or any(map(_is_tied, mask.parts))
    )
