"""How masks and scores were made, which is what crosses into a graph of torch.compile.

Masks and scores that read tensors keep how they were made (`noted`). While torch.compile traces, no
element of a tensor can be looked at and nothing is solved: constructors then note only what is to
be made (`Chain` here, `Pending` among the masks).
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

T = TypeVar("T")


def noted(made: T, how: tuple[Any, ...]) -> T:
    """Return a new mask or score, which keeps how it was made: a word and what it was made of."""
    vars(made)["_made"] = how
    return made


def is_compiling() -> bool:
    """Whether torch.compile or torch.export traces the caller. Loads nothing."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


class InDocuments:
    """A score, or a function of scores, within each document of packed sequences."""

    def __init__(self, score: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any) -> None:
        self.score = score
        self.cu_seqlens = (cu_seqlens_q, cu_seqlens_kv)


class Chain:
    """Scores, or functions of scores, one applied after the other."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts

    def then(self, other: Any) -> Chain:
        """Return the scores with one more."""
        return Chain((*self.parts, other))
