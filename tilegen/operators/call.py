"""Run calls that PyTorch traces, counts or transforms as operators. torch.compile traces this
module."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tilegen.launch.changes import Pages
from tilegen.launch.derivatives import refuse_tangents
from tilegen.operators.crossing import crossing
from tilegen.operators.functional import Attention
from tilegen.operators.pages import attend_pages
from tilegen.operators.sharded import is_sharded, on_each_device
from tilegen.runtime.call import AXES, autocast, autocast_dtype, check_axes, dropout_of


def attend_watched(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    score: Any,
    kv_lengths: torch.Tensor | None,
    scale: float | None,
    dropout_p: float,
    is_transformed: bool = False,
    pages: Pages | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) of a call of `attention`, or of `attention_paged`, by an operator.

    `is_transformed`: the call is inside a transform of torch.func. Raises InvalidProblem or
    Unsupported.
    """
    if pages is not None:
        return attend_pages(q, k, v, pages, mask, score, scale)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_axes(name, tensor, AXES)
    if is_sharded(q):
        call = partial(
            attend_watched,
            mask=mask,
            score=score,
            kv_lengths=kv_lengths,
            scale=scale,
            dropout_p=dropout_p,
        )
        return on_each_device(call, q, k, v, mask, score, kv_lengths)
    encoded = crossing(mask, score, kv_lengths)
    if not is_transformed:  # transforms of torch.func raise an error of their own
        refuse_tangents(*encoded.tensors)
    encoded.fill(k)
    if (dtype := autocast_dtype(q.device)) is not None:
        q, k, v = [autocast(tensor, dtype) for tensor in (q, k, v)]
    dropout = dropout_of(dropout_p, q)
    p, state = (0.0, None) if dropout is None else (dropout.p, dropout.state)
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    if is_transformed and not torch.compiler.is_compiling():
        rest = encoded.tensors if state is None else [*encoded.tensors, state]
        call = encoded.text, factor, p, state is not None
        return Attention.apply(call, q, k, v, *rest)  # type: ignore[return-value]
    return torch.ops.tilegen.forward(*(q, k, v, encoded.text, encoded.tensors, factor, p, state))
