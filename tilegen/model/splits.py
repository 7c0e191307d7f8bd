"""Count the splits of a kernel's streamed rows, and divide a request's keys over them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilegen.kernels.config import TileConfig
from tilegen.kernels.split_kv import FILLING, usual_tiles
from tilegen.masks.grouping import packed_heads
from tilegen.masks.mask import Mask
from tilegen.masks.remembered import by_mask
from tilegen.masks.source import ranges_source
from tilegen.masks.tiles.spans import visit
from tilegen.masks.tiles.tile_ranges import counted_over, tile_ranges
from tilegen.model.columns import Number, by_tile, exact
from tilegen.model.visits import mean_of, visits, visits_of
from tilegen.problem import AttentionProblem
from tilegen.task import Tiled


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The splits of the rows that a head's tiles stream; most kernels have a single split."""

    count: Number
    """Splits of all streamed rows."""
    programs: Number
    """Pairs of a stationary tile and a split in which the tile visits a tile."""
    rows: Number
    """Sum of the stationary rows inside the sequence over these pairs."""
    tiles_of_group: Number
    """Tiles for the query heads of a key-value head: one shared tile, or one per head."""
    longest: Number
    """Tiles of the longest split, after masking."""


def usual_split(problem: AttentionProblem) -> TileConfig:
    """Return the splits to assume for a kernel that joins them if none are chosen yet: 1024 rows,
    near the published optimum of decoding (benchmarks/results/published/README.md)."""
    heads = packed_heads(problem)
    return TileConfig(block_m=max(1, 16 // heads), block_n=64, heads=heads, split_kv=1024)


@by_tile
def splits_of(tiled: Tiled) -> Splits:
    """Count the splits that a kernel makes or joins."""
    task, spec, problem, config = tiled.task, tiled.spec, tiled.problem, tiled.config
    if task.before:
        return splits_of(task.before.tiled(task.joined or usual_split(problem)))
    group = task.heads_of_group
    if spec.shares:
        return _shares(tiled)
    if not spec.splits:
        return _unsplit(tiled, group)
    tiles_of_group = group // np.minimum(exact(config.heads), group)
    stationary, streamed = spec.loop.sides(config.block_m, config.block_n)
    count = -(-task.lengths[1] // exact(config.split_kv))
    if task.divided:
        return _divided(tiled, count, tiles_of_group)
    # A split is visited if any of its tiles is, as if the split were a tile.
    counts = visits_of(task, *spec.loop.sides(stationary, config.split_kv), aligned=False)
    programs, rows = counts.tiles, counts.row_steps
    # If the heads of a group visit different tiles, a program takes the heads in turn. It is
    # launched even if no head visits a tile.
    if spec.stationary == "columns" and _in_turn(problem.mask):
        programs, rows = count * counts.programs, count * problem.seqlen_kv
    return Splits(
        count=count,
        programs=programs,
        rows=rows,
        tiles_of_group=tiles_of_group,
        longest=exact(config.split_kv // streamed),
    )


@by_mask(64)
def _in_turn(mask: Mask) -> bool:
    return ranges_source(mask.general, "columns").per_head


def _unsplit(tiled: Tiled, tiles_of_group: int) -> Splits:
    """Count one split of all rows, or one per score tile if each has a program of its own."""
    counts, streamed = visits(tiled), tiled.task.lengths[1]
    if tiled.spec.panel == "writes":
        return Splits(
            count=-(-streamed // exact(tiled.config.block_n)),
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
    """Count the shares of the stationary rows. Each share adds to all streamed rows."""
    problem, side = tiled.problem, tiled.spec.stationary
    stationary, streamed = tiled.task.lengths
    count = -(-stationary // exact(tiled.config.split_kv))
    batch, heads = counted_over(problem.mask, problem.batch, problem.num_heads_q)
    lengths = {"seqlen_q": problem.seqlen_q, "seqlen_kv": problem.seqlen_kv}

    def longest(config: TileConfig, shares: int) -> int:
        over = {"block_m": config.block_m, "block_n": config.block_n, "batch": batch}
        visited = tile_ranges(problem.mask, side, **lengths, **over, heads=heads).visited
        return max(int(visited[..., share::shares].sum(-1).max()) for share in range(shares))

    return Splits(
        count=count,
        programs=count,
        rows=count * streamed,
        tiles_of_group=1,
        longest=exact(list(map(longest, tiled.config.configs, count))),  # type: ignore
    )


def _divided(tiled: Tiled, count: Any, tiles_of_group: Any) -> Splits:
    of_tiles = zip(tiled.config.configs, count, tiles_of_group, strict=True)  # type: ignore
    each = [divided_splits(tiled.problem, *of_tile) for of_tile in of_tiles]
    return Splits(
        **{one.name: exact([getattr(x, one.name) for x in each]) for one in fields(Splits)}
    )


def divided_splits(
    problem: AttentionProblem, config: TileConfig, count: int, tiles_of_group: int
) -> Splits:
    """Count the splits of requests that all have the problem's keys, divided over `count` programs
    of each tile. The arithmetic is that of the emitted kernel."""
    mask, seqlen_q = problem.mask, problem.seqlen_q
    block_m, block_n = config.block_m, config.block_n
    programs = problem.batch * problem.num_heads_kv * tiles_of_group * -(-seqlen_q // block_m)
    usual, to_fill = usual_tiles(problem, config), -(-FILLING // programs)
    batch, heads = counted_over(mask, problem.batch, problem.num_heads_q)

    def visited(block: int) -> NDArray[np.int64]:
        lengths = {"seqlen_q": seqlen_q, "seqlen_kv": problem.seqlen_kv}
        over = {"block_m": block_m, "block_n": block, "batch": batch, "heads": heads}
        return tile_ranges(mask, "rows", **lengths, **over).visited

    if visit(mask, "rows").strategy == "single":  # divide the tiles that a tile of queries visits
        tiles = visited(block_n)
        tiles_each = np.maximum(np.minimum(usual, -(-tiles // to_fill)), -(-tiles // count))
        splits, longest = -(-tiles // np.maximum(tiles_each, 1)), int(tiles_each.max())
    else:  # divide all tiles of the request; a split may then visit none
        all_tiles = -(-problem.seqlen_kv // block_n)
        longest = max(min(usual, -(-all_tiles // to_fill)), -(-all_tiles // count))
        splits = visited(longest * block_n)
    rows = np.minimum(block_m, seqlen_q - block_m * np.arange(splits.shape[-1], dtype=np.int64))
    masks = splits.shape[0] * splits.shape[1]
    return Splits(
        count=count,
        programs=mean_of(int(splits.sum()), masks),
        rows=mean_of(int((rows * splits).sum()), masks),
        tiles_of_group=tiles_of_group,
        longest=longest,
    )
