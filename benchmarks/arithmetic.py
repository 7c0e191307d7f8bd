"""The work that a problem demands of any implementation: flops, bytes that must move, and the ideal
time.

Flops count exactly the score entries that the mask keeps (no "half for causal"), and only the
algorithm's matrix products: two in the forward, five in the backward, of which one recomputes
scores. Whole tiles that a kernel computes beyond these count against the kernel.
"""

from __future__ import annotations

from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.spec import Direction
from tilegen.masks.tiles.tile_ranges import tile_ranges
from tilegen.problem import AttentionProblem


def kept_pairs(problem: AttentionProblem) -> int:
    """Count the (query, key) pairs that the mask keeps, for one head of one batch entry."""
    ranges = tile_ranges(
        problem.mask,
        "rows",
        seqlen_q=problem.seqlen_q,
        seqlen_kv=problem.seqlen_kv,
        block_m=1,
        block_n=1,
    )
    return ranges.visited_tiles


def flops(problem: AttentionProblem, direction: Direction) -> int:
    """Return the flops of one call: 2 per multiply-add of a kept pair."""
    qk, v = problem.head_dim_qk, problem.head_dim_v
    # Forward: q k^T, p v. Backward: q k^T again, ds k, ds^T q; do v^T, p^T do.
    per_pair = 2 * (qk + v) if direction == "forward" else 2 * (3 * qk + 2 * v)
    return problem.batch * problem.num_heads_q * kept_pairs(problem) * per_pair


def compulsory_bytes(problem: AttentionProblem, direction: Direction) -> int:
    """Return the bytes of all inputs and outputs, each moved once; lse (fp32) crosses in both."""
    q_rows = problem.batch * problem.num_heads_q * problem.seqlen_q
    kv_rows = problem.batch * problem.num_heads_kv * problem.seqlen_kv
    qk, v = problem.head_dim_qk, problem.head_dim_v
    q_and_out, k_and_v = q_rows * (qk + v), kv_rows * (qk if problem.latent else qk + v)
    if direction == "forward":
        elements = q_and_out + k_and_v
    else:  # q, out, k, v and dout come in, dq, dk and dv go out
        elements = q_and_out + k_and_v + q_rows * v + q_rows * qk + k_and_v
    return elements * problem.element_bytes + 4 * q_rows


def ideal_seconds(problem: AttentionProblem, direction: Direction, gpu: GpuSpec) -> float:
    """Return the roofline time: the larger of peak arithmetic and compulsory DRAM traffic."""
    peak = gpu.tensor_flops_16 if problem.element_bytes == 2 else gpu.vector_flops_32
    return max(
        flops(problem, direction) / peak,
        compulsory_bytes(problem, direction) / gpu.dram_bandwidth,
    )
