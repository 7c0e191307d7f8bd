"""Regroup tensors for a dilated mask by the remainder of their rows: see masks/dilation.py."""

from __future__ import annotations

import torch


def group(x: torch.Tensor, step: int) -> torch.Tensor:
    """Regroup x to (batch * step, heads, ceil(seqlen / step), dim).

    Group r of batch entry b, the rows with remainder r, becomes entry b * step + r.
    """
    batch, heads, seqlen, dim = x.shape
    if seqlen % step:
        x = torch.nn.functional.pad(x, (0, 0, 0, -seqlen % step))
    x = x.view(batch, heads, -1, step, dim) if x.is_contiguous() else x.unflatten(2, (-1, step))
    return x.permute(0, 3, 1, 2, 4).flatten(0, 1)


def ungroup(x: torch.Tensor, step: int, seqlen: int) -> torch.Tensor:
    """Undo `group`; return (batch, heads, seqlen, ...)."""
    x = x.unflatten(0, (-1, step)).movedim(1, 3)
    return x.flatten(2, 3)[:, :, :seqlen]
