"""The tiles that a mask leaves at given lengths and tile shapes, as numbers for the model: by the
closed form, or counted from lists where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tilegen.errors import Unsupported
from tilegen.kernels.config import BLOCK_SIZES
from tilegen.masks.comparison import MATCHED, ORDERED
from tilegen.masks.form import WINDOW, Shape, Side, TiledShape
from tilegen.masks.language.evaluation import points
from tilegen.masks.language.expr import FIRST, LAST, SEQLEN_KV, SEQLEN_Q, B, H, captured_slots
from tilegen.masks.mask import Mask
from tilegen.masks.remembered import by_mask
from tilegen.masks.tensors import tensors_of
from tilegen.masks.tiles.intervals import Arithmetic, Edges, Range, Visited, merge
from tilegen.masks.tiles.spans import StreamSets, depends_on, edges, visit
from tilegen.masks.tiles.tile_lists import JUDGED, build
from tilegen.masks.usual import BLOCK_SPARSE, KEEP, NEIGHBORHOOD
from tilegen.masks.values import Table

LONGEST = 2048
"""Most rows or columns for which tiles are counted where nothing ties a mask to its lengths."""
FINE = (64, 32, 16)
"""Sides of the fine tiles from which larger tiles are put together, so that one list serves many
shapes."""
MAX_FINE = 2**24
"""Most tiles of a FINE side that are held at once, in two bytes each."""

Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class TileRanges:
    """The streamed tiles of stationary tiles: arrays (batches, heads, stationary tiles), with 1
    where the mask is the same for all."""

    visited: Counts
    """The number of non-empty tiles."""
    full: Counts
    """The number of visited tiles that run without mask code."""
    ends: Counts
    """1 where the stationary tile visits the last streamed tile, which may be cut off; else 0."""
    block: int
    length: int
    """The numbers of streamed rows: `block` of a tile, `length` of the sequence."""
    ranges: Visited = ((), ())
    """Partial and full tiles, where the mask is solved in closed form; `pieces` in full shape."""

    @property
    def pieces(self) -> tuple[tuple[Range, ...], ...]:
        """Partial and full tiles as ranges of tiles: arrays shaped like `visited`."""
        shape = self.visited.shape
        return tuple(
            tuple((np.broadcast_to(lo, shape), np.broadcast_to(hi, shape)) for lo, hi in part)
            for part in self.ranges
        )

    @property
    def heads(self) -> int:
        """The number of heads, of all batches, over which tiles are counted."""
        return self.visited.shape[0] * self.visited.shape[1]

    @property
    def visited_tiles(self) -> int:
        """`A(block_m, block_n)`: the visited tiles of all heads that differ."""
        return int(self.visited.sum())

    @property
    def full_tiles(self) -> int:
        """The number of tiles that run without mask code, over all heads that differ."""
        return int(self.full.sum())

    @property
    def partial_tiles(self) -> int:
        """The number of tiles that the mask's edge or the end of the sequence crosses."""
        return self.visited_tiles - self.full_tiles

    @property
    def visited_rows(self) -> int:
        """The number of streamed rows in all visited tiles, inside the sequence: the loads of a
        kernel read them."""
        return int(self.rows(self.length).sum())

    def rows(self, length: int) -> Counts:
        """Return the streamed rows of the visited tiles, cut off at `length`."""
        beyond = -(-self.length // self.block) * self.block - length
        return self.visited * self.block - self.ends * beyond


def tile_ranges(
    mask: Mask,
    side: Side,
    *,
    seqlen_q: int,
    seqlen_kv: int,
    block_m: int,
    block_n: int,
    batch: int = 1,
    heads: int = 1,
) -> TileRanges:
    """Return the tiles every stationary tile visits, at given lengths; the same arithmetic as the
    emitted kernels'.

    `batch` and `heads` matter only to a mask that depends on them.
    """
    sizes = Shape(batch, heads, seqlen_q, seqlen_kv)
    shape = sizes.tiled(block_m, block_n)
    (stays, stays_block), (length, block) = _sides(side, shape)
    try:
        general, values = _solved(mask, side)
    except Unsupported:
        return listed_ranges(mask, side, shape)
    fixed = all(value.is_stand_in for value in values)
    edges_of = _fixed_edges if fixed else _edges_of
    every, live, dropped = edges_of(general, values, side, sizes, stays, stays_block)
    partial, whole = merge(Arithmetic(block), live, dropped, length)
    zero = np.zeros(every, dtype=np.int64)
    full = sum((hi - lo for lo, hi in whole), zero)
    visited = sum((hi - lo for lo, hi in partial), full)
    tiles = -(-length // block)
    ends = sum(((hi == tiles) & (hi > lo) for lo, hi in (*partial, *whole)), zero)
    return TileRanges(
        visited=visited,
        full=full,
        ends=ends,
        block=block,
        length=length,
        ranges=(partial, whole),
    )


def _edges_of(
    general: Mask, values: tuple[Table, ...], side: Side, shape: Shape, stays: int, block: int
) -> tuple[tuple[int, ...], list[Edges], list[Edges]]:
    """Return the shape of arrays with a number for each stationary tile, and the edges of the live
    and of the dropped intervals of all."""
    depends = depends_on(general)
    first = np.arange(0, stays, block, dtype=np.int64)[None, None]
    last = np.minimum(first + block, stays) - 1
    b = np.arange(shape.batch if B in depends else 1)[:, None, None]
    h = np.arange(shape.heads if H in depends else 1)[None, :, None]
    lengths = {SEQLEN_Q: shape.seqlen_q, SEQLEN_KV: shape.seqlen_kv}
    symbols = {FIRST: first, LAST: last, B: b, H: h} | lengths
    read = _read(general, side)
    computed = points(
        [
            torch.from_numpy(np.array(value.sample(shape.by_axis)))
            if slot in read
            else torch.empty(0, device="cpu")
            for slot, value in enumerate(values)
        ],
        {symbol: torch.as_tensor(value, device="cpu") for symbol, value in symbols.items()},
        torch.device("cpu"),
    )
    live, dropped = (
        [one.each(lambda edge: computed(edge).numpy()) for one in part]
        for part in _intervals(general, side)
    )
    return np.broadcast_shapes(first.shape, b.shape, h.shape), live, dropped


_fixed_edges = lru_cache(maxsize=8)(_edges_of)
"""`_edges_of` for masks without tensors of a user. Tiles that differ in the streamed size alone
share the edges."""


def _sides(side: Side, shape: TiledShape) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the length and the tile size of the stationary axis, then of the streamed axis."""
    q, k = (shape.seqlen_q, shape.block_m), (shape.seqlen_kv, shape.block_n)
    return (q, k) if side == "rows" else (k, q)


def is_solved(mask: Mask, side: Side) -> bool:
    """Whether tiles come in closed form; counting those of others takes time."""
    try:
        _solved(mask, side)
    except Unsupported:
        return False
    return True


def counted_over(mask: Mask, batch: int, heads: int) -> tuple[int, int]:
    """Return the numbers of batches and of heads over which tiles are counted: 1 where a mask does
    not depend on them, or is a stand-in."""
    if mask.is_stand_in:
        return 1, 1
    depends = depends_on(_with_scalars(mask).general)
    return batch if B in depends else 1, heads if H in depends else 1


def _solved(mask: Mask, side: Side) -> tuple[Mask, tuple[Table, ...]]:
    """Return the mask that is solved in place of a given mask, and the values that it reads.
    Raises Unsupported for a mask without closed form."""
    alike = _with_scalars(mask)
    if any(alike.tables[slot].is_unknown for slot in _read(alike.general, side)):
        raise Unsupported(f"expected a mask with its tensors, got {mask}")
    return alike.general, alike.tables


def _with_scalars(mask: Mask) -> Mask:
    """Return a mask that reads the sides of its windows, which is solved once for all widths."""
    if mask.form is not WINDOW:
        return mask.with_parts(_with_scalars)

    def scalar(side: int | Table | None) -> Table | None:
        return Table(axes="", typical=side) if isinstance(side, int) else side

    left, right, alignment = mask.args
    return Mask.of(WINDOW, scalar(left), scalar(right), alignment)


def _sets(mask: Mask, side: Side) -> StreamSets:
    chosen = visit(mask, side)
    if chosen.sets is None:
        raise Unsupported(chosen.reason)
    return chosen.sets


@by_mask(512)
def _read(mask: Mask, side: Side) -> frozenset[int]:
    """Return the slots of the values that decide which tiles are visited. Raises Unsupported."""
    bounds = _sets(mask, side).bounds
    return frozenset(slot for one in bounds for slot in captured_slots(one))


@by_mask(512)
def _intervals(mask: Mask, side: Side) -> tuple[list[Edges], list[Edges]]:
    """Return the edges of the live and of the dropped intervals, as they are computed."""
    sets = _sets(mask, side)
    return [edges(one, sets.length) for one in sets.live], [edges(one) for one in sets.dropped]


# --------------------------------------------------------------------------------------------------
# Counted from lists


@by_mask(512)
def listed_ranges(mask: Mask, side: Side, shape: TiledShape) -> TileRanges:
    """Return the tiles every stationary tile visits.

    Exact for masks with their tensors, and up to LONGEST for others, where typical tensors stand
    for missing ones. Tiles of longer sequences are scaled: the number that a tile visits grows on
    as it did before. The number that a tile of a neighborhood visits does not grow with the rows of
    its grid.
    """
    shrink = max(shape.seqlen_q, shape.seqlen_kv) / LONGEST
    if shrink > 1 and not mask.is_tied:
        return _scaled(mask, side, shape, shrink)
    if shrink > 1 and mask.form is NEIGHBORHOOD:
        grid, window = mask.args
        fewer = _fewer_rows(grid, window)
        if fewer != grid and max(shape.block_m, shape.block_n) <= BLOCK_SIZES[-1]:
            points, lower = math.prod(fewer), Mask.of(NEIGHBORHOOD, fewer, window)
            few = Shape(1, 1, points, points).tiled(shape.block_m, shape.block_n)
            return _stretched(listed_ranges(lower, side, few), side, shape)
    live, full = _tiles(mask, shape)
    if side == "columns":
        live, full = live.swapaxes(2, 3), full.swapaxes(2, 3)
    _, (length, block) = _sides(side, shape)
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


@by_mask(12)
def _built(mask: Mask, shape: TiledShape) -> tuple[Flags, Flags]:
    """Return the same as `_tiles`, from lists; typical tensors stand for missing ones."""
    mask = typical(mask).realized(shape)
    live, full = flags(mask, shape, torch.device("cpu"))
    return live.numpy(), full.numpy()


def flags(mask: Mask, shape: TiledShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tiles (batch, heads, rows, columns) keep anything, and which keep all."""
    tensors = tensors_of(mask, shape, device)
    return build(mask.predicate(), tensors, shape, device=device, side="rows").flags(shape.columns)


def _joined(flags: Flags, by: tuple[int, int], how: Callable[..., Any]) -> Flags:
    """Return the flags of tiles that are `by` fine tiles high and wide; beyond the end all flags
    are false."""
    batch, heads, *fine = flags.shape
    rows, columns = (-(-size // step) for size, step in zip(fine, by, strict=True))
    whole = np.zeros((batch, heads, rows * by[0], columns * by[1]), dtype=np.bool_)
    whole[..., : fine[0], : fine[1]] = flags
    return how(whole.reshape(batch, heads, rows, by[0], columns, by[1]), axis=(3, 5))


def _fewer_rows(grid: tuple[int, ...], window: tuple[int, ...]) -> tuple[int, ...]:
    """Return a grid of fewer rows, where every point still sees as many others."""
    stride = math.prod(grid[1:])
    rows = max(2 * window[0], -(-LONGEST // stride))
    return (min(rows, grid[0]), *grid[1:])


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
    (stays, stays_block), (length, block) = _sides(side, shape)
    tiles = -(-stays // stays_block)
    same = np.arange(tiles) * near.visited.shape[-1] // tiles
    limit = -(-length // block)
    return TileRanges(
        visited=np.minimum(np.rint(near.visited[..., same] * factor).astype(np.int64), limit),
        full=np.minimum(np.rint(near.full[..., same] * factor).astype(np.int64), limit),
        ends=near.ends[..., same],
        block=block,
        length=length,
    )


def typical(mask: Mask) -> Mask:
    """Replace each mask whose tables are missing by random blocks of the same density."""
    if mask.form in (KEEP, ORDERED, MATCHED) and mask.is_stand_in:
        percent = mask.tables[0].typical
        layout = Table(axes="", typical=percent, kind="bool", pattern="layout", block=JUDGED)
        return Mask.of(BLOCK_SPARSE, layout, JUDGED)
    return mask.with_parts(typical)
