"""Products of attention in PyTorch that ignore the pairs that a mask drops, even where they hold
NaN."""

from __future__ import annotations

from typing import Any, cast

import torch


def scores(q: torch.Tensor, k: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Compute q k^T differentiably, 0 if a pair is dropped."""
    return cast("torch.Tensor", _Scores.apply(q, k, keep))


def weighed(weights: torch.Tensor, rows: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Compute weights @ rows differentiably; `weights` are 0 if a pair is dropped."""
    return cast("torch.Tensor", _Weighed.apply(weights, rows, keep))


class _Weighed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: torch.Tensor, rows: torch.Tensor, keep: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(weights, rows, keep)
        finite = rows.isfinite()
        if finite.all():
            return weights @ rows
        products = weights @ rows.masked_fill(~finite, 0.0)
        tainted = keep.to(rows.dtype) @ (~finite).to(rows.dtype) > 0
        return products.masked_fill(tainted, float("nan"))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weights, rows, keep = ctx.saved_tensors
        (grad,) = grads
        of_weights = (grad @ rows.mT).masked_fill(~keep, 0.0)
        return of_weights, weighed(weights.mT, grad, keep.mT), None


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, keep)
        return (q @ k.mT).masked_fill(~keep, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, keep = ctx.saved_tensors
        grad = grads[0].masked_fill(~keep, 0.0)
        return weighed(grad, k, keep), weighed(grad.mT, q, keep.mT), None
