"""Tiles that a CPU takes until it has a cost model, which is to replace this table.

Measured on an AMD Zen 3 and a Zen 4: any tile of 64 to 128 rows and 64 to 128 columns lies within a
few per cent of the best.
"""

from __future__ import annotations

from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem

LONG = 1024
"""Queries from which a forward without a mask takes tiles of 128 rows."""
WIDE = 128
"""Head dim up to which it does."""
JOINED = 16
"""Splits that are joined in a step."""
SUMMED_ROWS = 32
"""Rows of a tile of kernels that go over their rows once."""


def cpu_config(problem: AttentionProblem, kernel: Kernel) -> TileConfig:
    """Return the tile of a kernel that holds head dims whole, or goes over its rows once."""
    spec = KERNELS[kernel]
    if spec.joins:
        return TileConfig(block_m=spec.knobs.block_m[-1], block_n=JOINED)
    if not spec.masked:
        return TileConfig(block_m=SUMMED_ROWS, block_n=16)
    widest = max(problem.head_dim_qk, problem.head_dim_v)
    is_long = problem.seqlen_q >= LONG and widest <= WIDE
    # With a mask, tiles on its edge are computed whole.
    tall = "out" in spec.made and is_long and problem.mask.notation == "full"
    return TileConfig(block_m=128 if tall else _fitting(problem.seqlen_q), block_n=64)


def _fitting(length: int) -> int:
    """Return the rows of a tile of queries: 64, or fewer where a problem has fewer."""
    return next(rows for rows in (16, 32, 64) if rows >= min(length, 64))
