"""Count the tiles that a kernel visits under a mask, for one query head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from tilegen.emit.identity import rows_are_aligned, stride_unit
from tilegen.masks.apart import guard_of
from tilegen.masks.mask import Side
from tilegen.masks.tiles.spans import visit
from tilegen.masks.tiles.tile_ranges import counted_over, tile_ranges
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled


@dataclass(frozen=True, kw_only=True)
class Visits:
    """Tiles that a kernel visits for one query head; a preprocess visits each tile once."""

    programs: int
    """Stationary tiles."""
    tiles: int | Fraction
    """Streamed tiles, summed over stationary tiles."""
    partial_tiles: int | Fraction
    """Streamed tiles that need mask code."""
    rows: int | Fraction
    """Streamed rows inside the sequence."""
    longest: int
    """Largest number of streamed tiles of a stationary tile."""
    row_steps: int | Fraction = 0
    """Stationary rows inside the sequence, once per streamed tile."""
    cells: int | Fraction = 0
    """Entries of all visited tiles that a panel holds."""


def visits(tiled: Tiled, *, aligned: bool | None = None) -> Visits:
    """Count the tiles that a config visits; a kernel that joins splits joins `block_n` a step."""
    task, config = tiled.task, tiled.config
    if task.spec.masked:
        tile = config.block_m, config.block_n
        return visits_of(task, *tile, aligned=aligned, split_kv=config.split_kv)
    stationary, streamed = task.lengths
    tiles, steps = -(-stationary // config.block_m), 1
    if task.joined:
        splits = -(-streamed // task.joined.split_kv)
        steps = -(-splits // config.block_n)
    all_tiles = tiles * steps
    return Visits(programs=tiles, tiles=all_tiles, partial_tiles=0, rows=0, longest=steps)


def visits_of(
    task: KernelTask,
    block_m: int,
    block_n: int,
    *,
    aligned: bool | None = None,
    split_kv: int = 0,
) -> Visits:
    """Count the tiles that one query head visits under the problem's mask.

    `aligned` kernels pad the rows of a panel to 16 bytes; by default the head dims decide. For
    batch-invariant problems, kernels visit the tiles of a split of `split_kv` keys in order, all as
    partial tiles. They visit all tiles of a split unless the mask leaves a single range.
    """
    problem, side = task.problem, task.spec.stationary
    aligned = rows_are_aligned(problem) if aligned is None else aligned
    unit = stride_unit(problem, aligned)

    def counted(streamed: int) -> Visits:
        key = "visits", side, block_m, streamed, unit
        return task.memo.once(key, lambda: _visits(problem, side, block_m, streamed, unit))

    counts = counted(block_n)
    if side == "rows" and guard_of(problem, task.spec) == "end":  # loads no keys outside of these
        counts = replace(counts, rows=counted(1).tiles)
    if not (split_kv and task.in_order):
        return counts
    if (
        visit(problem.mask, side).strategy != "single"
    ):  # all tiles of each split with a visited tile
        splits = counted(split_kv)
        tiles_each = split_kv // block_n
        most = min(splits.tiles * tiles_each, splits.programs * -(-problem.seqlen_kv // block_n))
        counts = replace(counts, tiles=most, rows=splits.rows, longest=splits.longest * tiles_each)
    return replace(counts, partial_tiles=counts.tiles)


def _visits(problem: AttentionProblem, side: Side, block_m: int, block_n: int, unit: int) -> Visits:
    seqlen_q, seqlen_kv = problem.seqlen_q, problem.seqlen_kv
    batch, heads = counted_over(problem.mask, problem.batch, problem.num_heads_q)
    ranges = tile_ranges(
        problem.mask,
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
