"""Query heads that a tile may hold together: the heads of a group, if no mask or score
distinguishes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilegen.kernels.config import HEADS
from tilegen.masks.language.expr import H
from tilegen.masks.mask import Mask
from tilegen.masks.remembered import by_mask
from tilegen.masks.score import ScoreForm

if TYPE_CHECKING:
    from tilegen.problem import AttentionProblem


def packed_heads(problem: AttentionProblem) -> int:
    """Return the number of heads in a tile that holds a whole group, a power of two.

    The number is 1 if each head needs its own tiles: the group has one head or too many, or mask or
    score depend on the head.
    """
    heads = 1 << (problem.group_size - 1).bit_length()
    if heads not in HEADS or _tells_heads_apart(problem.mask.general, problem.score):
        return 1
    return heads


def heads_of_tiles(problem: AttentionProblem) -> tuple[int, ...]:
    """Return the possible numbers of heads in a tile: a whole group, divisors of the group from
    16 heads on, or 1 if each head needs its own tiles."""
    heads = packed_heads(problem)
    parts = (one for one in HEADS if 16 <= one < heads and problem.group_size % one == 0)
    return *parts, heads


@by_mask(1024)
def _tells_heads_apart(mask: Mask, score: ScoreForm | None) -> bool:
    if score is not None and score.changes and score.expression().has(H):
        return True
    return mask.predicate().has(H)
