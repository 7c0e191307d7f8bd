"""Tiles for a CPU that no model chooses: of kernels that pass over their rows once, of splits, and
the shares of keys.
"""

from __future__ import annotations

from tilegen.kernels.config import SPLITS, Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem

BLOCK_N = 64
"""Keys of a tile."""
SUMMED_ROWS = 32
"""Rows of a tile in kernels that pass over their rows once."""
ENOUGH, LEAST_SHARE = 8, 256
"""Programs from which keys are not divided into more shares, and the least keys of a share: a
guess. Shares depend on the problem alone; if they depended on the threads, so would the bits."""
MOST_BYTES = 2**28
"""Most memory for dQ of all shares [bytes]."""


def cpu_config(problem: AttentionProblem, kernel: Kernel) -> TileConfig:
    """Return the tile of a kernel that holds head dims whole, or passes over its rows once. The
    model chooses among others of the kernels whose scores are not divided into splits."""
    spec = KERNELS[kernel]
    if spec.joins:
        return TileConfig(block_m=spec.knobs.block_m[-1], block_n=spec.knobs.block_n[0])
    if not spec.masked:
        return TileConfig(block_m=SUMMED_ROWS, block_n=16)
    share = share_of(problem) if spec.shares else 0
    return TileConfig(block_m=_fitting(problem.seqlen_q), block_n=BLOCK_N, split_kv=share)


def _fitting(length: int) -> int:
    """Return the rows of a query tile: 64, or fewer for a problem with fewer queries."""
    return next(rows for rows in (16, 32, 64) if rows >= min(length, 64))


def share_of(problem: AttentionProblem) -> int:
    """Return the average keys of a share, a power of two."""
    groups = problem.batch * problem.num_heads_kv
    one_dq = 4 * problem.batch * problem.num_heads_q * problem.seqlen_q * problem.head_dim_qk
    shares = max(1, min(ENOUGH // groups, MOST_BYTES // one_dq))
    least = LEAST_SHARE if shares > 1 else BLOCK_N
    wanted = max(-(-problem.seqlen_kv // shares), least)
    return next((keys for keys in SPLITS if keys >= wanted), SPLITS[-1])
