"""Tiles of masks without a closed form, counted from their lists: what the model reasons about."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch

from tilegen.masks.binding import realized, tensors_of
from tilegen.masks.compiler import predicate
from tilegen.masks.constructors import Neighborhood
from tilegen.masks.mask import Mask, Side
from tilegen.masks.shapes import Shape, TiledShape
from tilegen.masks.tile_lists import build
from tilegen.masks.tiles import TileRanges
from tilegen.masks.traced import typical

LONGEST = 2048
"""Rows or columns up to which tiles are counted where nothing ties a mask to its lengths."""


@lru_cache(maxsize=512)
def listed_ranges(mask: Mask, side: Side, shape: TiledShape) -> TileRanges:
    """Return the tiles every stationary tile visits.

    Exact for masks with their tensors, and up to LONGEST for others, where typical tensors stand
    for missing ones. Longer ones are scaled: what a tile visits grows on as it did before.
    """
    shrink = max(shape.seqlen_q, shape.seqlen_kv) / LONGEST
    if shrink > 1 and not _is_tied(mask):
        return _scaled(mask, side, shape, shrink)
    mask = realized(typical(mask), shape)
    lists = build(
        predicate(mask, side),
        tensors_of(mask, shape, torch.device("cpu")),
        shape,
        device="cpu",
        side=side,
    )
    length, block = _streamed(side, shape)
    starts = lists.starts.numpy()
    each = (lists.batch, lists.heads, lists.num_stationary)
    last = (lists.tiles.numpy() == -(-length // block) - 1).astype(np.int64)
    reached = np.concatenate([[0], last.cumsum()])[starts[::2]]
    return TileRanges(
        visited=(starts[2::2] - starts[:-2:2]).reshape(each),
        full=(starts[1::2] - starts[:-1:2]).reshape(each),
        ends=np.diff(reached).reshape(each),
        block=block,
        length=length,
    )


def _scaled(mask: Mask, side: Side, shape: TiledShape, shrink: float) -> TileRanges:
    """Return the tiles at `shape` from those of sequences shorter by `shrink` and by twice it."""

    def shorter(by: float) -> TileRanges:
        lengths = (max(1, round(n / by)) for n in (shape.seqlen_q, shape.seqlen_kv))
        tiled = Shape(1, 1, *lengths).tiled(shape.block_m, shape.block_n)
        return listed_ranges(mask, side, tiled)

    near, half = shorter(shrink), shorter(2 * shrink)
    growth = float(near.visited.mean() / max(half.visited.mean(), 1e-9))
    factor = shrink ** min(1.0, max(0.0, math.log2(growth))) if growth > 0 else 1.0
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
