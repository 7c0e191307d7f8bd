"""Tiles that a CPU takes until it has a cost model, which is to replace this table.

Measured on an AMD Zen 3 and a Zen 4: any tile of 64 to 128 rows and 64 to 128 columns lies within a
few per cent of the best.
"""

from __future__ import annotations

from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem

LONG = 1024
"""Queries from which a forward without a mask takes tiles of 128 rows."""
WIDE = 128
"""Head dim up to which it does."""
SUMMED_ROWS = 32
"""Rows of a tile of kernels that go over their rows once."""


def cpu_config(problem: AttentionProblem, kernel: Kernel) -> TileConfig:
    """Return the tile of a kernel that holds head dims whole, or goes over its rows once."""
    if kernel == "bwd_preprocess":
        return TileConfig(block_m=SUMMED_ROWS, block_n=16)
    widest = max(problem.head_dim_qk, problem.head_dim_v)
    rows = 128 if kernel == "fwd" and problem.seqlen_q >= LONG and widest <= WIDE else 64
    if kernel == "bwd_dkdv":  # queries pass by, in tiles of block_m
        return TileConfig(block_m=64, block_n=64)
    if problem.mask.notation != "full":  # tiles on the mask's edge are computed whole
        rows = 64
    return TileConfig(block_m=rows, block_n=64)
