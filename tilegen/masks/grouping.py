"""Query heads that one tile may hold together: those of a group, where nothing tells them apart."""

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
    """Return the heads of a tile that holds those of a group, a power of two; 1 where each head
    needs tiles of its own: it is alone, too many share a key-value head, or mask or score depend on
    the head."""
    heads = 1 << (problem.group_size - 1).bit_length()
    if heads not in HEADS or _tells_heads_apart(problem.mask.general, problem.score):
        return 1
    return heads


def heads_of_tiles(problem: AttentionProblem) -> tuple[int, ...]:
    """Return the numbers of heads that a tile may hold: all of a group, or a part of at least 16
    that divides it, or one where each needs tiles of its own."""
    heads = packed_heads(problem)
    parts = (one for one in HEADS if 16 <= one < heads and problem.group_size % one == 0)
    return *parts, heads


@by_mask(1024)
def _tells_heads_apart(mask: Mask, score: ScoreForm | None) -> bool:
    if score is not None and score.changes and score.expression().has(H):
        return True
    return mask.predicate().has(H)
