"""Count elements of a mask's tables that kernels read, for tables with an element per pair.

Tables with an element per row or column are small beside the tiles, and are not counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilegen.kernels.config import TileConfig
from tilegen.masks.tiles.tile_ranges import is_solved, tile_ranges
from tilegen.masks.usual import trees_of
from tilegen.model.columns import Number, exact
from tilegen.task import Tiled


def tree_bytes(tiled: Tiled) -> Number:
    """Compute the bytes that a kernel with whole heads reads of the tables of trees.

    A kernel reads one byte for each pair of a masked tile and each head of the tile.
    """
    spec, problem, config = tiled.spec, tiled.problem, tiled.config
    if not (spec.whole and (trees := trees_of(problem.mask))):
        return 0
    # Rows of a tile that belong to no head are read for too.
    packed = problem.num_heads_kv * exact(config.heads)
    heads: Any = np.where(exact(config.heads) > 1, packed, problem.num_heads_q)
    cells = [_masked_cells(tiled, one) for one in tiled.config.configs]  # type: ignore
    return trees * problem.batch * heads * exact(cells)


def _masked_cells(tiled: Tiled, config: TileConfig) -> int:
    """Count the pairs of all partial tiles inside the sequences. For batch-invariant problems all
    visited tiles count."""
    problem, side = tiled.problem, tiled.spec.stationary
    if not is_solved(problem.mask, side):
        return 0
    ranges = tile_ranges(
        problem.mask,
        side,
        seqlen_q=problem.seqlen_q,
        seqlen_kv=problem.seqlen_kv,
        block_m=config.block_m,
        block_n=config.block_n,
    )
    block, _ = tiled.spec.loop.sides(config.block_m, config.block_n)
    tiles, stationary = ranges.visited.shape[-1], tiled.task.lengths[0]
    mine = np.minimum(block, stationary - block * np.arange(tiles, dtype=np.int64))
    partial, full = ranges.pieces
    cells = 0
    for lo, hi in (*partial, *full) if problem.invariant else partial:
        rows = np.minimum(hi * ranges.block, ranges.length) - np.minimum(
            lo * ranges.block, ranges.length
        )
        cells += int((mine * rows).sum())
    return cells // ranges.heads
