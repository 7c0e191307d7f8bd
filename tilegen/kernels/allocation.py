"""Uninitialised tensors, allocated as PyTorch's own compiled code allocates them.

PyTorch does not document these functions, which allocate on the CPU, or on the current GPU, in half
the time of `torch.empty_strided`; that serves where they are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
    """Returns a tensor of a size, strides and dtype."""


@cache
def allocator(*, is_cuda: bool) -> Empty:
    """Return what allocates on the CPU, or on the current GPU, which must be that of the launch."""
    import torch

    device = "cuda" if is_cuda else "cpu"
    found: Any = torch
    for name in ("_C", "_dynamo", "guards", f"_empty_strided_{device}"):
        found = getattr(found, name, None)
    if found is not None:
        return found
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)
