"""Masks of keys in pages, whose lengths the host does not know: no lists of tiles can be made.

What of such a mask has a closed form says which tiles are visited, and the rest of it is computed
for each of their pairs. `AttentionProblem.normal` rewrites problems so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilegen.masks.mask import And, Causal, Full, Mask, SlidingWindow
from tilegen.masks.tree import Tree
from tilegen.masks.usual import Intervals, KvPrefix
from tilegen.masks.values import Pair


@dataclass(frozen=True)
class Unlisted(Mask):
    """The same mask, of which no tile is dropped, or taken for full, that has no closed form."""

    mask: Mask

    @property
    def notation(self) -> str:
        return f"unlisted({self.mask.notation})"

    @property
    def parts(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def with_parts(self, changed: Callable[[Mask], Mask]) -> Mask:
        return Unlisted(changed(self.mask))

    def keep(self, at: Pair) -> Any:
        return self.mask.keep(at)


def is_surely_solved(mask: Mask) -> bool:
    """Whether a mask is known, without SymPy, to have a closed form."""
    if isinstance(mask, Unlisted | Tree | KvPrefix):
        return True
    parts = mask.parts if isinstance(mask, And) else (mask,)
    return all(isinstance(part, Full | Causal | SlidingWindow | Intervals) for part in parts)
