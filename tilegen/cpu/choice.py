"""Rules for the kernels of a call on the CPU: a family for each pass, splits, and usual tiles.

The choice depends on the problem alone, not on threads or clocks, so that results depend on
neither.
"""

from __future__ import annotations

from dataclasses import replace

from tilegen.cpu.tile_table import cpu_config
from tilegen.kernels.config import BLOCK_SIZES, Kernel, TileConfig
from tilegen.kernels.q_stationary import FWD, Q_STATIONARY
from tilegen.kernels.registry import BACKWARD, KERNELS
from tilegen.kernels.spec import Direction, FamilySpec
from tilegen.kernels.split_kv import PAGED, SPLIT_KV
from tilegen.kernels.two_pass import TWO_PASS
from tilegen.masks.grouping import packed_heads
from tilegen.model.mask_size import mask_size
from tilegen.problem import AttentionProblem

BUSY = 8
"""Programs from which the keys of a forward are not split: several per core of a small machine."""
LEAST_SPLIT = 512
"""Keys of the smallest split: joining smaller splits would cost more than they gain."""
INVARIANT_SPLIT = 1024
"""Keys of a split where a row's bits must not depend on the lengths in its batch."""
MOST_OF_THIN = 16
"""Most rows of a product whose right operand is read where it lies, see thin.py."""
THIN_ROWS, THIN_BYTES = 8, 8 << 10
"""Most rows of tiles that stream fewer keys than others, and the bytes of keys in such a tile. More
keys took up to 35 % longer on a Zen 5 (benchmarks/results/zen5/exhaustive/fwd_split)."""
SHARING_QUERIES, KEYS_PER_QUERY = 32, 64
"""Most queries of a head whose keys are packed once for all heads of a group, and the least keys
that a query sees then, over the queries. On a Zen 5 groups of two to eight on 4096 keys and more
took 0.51 to 0.98 times as long for 16 queries, and 0.77 to 1.04 times for 32."""
FEW_ROWS, MOST_ROWS = BLOCK_SIZES[0], 64
"""Rows of the smallest tile of a single head, and of the largest tile with several heads. A head
with fewer rows shares a tile with the other heads of its group."""


def family_by_rule(problem: AttentionProblem, direction: Direction) -> FamilySpec:
    """Return the family that computes a pass of a bucket's problem."""
    if direction == "backward":
        for_cpus = (family for family in BACKWARD.values() if family.for_cpus)
        return next(for_cpus, TWO_PASS)
    if problem.page:
        return PAGED
    if problem.invariant:
        return SPLIT_KV
    if problem.dropout:  # kernels with splits do not support dropout
        return Q_STATIONARY
    has_many_keys = problem.seqlen_kv >= 2 * LEAST_SPLIT
    is_thin = problem.seqlen_q < FEW_ROWS and (packed_heads(problem) > 1 or has_many_keys)
    may_split = has_many_keys and _programs(problem) < BUSY
    return SPLIT_KV if is_thin or may_split or _shares_keys(problem) else Q_STATIONARY


def _shares_keys(problem: AttentionProblem) -> bool:
    """Check whether the heads of a group should share tiles, so that keys are packed once."""
    queries = problem.seqlen_q
    if packed_heads(problem) == 1 or queries > SHARING_QUERIES:
        return False
    seen = mask_size(problem.mask, queries, problem.seqlen_kv).entries / queries
    return seen >= KEYS_PER_QUERY * queries


def config_by_rule(problem: AttentionProblem, kernel: Kernel) -> TileConfig:
    """Return the config of a kernel for a bucket's problem."""
    spec, config = KERNELS[kernel], cpu_config(problem, kernel)
    # Dropout is drawn for blocks of 16 rows.
    if spec == FWD and problem.seqlen_q < FEW_ROWS and not problem.dropout:
        most = min(config.block_n, problem.seqlen_kv)
        keys = _thin_keys(problem, problem.seqlen_q, most)
        return replace(config, block_m=problem.seqlen_q, block_n=keys)
    if not (spec.splits and spec.packs):
        return config
    heads = packed_heads(problem)
    split = INVARIANT_SPLIT
    if not problem.invariant:
        shares = -(-BUSY // _programs(problem))
        longest = spec.knobs.split_kv[-1]
        split = min(max(LEAST_SPLIT, problem.seqlen_kv // shares), longest)
    queries = _queries(problem)
    if queries * heads <= THIN_ROWS and not problem.invariant:
        config = replace(config, block_n=_thin_keys(problem, queries * heads, config.block_n))
    return replace(config, block_m=queries, heads=heads, split_kv=split)


def _thin_keys(problem: AttentionProblem, rows: int, usual: int) -> int:
    """Return the keys of a tile with few rows."""
    most = usual
    if 1 < rows <= THIN_ROWS and not problem.page:
        most = min(most, THIN_BYTES // (problem.head_dim_qk * problem.element_bytes))
    return max(size for size in BLOCK_SIZES if size <= max(most, BLOCK_SIZES[0]))


def _queries(problem: AttentionProblem) -> int:
    """Return the query rows of each head in a tile that holds all heads of a group: no more than
    there are, since products of few rows wait for memory alone."""
    heads = packed_heads(problem)
    if problem.invariant:
        # A prompt and its chunks must have the same tiles if their bits must be the same.
        return max(FEW_ROWS, heads) // heads
    return max(heads, min(problem.seqlen_q * heads, MOST_ROWS)) // heads


def _programs(problem: AttentionProblem) -> int:
    """Count the programs of a forward without splits."""
    groups = problem.num_heads_q if packed_heads(problem) == 1 else problem.num_heads_kv
    return problem.batch * groups * -(-problem.seqlen_q // _queries(problem))
