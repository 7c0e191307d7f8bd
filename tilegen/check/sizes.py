"""Reduce problems to sizes that can be checked."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilegen import cpu
from tilegen.problem import AttentionProblem

REDUCED_LENGTH = 300
"""Length of reduced problems: not a multiple of any tile, and several tiles of most sizes."""
MOST_ON_CPU = 2**23
"""Scores, over all heads, checked on a CPU at most: 10 seconds on two cores, and a gigabyte."""
BYTES_A_SCORE = 128
"""Memory of a check for each score [bytes], 16 fp64 numbers: a guess."""


def reduced(problem: AttentionProblem, length: int = REDUCED_LENGTH) -> AttentionProblem:
    """Return the smallest problem with the same emitted kernels that is still worth checking.

    One batch, one group of heads, lengths of at most `length`.
    """
    return replace(
        problem,
        batch=1,
        num_heads_q=problem.group_size,
        num_heads_kv=1,
        seqlen_q=min(problem.seqlen_q, length),
        seqlen_kv=min(problem.seqlen_kv, length),
    )


def checkable(problem: AttentionProblem) -> AttentionProblem:
    """Return a problem that can be checked here: the given problem, or the reduced problem if a CPU
    would take too long or the reference would not fit a GPU's free memory."""
    scores = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_kv
    most = MOST_ON_CPU
    if torch.cuda.is_available() and not cpu.is_interpreting():
        most = torch.cuda.mem_get_info()[0] // BYTES_A_SCORE
    return problem if scores <= most else reduced(problem)
