"""Masks in forms of PyTorch code that a trace must follow: aliases, views, unpacking, keywords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

N = 9
BOUNDS = torch.tensor([[1, 5], [3, 8]])
PICKED = torch.arange(3 * N).reshape(N, 3) % 7


class Given(torch.autograd.Function):
    """Returns its argument."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:  # type: ignore[override]
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        return gradient


def same_dtype(b: Any, h: Any, q: Any, k: Any) -> Any:
    same = k.long()
    same += 2
    other = q.to(torch.int32)
    other += 3
    return k + other > 2 * q


def view(b: Any, h: Any, q: Any, k: Any) -> Any:
    row = k.unsqueeze(0)
    row *= 2
    return k > q


def choice_in_place(b: Any, h: Any, q: Any, k: Any) -> Any:
    x, y = q - k, k - q
    kept = (functional.relu(x, inplace=True) < 3) & (x >= 0) & (functional.relu(x) == x)
    functional.relu(y, True)
    return kept & (y < 2)


def unpacked(b: Any, h: Any, q: Any, k: Any) -> Any:
    low, high = BOUNDS[h]
    first, *_, last = PICKED[q]
    return (q >= low) & (k < high) & (first + last > k)


def new_tensors(b: Any, h: Any, q: Any, k: Any) -> Any:
    zero = torch.zeros((), dtype=q.dtype, device=q.device)
    steps = torch.arange(N, device=k.device)
    return (q + zero > k) | (steps[k] == 4)


def read_again(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A value that was used before it changes keeps what it was used for."""
    before = q > k
    q -= 3
    return before & (q < k)


MASKS: dict[str, Callable[..., Any]] = {
    "the same dtype is the same tensor": same_dtype,
    "a view": view,
    "inplace=True": choice_in_place,
    "an argument given back": lambda b, h, q, k: Given.apply(q) > Given.apply(k),
    "unpacking": unpacked,
    "new tensors where a value is": new_tensors,
    "used before": read_again,
    "keywords": lambda b, h, q, k: torch.where(q > k, input=q, other=torch.clamp(k, max=h)) > 2,
    "parts of rows": lambda b, h, q, k: (PICKED[q][1:] == k % 7).any() | PICKED[q][..., 0].bool(),
    "rows of shapes": lambda b, h, q, k: (PICKED[q][:, None] == PICKED[k]).any(),
    "columns": lambda b, h, q, k: (PICKED[q][:, None] >= PICKED[k]).all(0).any(-1),
    "other dimensions": lambda b, h, q, k: (
        (PICKED[q].unsqueeze(1).unbind(dim=1)[0] == PICKED[k].squeeze(0)).any()
        | torch.squeeze(input=PICKED[q] > PICKED[k]).all()
    ),
    "metadata": lambda b, h, q, k: q + q.dim() + len(PICKED[q]) + q.numel() > k,
    "names": lambda b, h, q, k: q > k if f"{q}" and q in {q: 1} else k > q,
}
