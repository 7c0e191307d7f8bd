"""Masks to run with scores, and tensors for scores to read."""

from __future__ import annotations

import torch

from tilegen.masks import (
    Mask,
    block_sparse,
    causal,
    documents,
    full,
    global_tokens,
    prefix_lm,
    sliding_window,
    values,
)

BATCH, HEADS = 2, 2
INF = float("inf")
MASKS: dict[str, tuple[Mask, int, int]] = {
    "full": (full(), 50, 83),
    "causal": (causal("bottom_right"), 83, 50),
    "window": (sliding_window(20, 3), 70, 70),
    "documents": (documents([0] * 9 + [1] * 40 + [2] * 21) & causal(), 70, 70),
    "several_ranges": (causal() & (global_tokens(20) | sliding_window(7)), 70, 70),
    "by_batch": (prefix_lm(values([11, 48], "b")), 50, 83),
    "lists_by_head": (block_sparse(torch.rand(HEADS, 5, 6).gt(0.5), 16), 70, 83),
}


def random(*sizes: int, seed: int = 0, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(sizes, generator=generator) * (high - low) + low


SLOPES = torch.tensor([0.5, 0.125])
SINKS = torch.tensor([0.5, -3.0])
