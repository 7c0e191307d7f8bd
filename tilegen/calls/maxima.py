"""Compute the largest score of each row, which kernels do not store, by a second pass."""

from __future__ import annotations

import torch

from tilegen.launch.changes import Changes
from tilegen.masks.language.evaluation import evaluate

PAIRS = 2**24
"""Rough number of scores held at once."""


@torch.no_grad()
def row_maxima(
    q: torch.Tensor, k: torch.Tensor, changes: Changes, scale: float | None = None
) -> torch.Tensor:
    """Compute the largest score of each row after scale, score change and mask, with PyTorch.

    Returns fp32, (batch, heads_q, seqlen_q), -inf for rows without a kept key and without
    gradients. The scores are computed in panels of rows, as much work as a forward's first product.
    """
    if not (q.numel() and k.numel()):
        return torch.full(q.shape[:3], float("-inf"), device=q.device)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    rows = max(1, PAIRS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    with torch.autocast(q.device.type, enabled=False):
        heads = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        parts = [
            _panel(panel.float() @ heads * factor, first * rows, q.shape[2], changes)
            for first, panel in enumerate(q.split(rows, 2))
        ]
    return torch.cat(parts, 2)


def _panel(scores: torch.Tensor, first: int, seqlen_q: int, changes: Changes) -> torch.Tensor:
    """Return the maxima of a panel whose first row is `first`."""
    seqlen_kv = scores.shape[3]
    b, h, q, k = (
        torch.arange(size, device=scores.device).view(-1, *[1] * (3 - axis))
        for axis, size in enumerate(scores.shape)
    )
    q = q + first
    if changes.score is not None:
        captured = [tensor.to(scores.device) for tensor in changes.captured]
        scores = evaluate(
            changes.score.expression(),
            captured,
            **{"b": b, "h": h, "q": q, "k": k, "s": scores},
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
        )
    keep = changes.mask.kept(q, k, seqlen_q, seqlen_kv, b, h)
    return scores.masked_fill(~keep, float("-inf")).amax(3)
