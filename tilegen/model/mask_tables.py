"""Elements that kernels read of a mask's tables that are as large as the tiles they are read for.

Tables with a number for each row or column are small beside what tiles hold, and are not counted.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.masks.mask import Mask, Side
from tilegen.masks.tiles.tile_ranges import is_solved, tile_ranges
from tilegen.masks.tree import trees_of
from tilegen.problem import AttentionProblem


def tree_bytes(problem: AttentionProblem, config: TileConfig, kernel: Kernel) -> int:
    """Return the bytes that a kernel of whole heads reads of the tables of trees, each as wide as
    the call has queries: one for each pair of a tile that is masked, and for each head of it."""
    spec = KERNELS[kernel]
    if not (spec.masked and spec.whole and (trees := trees_of(problem.mask))):
        return 0
    lengths = problem.seqlen_q, problem.seqlen_kv
    cells = _masked_cells(
        problem.mask, spec.stays, *lengths, config.block_m, config.block_n, problem.invariant
    )
    heads = problem.num_heads_q
    if config.heads > 1:  # rows of a tile that are of no head are read for, too
        heads = problem.num_heads_kv * config.heads
    return trees * problem.batch * heads * cells


@lru_cache(maxsize=1024)
def _masked_cells(
    mask: Mask, side: Side, seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int, every: bool
) -> int:
    """Return the pairs of all partial tiles inside the sequences, or of `every` visited tile."""
    if not is_solved(mask, side):
        return 0
    found = tile_ranges(
        mask, side, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, block_m=block_m, block_n=block_n
    )
    stays, block = (seqlen_q, block_m) if side == "rows" else (seqlen_kv, block_n)
    tiles = found.visited.shape[-1]
    mine = np.minimum(block, stays - block * np.arange(tiles, dtype=np.int64))
    partial, full = found.pieces
    cells = 0
    for lo, hi in (*partial, *full) if every else partial:
        rows = np.minimum(hi * found.block, found.length) - np.minimum(
            lo * found.block, found.length
        )
        cells += int((mine * rows).sum())
    return cells // found.heads
