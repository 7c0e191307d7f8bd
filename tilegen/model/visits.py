"""Count the tiles that a kernel visits under a mask, for one query head."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

import numpy as np

from tilegen.emit.identity import rows_are_aligned, stride_unit
from tilegen.masks.apart import guard_of
from tilegen.masks.mask import Mask, Side
from tilegen.masks.remembered import by_mask
from tilegen.masks.tiles.spans import visit
from tilegen.masks.tiles.tile_ranges import counted_over, tile_ranges
from tilegen.model.columns import Number, by_tile, exact, picked
from tilegen.task import KernelTask, Tiled


@dataclass(frozen=True, kw_only=True)
class Visits:
    """Tiles that a kernel visits for one query head; a preprocess visits each tile once."""

    programs: Number
    """Stationary tiles."""
    tiles: Number
    """Streamed tiles, summed over stationary tiles."""
    partial_tiles: Number
    """Streamed tiles that need mask code."""
    rows: Number
    """Streamed rows inside the sequence."""
    longest: Number
    """Largest number of streamed tiles of a stationary tile."""
    row_steps: Number = 0
    """Stationary rows inside the sequence, once per streamed tile."""
    cells: Number = 0
    """Entries of all visited tiles that a panel holds."""


@by_tile
def visits(tiled: Tiled, *, aligned: bool | None = None) -> Visits:
    """Count the tiles that a config visits; a kernel that joins splits joins `block_n` a step."""
    task, config = tiled.task, tiled.config
    if task.spec.masked:
        tile = config.block_m, config.block_n
        return visits_of(task, *tile, aligned=aligned, split_kv=config.split_kv)
    stationary, streamed = task.lengths
    tiles, steps = -(-stationary // exact(config.block_m)), exact(config.block_n) * 0 + 1
    if task.joined:
        splits = -(-streamed // task.joined.split_kv)
        steps = -(-splits // exact(config.block_n))
    return Visits(programs=tiles, tiles=tiles * steps, partial_tiles=0, rows=0, longest=steps)


def visits_of(
    task: KernelTask,
    block_m: Number,
    block_n: Number,
    *,
    aligned: bool | None = None,
    split_kv: Number = 0,
) -> Visits:
    """Count the tiles that one query head visits under the problem's mask, for a tile or for
    columns of tiles.

    `aligned` kernels pad the rows of a panel to 16 bytes; by default the head dims decide. For
    batch-invariant problems, kernels visit the tiles of a split of `split_kv` keys in order, all as
    partial tiles. They visit all tiles of a split unless the mask leaves a single range.
    """
    problem, side = task.problem, task.spec.stationary
    aligned = rows_are_aligned(problem) if aligned is None else aligned
    sizes = problem.seqlen_q, problem.seqlen_kv, problem.batch, problem.num_heads_q
    unit = stride_unit(problem, aligned)

    def counted(streamed: Number) -> Visits:
        rows, columns = np.broadcast_arrays(block_m, streamed)
        pairs = list(zip(rows.ravel().tolist(), columns.ravel().tolist(), strict=True))
        of_pair = {pair: _visits(problem.mask, side, *sizes, *pair, unit) for pair in set(pairs)}
        each = [of_pair[pair] for pair in pairs]
        arrays = {one.name: exact([getattr(x, one.name) for x in each]) for one in fields(Visits)}
        return picked(Visits(**arrays), slice(None) if rows.ndim else 0)

    counts = counted(block_n)
    if side == "rows" and guard_of(problem, task.spec) == "end":  # loads no keys outside of these
        counts = replace(counts, rows=counted(1).tiles)
    if not (np.any(split_kv) and task.in_order):
        return counts
    if (
        visit(problem.mask, side).strategy != "single"
    ):  # all tiles of each split with a visited tile
        splits = counted(split_kv)
        tiles_each = split_kv // block_n
        most = splits.programs * -(-problem.seqlen_kv // block_n)
        tiles: Any = np.minimum(splits.tiles * tiles_each, most)
        counts = replace(counts, tiles=tiles, rows=splits.rows, longest=splits.longest * tiles_each)
    return replace(counts, partial_tiles=counts.tiles)


@by_mask(4096)
def _visits(
    mask: Mask,
    side: Side,
    seqlen_q: int,
    seqlen_kv: int,
    batch: int,
    num_heads: int,
    block_m: int,
    block_n: int,
    unit: int,
) -> Visits:
    batch, heads = counted_over(mask, batch, num_heads)
    ranges = tile_ranges(
        mask,
        side,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        block_m=block_m,
        block_n=block_n,
        batch=batch,
        heads=heads,
    )
    padded = -(-seqlen_kv // unit) * unit
    stationary, block, length = (
        (seqlen_q, block_m, padded) if side == "rows" else (padded, block_n, seqlen_q)
    )
    heads = ranges.heads
    mine = np.minimum(
        block, stationary - block * np.arange(ranges.visited.shape[-1], dtype=np.int64)
    )
    return Visits(
        row_steps=mean_of(int((mine * ranges.visited).sum()), heads),
        cells=mean_of(int((mine * ranges.rows(length)).sum()), heads),
        programs=ranges.visited.shape[-1],
        tiles=mean_of(ranges.visited_tiles, heads),
        partial_tiles=mean_of(ranges.partial_tiles, heads),
        rows=mean_of(ranges.visited_rows, heads),
        longest=int(ranges.visited.max()),
    )


def mean_of(total: int, heads: int) -> int | Fraction:
    """Compute the exact mean over heads."""
    return total // heads if total % heads == 0 else Fraction(total, heads)
