"""A process that goes on calling: what it holds does not grow with the number of calls."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable

import pytest
import torch

import tilegen
from tilegen.masks import Mask
from tilegen.runtime import plans

CALLS = 2000
SETTLING = 3000
"""Calls until caches are full, the largest of which hold 1024 values."""


def _documents(draw: random.Random, tokens: int) -> Mask:
    cuts = sorted(draw.sample(range(1, tokens), 3))
    return tilegen.causal() & tilegen.documents(cu_seqlens=[0, *cuts, tokens])


def _lists(draw: random.Random, tokens: int) -> Mask:
    layout = torch.tensor([[draw.random() < 0.5 for _ in range(4)] for _ in range(4)])
    return tilegen.block_sparse(layout, 16)


def _closure(draw: random.Random, tokens: int) -> Callable[..., torch.Tensor]:
    ids = torch.tensor([draw.randrange(3) for _ in range(tokens)])
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


def _number(draw: random.Random, tokens: int) -> Callable[..., torch.Tensor]:
    width = draw.choice([5, 9])
    return lambda b, h, q, k: (q - k).abs() <= width


def _boolean(draw: random.Random, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(10**9))
    return torch.rand(tokens, tokens, generator=generator) < 0.6


KINDS = (_documents, _lists, _closure, _number, _boolean)


def _call(draw: random.Random) -> None:
    """Call forward, and every fifth time backward, with tensors and a mask of their own."""
    tokens, kind = draw.choice([40, 50, 60]), draw.choice(KINDS)
    trained = draw.random() < 0.2
    q, k, v = (torch.randn(1, 2, tokens, 16, requires_grad=trained) for _ in range(3))
    made = kind(draw, tokens)
    if kind is _boolean:
        out = tilegen.scaled_dot_product_attention(q, k, v, attn_mask=made)
    else:
        out = tilegen.attention(q, k, v, mask=made)
    if trained:
        out.sum().backward()


def _held() -> int:
    """Return the number of blocks of memory that Python's objects hold."""
    for _ in range(3):
        gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.slow
def test_memory_is_flat_over_new_closures_masks_shapes_and_documents() -> None:
    draw = random.Random(5)
    plans.forget()
    for _ in range(SETTLING):
        _call(draw)
    before = _held()
    for _ in range(CALLS):
        _call(draw)
    # One object that each call leaves behind is a block or more.
    assert _held() - before < CALLS / 4
