"""The order in which the programs of a launch start.

If a mask leaves unequal work, the heaviest tiles start first, over as many heads as L2 holds, so
that a launch ends with light programs. Otherwise programs run head by head.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from tilegen.kernels.spec import KernelSpec

if TYPE_CHECKING:
    from tilegen.masks.mask import Mask, Side
    from tilegen.problem import AttentionProblem

End = Literal["", "first", "last"]
"""The end of a head's tiles that has most work; empty if both ends are equal, or unknown."""
TOGETHER_BYTES = 2**25
"""Bytes of streamed rows of the heads that start together: part of the L2 of data-centre GPUs,
which is 40 MB or more. An emitted kernel serves GPUs with any L2."""


def rows_together(problem: AttentionProblem) -> int:
    """Return the number of streamed rows, over all heads that start together."""
    row = (problem.head_dim_qk + problem.head_dim_v) * problem.element_bytes
    return TOGETHER_BYTES // row


def heads_together(problem: AttentionProblem, spec: KernelSpec) -> int:
    """Return the number of key-value heads, over all batches, whose programs start together; at
    least 1."""
    _, rows = spec.loop.sides(problem.group_size * problem.seqlen_q, problem.seqlen_kv)
    return max(1, min(rows_together(problem) // max(rows, 1), problem.batch * problem.num_heads_kv))


def heavy_end(mask: Mask, spec: KernelSpec) -> End:
    """Return the end of a head's tiles that has most work, for kernels that start heavy programs
    first; otherwise empty. Programs of panels, splits and shares have equal work and no such
    order."""
    by_work = spec.is_fused and not spec.parts
    return _heavy_end(mask, spec.stationary) if by_work else ""


@lru_cache(maxsize=1024)
def _heavy_end(mask: Mask, side: Side) -> End:
    from tilegen.masks.tiles.tile_ranges import is_solved, tile_ranges  # loads torch

    if not is_solved(mask, side):
        return ""
    ranges = tile_ranges(mask, side, seqlen_q=4096, seqlen_kv=4096, block_m=64, block_n=64)
    work = ranges.visited[0, 0]
    if work[-1] == work[0]:
        return ""
    return "last" if work[-1] > work[0] else "first"
