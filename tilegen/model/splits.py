"""The splits of what streams past a kernel's tiles, and how the keys of a request are divided over
those that it has."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tilegen.kernels.config import TileConfig
from tilegen.kernels.split_kv import FILLING, usual_tiles
from tilegen.masks.grouping import packed_heads
from tilegen.masks.mask import Mask
from tilegen.masks.source import is_single
from tilegen.masks.tiles.tile_ranges import counted_over, tile_ranges
from tilegen.problem import AttentionProblem


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The splits of what streams past a head's tiles; one of all rows in most kernels."""

    count: int
    """Splits of all rows that stream."""
    programs: int | Fraction
    """Pairs of a tile that stays and a split of which it visits anything."""
    rows: int | Fraction
    """Rows that stay, inside the sequence, added up over these pairs."""
    tiles_of_group: int
    """Tiles of the query heads of a key-value head: one that stays or streams for all of them, or
    one for each."""
    longest: int
    """Streamed tiles of the split that has most, as far as the mask leaves them."""


def usual_split(problem: AttentionProblem) -> TileConfig:
    """Return the splits that a kernel is taken to join where nobody says which: of 1024 rows, near
    which the published optimum of decoding lies (benchmarks/results/published/README.md)."""
    heads = packed_heads(problem)
    return TileConfig(block_m=max(1, 16 // heads), block_n=64, heads=heads, split_kv=1024)


def divided_splits(
    problem: AttentionProblem, config: TileConfig, count: int, tiles_of_group: int
) -> Splits:
    """Return the splits of requests that all have the problem's keys, and divide them over `count`
    programs of each tile: the same arithmetic as the emitted kernel's."""
    tiles = -(-problem.seqlen_q // config.block_m)
    programs = problem.batch * problem.num_heads_kv * tiles_of_group * tiles
    found = _divided(
        problem.mask,
        *(problem.seqlen_q, problem.seqlen_kv, config.block_m, config.block_n),
        *(count, usual_tiles(problem, config), -(-FILLING // programs)),
        *counted_over(problem.mask, problem.batch, problem.num_heads_q),
    )
    return Splits(
        count=count,
        programs=found[0],
        rows=found[1],
        tiles_of_group=tiles_of_group,
        longest=found[2],
    )


@lru_cache(maxsize=8192)
def _divided(
    mask: Mask,
    seqlen_q: int,
    seqlen_kv: int,
    block_m: int,
    block_n: int,
    count: int,
    usual: int,
    to_fill: int,
    batch: int,
    heads: int,
) -> tuple[int | Fraction, int | Fraction, int]:
    """Return the splits of one head that hold tiles, the query rows of these, and the tiles of the
    largest one."""

    def visited(block: int) -> NDArray[np.int64]:
        lengths = {"seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv}
        over = {"block_m": block_m, "block_n": block, "batch": batch, "heads": heads}
        return tile_ranges(mask, "rows", **lengths, **over).visited

    if is_single(mask, "rows"):  # the tiles that a tile of queries visits are divided
        tiles = visited(block_n)
        each = np.maximum(np.minimum(usual, -(-tiles // to_fill)), -(-tiles // count))
        splits, longest = -(-tiles // np.maximum(each, 1)), int(each.max())
    else:  # all tiles of the request are divided, and a split may visit none of its own
        every = -(-seqlen_kv // block_n)
        longest = max(min(usual, -(-every // to_fill)), -(-every // count))
        splits = visited(longest * block_n)
    rows = np.minimum(block_m, seqlen_q - block_m * np.arange(splits.shape[-1], dtype=np.int64))
    alike = splits.shape[0] * splits.shape[1]
    stay = mean_of(int((rows * splits).sum()), alike)
    return mean_of(int(splits.sum()), alike), stay, longest


def mean_of(total: int, heads: int) -> int | Fraction:
    """Return the mean over heads, exactly."""
    return total // heads if total % heads == 0 else Fraction(total, heads)
