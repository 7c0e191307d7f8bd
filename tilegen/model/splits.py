"""The splits of a kernel's streamed rows, and the division of a request's keys over them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import tile_heads
from tilegen.kernels.split_kv import FILLING, usual_tiles
from tilegen.masks.grouping import packed_heads
from tilegen.masks.source import is_single, ranges_source
from tilegen.masks.tiles.tile_ranges import counted_over, tile_ranges
from tilegen.model.visits import mean_of, visits, visits_of
from tilegen.problem import AttentionProblem
from tilegen.task import Tiled


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The splits of the rows that a head's tiles stream; most kernels have a single split."""

    count: int
    """Splits of all streamed rows."""
    programs: int | Fraction
    """Pairs of a stationary tile and a split with tiles that it visits."""
    rows: int | Fraction
    """Stationary rows inside the sequence, added up over these pairs."""
    tiles_of_group: int
    """Tiles of the query heads of a key-value head: a tile shared by all of them, or a tile for
    each."""
    longest: int
    """Tiles of the longest split, after masking."""


def usual_split(problem: AttentionProblem) -> TileConfig:
    """Return the splits to assume for a kernel that joins them where none are settled: of 1024
    rows, near the published optimum of decoding (benchmarks/results/published/README.md)."""
    heads = packed_heads(problem)
    return TileConfig(block_m=max(1, 16 // heads), block_n=64, heads=heads, split_kv=1024)


def splits_of(tiled: Tiled) -> Splits:
    """Count the splits that a kernel makes, or that it joins."""
    return tiled.by_tile("splits", lambda: _splits(tiled))


def _splits(tiled: Tiled) -> Splits:
    task, spec, problem, config = tiled.task, tiled.spec, tiled.problem, tiled.config
    if task.before:
        return splits_of(task.before.tiled(task.joined or usual_split(problem)))
    group = task.heads_of_group
    if spec.shares:
        return _shares(tiled)
    if not spec.splits:
        return _unsplit(tiled, group)
    tiles_of_group = group // tile_heads(config, group)
    stays, passes = spec.loop.sides(config.block_m, config.block_n)
    count = -(-task.lengths[1] // config.split_kv)
    if task.divided:
        return divided_splits(problem, config, count, tiles_of_group)
    # A split is visited where any of its tiles is: as if it were a tile itself.
    counts = visits_of(task, *spec.loop.sides(stays, config.split_kv), aligned=False)
    programs, rows = counts.tiles, counts.row_steps
    # Where the heads of a group visit different tiles, a program takes the heads in turn, and is
    # launched even where no head visits a tile.
    if spec.stays == "columns" and task.memo.once(
        "heads in turn", lambda: ranges_source(problem.mask.general, "columns").per_head
    ):
        programs, rows = count * counts.programs, count * problem.seqlen_kv
    return Splits(
        count=count,
        programs=programs,
        rows=rows,
        tiles_of_group=tiles_of_group,
        longest=config.split_kv // passes,
    )


def _unsplit(tiled: Tiled, tiles_of_group: int) -> Splits:
    """Return one split of all rows; one for each tile of scores that has a program of its own."""
    counts, passing = visits(tiled), tiled.task.lengths[1]
    if tiled.spec.panel == "writes":
        return Splits(
            count=-(-passing // tiled.config.block_n),
            programs=counts.tiles,
            rows=counts.row_steps,
            tiles_of_group=tiles_of_group,
            longest=1,
        )
    return Splits(
        count=1,
        programs=counts.programs,
        rows=tiled.task.lengths[0],
        tiles_of_group=tiles_of_group,
        longest=counts.longest,
    )


def _shares(tiled: Tiled) -> Splits:
    """Return the shares of what stays, each of which has a part of all rows that stream."""
    problem, config = tiled.problem, tiled.config
    stays, streams = tiled.task.lengths
    count = -(-stays // config.split_kv)
    batch, heads = counted_over(problem.mask, problem.batch, problem.num_heads_q)
    lengths = {"seqlen_q": problem.seqlen_q, "seqlen_kv": problem.seqlen_kv}
    over = {"block_m": config.block_m, "block_n": config.block_n, "batch": batch, "heads": heads}
    ranges = tile_ranges(problem.mask, tiled.spec.stays, **lengths, **over)
    tiles = (ranges.visited[..., share::count].sum(-1).max() for share in range(count))
    return Splits(
        count=count,
        programs=count,
        rows=count * streams,
        tiles_of_group=1,
        longest=int(max(tiles)),
    )


def divided_splits(
    problem: AttentionProblem, config: TileConfig, count: int, tiles_of_group: int
) -> Splits:
    """Count the splits of requests that all have the problem's keys, and divide them over `count`
    programs of each tile: the same arithmetic as the emitted kernel's."""
    mask, seqlen_q = problem.mask, problem.seqlen_q
    block_m, block_n = config.block_m, config.block_n
    programs = problem.batch * problem.num_heads_kv * tiles_of_group * -(-seqlen_q // block_m)
    usual, to_fill = usual_tiles(problem, config), -(-FILLING // programs)
    batch, heads = counted_over(mask, problem.batch, problem.num_heads_q)

    def visited(block: int) -> NDArray[np.int64]:
        lengths = {"seqlen_q": seqlen_q, "seqlen_kv": problem.seqlen_kv}
        over = {"block_m": block_m, "block_n": block, "batch": batch, "heads": heads}
        return tile_ranges(mask, "rows", **lengths, **over).visited

    if is_single(mask, "rows"):  # the tiles that a tile of queries visits are divided
        tiles = visited(block_n)
        each = np.maximum(np.minimum(usual, -(-tiles // to_fill)), -(-tiles // count))
        splits, longest = -(-tiles // np.maximum(each, 1)), int(each.max())
    else:  # all tiles of the request are divided, and a split may visit none of its own
        every = -(-problem.seqlen_kv // block_n)
        longest = max(min(usual, -(-every // to_fill)), -(-every // count))
        splits = visited(longest * block_n)
    rows = np.minimum(block_m, seqlen_q - block_m * np.arange(splits.shape[-1], dtype=np.int64))
    alike = splits.shape[0] * splits.shape[1]
    return Splits(
        count=count,
        programs=mean_of(int(splits.sum()), alike),
        rows=mean_of(int((rows * splits).sum()), alike),
        tiles_of_group=tiles_of_group,
        longest=longest,
    )
