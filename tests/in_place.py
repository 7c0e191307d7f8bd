"""Ways to change a tensor in place, and masks that read tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilegen
from tilegen.masks import Mask


def _operation(tensor: torch.Tensor, new: torch.Tensor) -> None:
    tensor.copy_(new)


def _data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    tensor.data.copy_(new)


def _numpy(tensor: torch.Tensor, new: torch.Tensor) -> None:
    tensor.numpy()[...] = new.numpy()


def _inference(tensor: torch.Tensor, new: torch.Tensor) -> None:
    with torch.inference_mode():
        tensor.copy_(new)


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "operation": _operation,
    "data": _data,
    "numpy": _numpy,
    "inference": _inference,
}
"""Autograd's version counter sees the first of them alone."""


def given(way: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as `WAYS[way]` changes it: inference tensors have no version counter."""
    if way != "inference":
        return tensor
    with torch.inference_mode():
        return tensor.clone(memory_format=torch.preserve_format)


LENGTH = 70
_GENERATOR = torch.Generator().manual_seed(11)


def _random(*sizes: int) -> torch.Tensor:
    return torch.randint(0, LENGTH, sizes, generator=_GENERATOR)


def _documents(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


Case = tuple[Callable[[torch.Tensor], Mask], torch.Tensor, torch.Tensor]
"""A mask of a tensor, and the tensor before and after."""
CASES: dict[str, Case] = {
    "int64": (
        lambda t: tilegen.predicate(lambda b, h, q, k: k <= t[q]),
        *(_random(LENGTH), _random(LENGTH)),
    ),
    "not contiguous": (
        lambda t: tilegen.predicate(lambda b, h, q, k: k <= t[q, h]),
        *(_random(2, LENGTH).int().mT, _random(2, LENGTH).int().mT),
    ),
    "bool": (
        lambda t: tilegen.predicate(lambda b, h, q, k: t[q] & (k <= q)),
        *(_random(LENGTH) < 20, _random(LENGTH) < 50),
    ),
    "times": (  # which rise before, and neither rise nor fall after
        lambda t: tilegen.predicate(lambda b, h, q, k: t[k] <= t[q]),
        *(_random(LENGTH).sort().values, _random(LENGTH)),
    ),
    "two tables": (
        lambda t: tilegen.predicate(lambda b, h, q, k: t[0, q] == t[1, k]),
        *(_random(2, LENGTH).sort().values, _random(2, LENGTH) // 9),
    ),
    "whole documents": (tilegen.documents, _documents(30, 1, 39), _documents(9, 41, 20)),
    "whole documents, traced": (
        lambda t: tilegen.predicate(lambda b, h, q, k: (t[q] == t[k]) & (k <= q)),
        *(_documents(30, 1, 39), _documents(9, 41, 20)),
    ),
    "scattered documents": (tilegen.documents, _random(LENGTH) % 3, _random(LENGTH) % 5),
    "cu_seqlens": (
        lambda t: tilegen.documents(cu_seqlens=t),
        *(torch.tensor([0, 30, 31, 70]), torch.tensor([0, 9, 50, 70])),
    ),
    "lengths": (tilegen.kv_lengths, torch.tensor([70, 12]), torch.tensor([3, 50])),
    "layout": (
        lambda t: tilegen.block_sparse(t, 14),
        *(_random(5, 5).T < 30, _random(5, 5).T < 50),
    ),
    "window": (
        lambda t: tilegen.sliding_window(tilegen.values(t, "h")),
        *(torch.tensor([3, 40]), torch.tensor([25, 0])),
    ),
}


def inputs() -> list[Any]:
    """Return q, k and v, 70 tokens of 2 batches and heads."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 2, LENGTH, 16, generator=generator) for _ in range(3)]
