"""The tensors that launches allocate: what they hold, and how they are laid out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tilegen.kernels.arguments import PANELS

if TYPE_CHECKING:
    import torch


LIKE = {"out": ("q", "v"), "dq": ("q", "q"), "dk": ("k", "k"), "dv": ("v", "v")}
"""Results laid out like a tensor, and the tensor whose head dim they have."""
OF_ROWS = {"lse": "q", "delta": "out"}
"""Results of an fp32 number for each row of a tensor."""
PAIRED = frozenset(("lse", "partial_lse"))
"""Tensors of two numbers for each row where scores are changed: the second, in base 2, is what the
first, a natural logarithm, leaves out in fp32. They are told apart by the dimension before rows."""
OF_SPLITS = {
    "partials": ("q", "k", "v"),
    "partial_lse": ("q", "k"),
    "partial_dq": ("q", "k", "q"),
    "has_dq": ("q", "k"),
    "partial_dk": ("k", "q", "k"),
    "partial_dv": ("k", "q", "v"),
    "has_dkdv": ("k", "q"),
}
"""Results in fp32 for each row of a tensor and each split of another one's rows, and a tensor whose
head dim they have."""


def empty_like(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return an uninitialised tensor laid out like `tensor` (heads inside or outside of rows)."""
    return tensor.new_empty_strided((*tensor.shape[:3], head_dim), strides_like(tensor, head_dim))


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
    """Return lse (batch, heads, seqlen_q) of what kernels keep of it, which may be in pairs."""
    return lse if lse.dim() == 3 else lse.select(2, 0)


def allocate(
    name: str, given: Mapping[str, Any], unit: int, keys: int, pairs: bool
) -> torch.Tensor:
    """Return an uninitialised tensor for a result of a launch.

    `given` is what the launch takes, by name; `unit` the elements that strides are counted by, to
    which rows of a panel are padded; `keys` those of a score tile, or the rows of a split. With
    `pairs` lse is kept as two numbers.
    """
    import torch

    pair = (2,) if pairs and name in PAIRED else ()

    if name in LIKE:
        like, width = LIKE[name]
        return empty_like(given[like], given[width].shape[3])
    if name in OF_ROWS:
        like = given[OF_ROWS[name]]
        batch, heads, rows = like.shape[:3]
        shape = batch, heads, *pair, rows
        return torch.empty(shape, device=like.device, dtype=torch.float32)
    q, seqlen_kv = given["q"], given["k"].shape[2]
    if name in OF_SPLITS:
        stays, passes, *of = OF_SPLITS[name]
        batch, heads, rows, _ = given[stays].shape
        width = [given[one].shape[3] for one in of]
        splits = -(-given.get("longest_kv", given[passes].shape[2]) // keys)
        shape = batch, heads, splits, *pair, rows, *width
        return torch.empty(shape, device=q.device, dtype=torch.float32)
    heads, rows = given["num_heads"], given["num_rows"]
    if name in PANELS:
        return q.new_empty((heads, rows, -(-seqlen_kv // unit) * unit))
    shape = heads, -(-seqlen_kv // keys), rows
    return torch.empty(shape, device=q.device, dtype=torch.float32)  # maxima and sums
