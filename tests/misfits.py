"""Masks and scores whose sizes differ from the call's, with the expected error of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilegen
from tilegen.errors import InvalidProblem


def _ones(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes)


def _kept(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes, dtype=torch.bool)


def _looks_up(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + _PER_HEAD[h]


_PER_HEAD = _ones(1)
SCORES: dict[str, tuple[Any, str]] = {
    "few sinks": (tilegen.sinks(_ones(1)), "sinks must have size 2 along query heads, got 1"),
    "many sinks": (tilegen.sinks(_ones(3)), "size 2 along query heads, got 3"),
    "few slopes": (tilegen.alibi(_ones(1)), "size 2 along query heads, got 1"),
    "many slopes": (tilegen.alibi(_ones(5)), "size 2 along query heads, got 5"),
    "temperature": (tilegen.temperature(_ones(7)), "size 2 along query heads, got 7"),
    "relative bias": (tilegen.relative_bias(_ones(3, 5)), "size 2 along query heads, got 3"),
    "joined": (tilegen.softcap(3).then(tilegen.alibi(_ones(5))), "size 2 along query heads, got 5"),
    "a function's": (_looks_up, "size 2 along query heads, got 1"),
}
"""For 2 heads."""
BIASES: dict[str, tuple[Any, str]] = {
    "bias": (tilegen.bias(_ones(3, 3)), "got 3"),
    "bias of heads": (tilegen.bias(_ones(1, 5, 48, 48)), "size 2 along query heads, got 5"),
    "one column": (tilegen.bias(_ones(48, 47)), "got 47"),
}
"""For 48 rows and columns."""
MASKS: dict[str, tuple[Any, str]] = {
    "a smaller bool": (tilegen.from_bool(_kept(32, 32)), r"\(48, 48\), got \(32, 32\)"),
    "a larger bool": (tilegen.from_bool(_kept(64, 48)), r"\(48, 48\), got \(64, 48\)"),
    "layout": (tilegen.block_sparse(_kept(2, 3), 16), "with 3 x 3 blocks, got 2 x 3"),
    "in a combination": (
        tilegen.causal() & ~tilegen.block_sparse(_kept(3, 1), 16),
        "with 3 x 3 blocks, got 3 x 1",
    ),
}


def refused_by_attention(name: str) -> None:
    """Expect the error, in the forward and in training."""
    what, said = (SCORES | BIASES | MASKS)[name]
    q = torch.ones(1, 2, 48, 16, requires_grad=True)
    mask, score = (what, None) if name in MASKS else (None, what)
    with pytest.raises(InvalidProblem, match=said):
        tilegen.attention(q, q, q, mask=mask, score=score)
