"""Sizes at which problems are checked."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilegen import cpu
from tilegen.problem import AttentionProblem

REDUCED_LENGTH = 300
"""Length of reduced problems: ragged for every tile, and several tiles of most sizes."""
MOST_ON_CPU = 2**23
"""Scores, of all heads, that are checked on a CPU: ten seconds on two cores, and a gigabyte."""
BYTES_A_SCORE = 128
"""Memory [bytes] that a check takes for each score, as sixteen fp64 numbers: a guess."""


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
    """Return a problem that can be checked here: the same, or reduced where a CPU would take
    long, or a GPU's free memory would not hold the reference."""
    scores = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_kv
    most = MOST_ON_CPU
    if torch.cuda.is_available() and not cpu.is_interpreting():
        most = torch.cuda.mem_get_info()[0] // BYTES_A_SCORE
    return problem if scores <= most else reduced(problem)
