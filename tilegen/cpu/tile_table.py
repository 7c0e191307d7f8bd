"""Tiles for a CPU, until a cost model replaces this table.

Measured on an AMD Zen 3 and a Zen 4: all tiles of 64 to 128 rows and 64 to 128 columns are within a
few per cent of the best.
"""

from __future__ import annotations

from tilegen.kernels.config import SPLITS, Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem

LONG = 1024
"""Queries from which a forward without a mask has tiles of 128 rows."""
WIDE = 128
"""Largest head dim for which it has them."""
SUMMED_ROWS = 32
"""Rows of a tile in kernels that pass over their rows once."""
SHORT = 1024
"""Keys up to which a masked backward in one pass has key tiles of 64 instead of 128: tiles on the
edge of the mask are computed whole."""
ENOUGH, LEAST_TILES = 8, 4
"""Programs from which keys are not divided into more shares, and the least key tiles of a share: a
guess. Shares depend on the problem alone; if they depended on the threads, so would the bits."""
MOST_BYTES = 2**28
"""Most memory for dQ of all shares [bytes]."""


def cpu_config(problem: AttentionProblem, kernel: Kernel) -> TileConfig:
    """Return the tile of a kernel that holds head dims whole, or passes over its rows once."""
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
    # With a mask smaller tiles waste less: tiles on its edge are computed whole.
    tall = "out" in spec.made and is_long and problem.mask.notation == "full"
    return TileConfig(block_m=128 if tall else _fitting(problem.seqlen_q), block_n=64)


def _fitting(length: int) -> int:
    """Return the rows of a query tile: 64, or fewer for a problem with fewer queries."""
    return next(rows for rows in (16, 32, 64) if rows >= min(length, 64))


def _share(problem: AttentionProblem, block_n: int) -> int:
    """Return the average keys of a share: a power of two."""
    groups = problem.batch * problem.num_heads_kv
    one_dq = 4 * problem.batch * problem.num_heads_q * problem.seqlen_q * problem.head_dim_qk
    shares = max(1, min(ENOUGH // groups, MOST_BYTES // one_dq))
    least = LEAST_TILES * block_n if shares > 1 else block_n
    wanted = max(-(-problem.seqlen_kv // shares), least)
    return next((keys for keys in SPLITS if keys >= wanted), SPLITS[-1])
