"""Sizes at which problems are checked."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilegen.check import interpreter
from tilegen.problem import AttentionProblem

REDUCED_LENGTH = 300
"""Length of reduced problems: ragged for every tile, several tiles of most sizes, and quick in the
interpreter."""
MOST_INTERPRETED = 2**22
"""Scores, of all heads, that are checked in Triton's interpreter: about a minute on one core."""
BYTES_A_SCORE = 128
"""Memory [bytes] of a GPU that a check takes for each score, as sixteen fp64 numbers: a guess."""


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
    """Return a problem that can be checked here: the same, or reduced where the interpreter would
    take long, or a GPU's free memory would not hold the reference."""
    scores = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_kv
    most = MOST_INTERPRETED
    if torch.cuda.is_available() and not interpreter.is_active():
        most = torch.cuda.mem_get_info()[0] // BYTES_A_SCORE
    return problem if scores <= most else reduced(problem)
