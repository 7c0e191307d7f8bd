"""Count the entries, rows and columns of a mask, seen as a bipartite graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilegen.masks.mask import Mask, Side
from tilegen.masks.remembered import by_mask
from tilegen.masks.tiles.tile_ranges import TileRanges, is_solved, tile_ranges
from tilegen.task import KernelTask, PassTask

TILE = 64
"""Side of the tiles by which entries of masks without a closed form are counted."""
_MAX_BANDS = 2**14

Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class MaskSize:
    """A mask as a bipartite graph of query and key-value rows; exact for up to 16384 of each.

    Longer masks are counted in bands: `entries`, `rows` and `columns` may be too small and `degree`
    too large, so the bounds stay valid.
    """

    entries: int
    rows: int
    """Query rows that keep an entry."""
    columns: int
    """Key-value rows that some query keeps."""
    degree: int
    """Most entries in a row or column; at least 1."""


@dataclass(frozen=True, eq=False)
class Bands:
    """Rows that keep an entry, or columns that are kept, in bands of neighbours. Each array has one
    number per band."""

    first: Numbers
    """The first row of each band."""
    size: Numbers
    """The number of rows of each band."""
    degree: Numbers
    """The largest number of entries that a row of the band keeps."""
    low: Numbers
    end: Numbers
    """The rows of a band keep only columns from `low` to `end` (excluded)."""


def size_of(task: KernelTask | PassTask) -> MaskSize:
    """Count the size of a task's mask."""
    problem = task.problem
    return mask_size(problem.mask, problem.seqlen_q, problem.seqlen_kv)


@by_mask(512)
def mask_size(mask: Mask, seqlen_q: int, seqlen_kv: int) -> MaskSize:
    """Count the entries, rows and columns that a mask keeps."""
    entries, rows, row_degree = _count(mask, "rows", seqlen_q, seqlen_kv)
    _, columns, column_degree = _count(mask, "columns", seqlen_q, seqlen_kv)
    return MaskSize(
        entries=entries, rows=rows, columns=columns, degree=max(row_degree, column_degree, 1)
    )


def bands(mask: Mask, side: Side, seqlen_q: int, seqlen_kv: int) -> Bands | None:
    """Return the bands of a mask's rows or columns; None if they have no closed form."""
    if not is_solved(mask, side):
        return None
    ranges, size = _banded(mask, side, seqlen_q, seqlen_kv)
    length = seqlen_q if side == "rows" else seqlen_kv
    first = size * np.arange(ranges.visited.shape[-1], dtype=np.int64)
    low = np.full(ranges.visited.shape, ranges.length, dtype=np.int64)
    end = np.zeros_like(low)
    for lo, hi in (piece for part in ranges.pieces for piece in part):
        low = np.where(hi > lo, np.minimum(low, lo), low)
        end = np.where(hi > lo, np.maximum(end, hi), end)
    # If heads have different masks, a band covers those of all heads.
    low, end, degree = low.min((0, 1)), end.max((0, 1)), ranges.visited.max((0, 1))
    live = degree > 0
    sizes = np.minimum(size, length - first)
    return Bands(first[live], sizes[live], degree[live], low[live], end[live])


def _count(mask: Mask, side: Side, seqlen_q: int, seqlen_kv: int) -> tuple[int, int, int]:
    """Count (entries, stationary indices that keep an entry, most entries of an index)."""
    length = seqlen_q if side == "rows" else seqlen_kv
    if not is_solved(mask, side):
        return _count_tiles(mask, side, seqlen_q, seqlen_kv)
    ranges, band = _banded(mask, side, seqlen_q, seqlen_kv)
    tiles = ranges.full.shape[-1]
    sizes = np.minimum(band, length - band * np.arange(tiles, dtype=np.int64))
    live = np.where(ranges.full > 0, sizes, np.minimum(ranges.visited, 1))
    entries, kept = ((ranges.full * sizes).sum() / ranges.heads, live.sum() / ranges.heads)
    return round(float(entries)), round(float(kept)), int(ranges.visited.max())


def _banded(mask: Mask, side: Side, seqlen_q: int, seqlen_kv: int) -> tuple[TileRanges, int]:
    """Return the tile ranges of bands of rows or columns, and the size of a band."""
    band = -(-(seqlen_q if side == "rows" else seqlen_kv) // _MAX_BANDS)
    blocks = {"block_m": band, "block_n": 1} if side == "rows" else {"block_m": 1, "block_n": band}
    return tile_ranges(mask, side, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, **blocks), band


def _count_tiles(mask: Mask, side: Side, seqlen_q: int, seqlen_kv: int) -> tuple[int, int, int]:
    """Count as `_count` does, from whole tiles. Entries and rows are at most the true ones, and the
    degree at least the true one, so bounds stay valid."""
    ranges = tile_ranges(
        mask, side, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, block_m=TILE, block_n=TILE
    )
    partial = ranges.partial_tiles
    live = np.where(ranges.full > 0, TILE, np.minimum(ranges.visited, 1))
    entries = (ranges.full_tiles * TILE**2 + partial) / ranges.heads
    return round(entries), round(float(live.sum()) / ranges.heads), int(ranges.visited.max()) * TILE
