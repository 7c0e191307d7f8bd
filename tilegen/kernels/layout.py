"""Memory layouts of tensors: strides of results, and log-sum-exps in pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilegen.kernels.allocation import uninitialised

if TYPE_CHECKING:
    import torch


MAX_ROW_STRIDE = 2**22  # elements; emitted kernels address a tile of rows with 32 bits
Laid = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape and the strides of a tensor."""


def empty_like(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Allocate an uninitialised tensor with the layout of `tensor` (heads inside or outside of
    rows)."""
    shape = (*tensor.shape[:3], head_dim)
    return uninitialised(tensor.new_empty_strided(shape, strides_like(tensor, head_dim)))


def laid_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor laid out as `empty_like(like, ...)` would be: the tensor itself, or a
    copy."""
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
    """Return lse (batch, heads, seqlen_q) from the lse of kernels, which may be in pairs. An lse of
    fewer dimensions is returned unchanged."""
    return lse if lse.dim() < 4 else lse.select(2, 0)
