"""Tiles that a CPU takes until it has a cost model, which is to replace this table.

Measured on an AMD Zen 3 and a Zen 4: any tile of 64 to 128 rows and 64 to 128 columns lies within a
few per cent of the best.
"""

from __future__ import annotations

from tilegen.kernels.config import SPLITS, Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem

LONG = 1024
"""Queries from which a forward without a mask takes tiles of 128 rows."""
WIDE = 128
"""Head dim up to which it does."""
SUMMED_ROWS = 32
"""Rows of a tile of kernels that go over their rows once."""
SHORT = 1024
"""Keys up to which a causal backward in one pass keeps 64 of them: tiles on the edge of the mask
are computed whole."""
ENOUGH, LEAST_TILES = 8, 4
"""Programs from which on keys are not dealt out to more shares, and the key tiles that a share has
at least: a guess. Shares follow from the problem alone: with the threads, bits would change."""
MOST_BYTES = 2**28
"""Memory that dQ of several shares may take [bytes]."""


def cpu_config(problem: AttentionProblem, kernel: Kernel) -> TileConfig:
    """Return the tile of a kernel that holds head dims whole, or goes over its rows once."""
    spec = KERNELS[kernel]
    widest = max(problem.head_dim_qk, problem.head_dim_v)
    if spec.joins:
        return TileConfig(block_m=spec.knobs.block_m[-1], block_n=spec.knobs.block_n[0])
    if not spec.masked:
        return TileConfig(block_m=SUMMED_ROWS, block_n=16)
    if spec.shares:
        short = problem.mask.notation != "full" and problem.seqlen_kv <= SHORT
        block_n = 64 if short or widest > WIDE else 128
        return TileConfig(block_m=64, block_n=block_n, split_kv=_share(problem, block_n))
    is_long = problem.seqlen_q >= LONG and widest <= WIDE
    # With a mask, tiles on its edge are computed whole.
    tall = "out" in spec.made and is_long and problem.mask.notation == "full"
    return TileConfig(block_m=128 if tall else _fitting(problem.seqlen_q), block_n=64)


def _fitting(length: int) -> int:
    """Return the rows of a tile of queries: 64, or fewer where a problem has fewer."""
    return next(rows for rows in (16, 32, 64) if rows >= min(length, 64))


def _share(problem: AttentionProblem, block_n: int) -> int:
    """Return the keys of a share, on average: a power of two."""
    groups = problem.batch * problem.num_heads_kv
    one_dq = 4 * problem.batch * problem.num_heads_q * problem.seqlen_q * problem.head_dim_qk
    shares = max(1, min(ENOUGH // groups, MOST_BYTES // one_dq))
    least = LEAST_TILES * block_n if shares > 1 else block_n
    wanted = max(-(-problem.seqlen_kv // shares), least)
    return next((keys for keys in SPLITS if keys >= wanted), SPLITS[-1])
