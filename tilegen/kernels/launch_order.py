"""The order in which the programs of a launch start.

Where a mask leaves tiles unequal work, the tiles with most work start first, over as many heads as
L2 holds together, so that a launch ends with light programs. Otherwise programs run head by head.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from tilegen.kernels.spec import KernelSpec

if TYPE_CHECKING:
    from tilegen.masks.mask import Mask, Side
    from tilegen.problem import AttentionProblem

End = Literal["", "first", "last"]
"""The end of a head's tiles where work is heaviest; empty where neither is, or none is known."""
TOGETHER_BYTES = 2**25
"""Bytes of streamed rows of the heads that start together: a part of L2 that GPUs for data centres
have, from 40 MB on. An emitted kernel serves GPUs of any L2."""


def rows_together(problem: AttentionProblem) -> int:
    """Return the streamed rows, of all heads that start together."""
    row = (problem.head_dim_qk + problem.head_dim_v) * problem.element_bytes
    return TOGETHER_BYTES // row


def heads_together(problem: AttentionProblem, spec: KernelSpec) -> int:
    """Return the key-value heads whose programs start together, of all batches; 1 at least."""
    _, rows = spec.loop.sides(problem.group_size * problem.seqlen_q, problem.seqlen_kv)
    return max(1, min(rows_together(problem) // max(rows, 1), problem.batch * problem.num_heads_kv))


def heavy_end(mask: Mask, spec: KernelSpec) -> End:
    """Return the end of a head's tiles that has most work, for kernels whose programs start in
    order of work. Programs of panels, splits and shares do not: they are equally long."""
    by_work = spec.is_fused and not spec.parts
    return _heavy_end(mask, spec.stays) if by_work else ""


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
