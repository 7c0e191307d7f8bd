"""Layouts of tensors: strides of results, and log-sum-exps in pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilegen.kernels.allocation import uninitialised

if TYPE_CHECKING:
    import torch


Laid = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape and the strides of a tensor."""
PAIRED = frozenset(("lse", "partial_lse"))
"""Tensors of two numbers for each row where scores are changed: the second, in base 2, is what the
first, a natural logarithm, leaves out in fp32. They are told apart by the dimension before rows."""


def empty_like(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return an uninitialised tensor laid out like `tensor` (heads inside or outside of rows)."""
    shape = (*tensor.shape[:3], head_dim)
    return uninitialised(tensor.new_empty_strided(shape, strides_like(tensor, head_dim)))


def laid_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor as `empty_like(like, ...)` is laid out: the tensor itself, or a copy."""
    strides = strides_like(like, tensor.shape[3])
    if tensor.stride() == strides:
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def strides_like(tensor: torch.Tensor, head_dim: int) -> tuple[int, int, int, int]:
    """Return the strides of `empty_like`."""
    _, heads, seqlen, _ = tensor.shape
    whole = heads * seqlen * head_dim
    if tensor.stride(1) < tensor.stride(2):
        return whole, head_dim, heads * head_dim, 1
    return whole, seqlen * head_dim, head_dim, 1


def public_lse(lse: torch.Tensor) -> torch.Tensor:
    """Return lse (batch, heads, seqlen_q) from the lse of kernels, which may be in pairs; lse of
    fewer dimensions as it is."""
    return lse if lse.dim() < 4 else lse.select(2, 0)
