"""`attention`, computed by the best known kernel for this GPU and problem."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, overload

import torch

from tilegen.calls.entry import attend
from tilegen.calls.masks import GivenMask
from tilegen.calls.varlen import attention_jagged
from tilegen.errors import InvalidProblem
from tilegen.masks.score import Score
from tilegen.runtime.call import ScoreFunction


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: GivenMask | None = None,
    score: Score | ScoreFunction | None = None,
    kv_lengths: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: GivenMask | None = None,
    score: Score | ScoreFunction | None = None,
    kv_lengths: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: GivenMask | None = None,
    score: Score | ScoreFunction | None = None,
    kv_lengths: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    **unknown: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `softmax(q k^T * scale + mask) v`, differentiably; with `return_lse` also its lse.

    Shapes: q (batch, heads_q, seqlen_q, d_qk), k (batch, heads_kv, seqlen_kv, d_qk), v (batch,
    heads_kv, seqlen_kv, d_v), out (batch, heads_q, seqlen_q, d_v). heads_q is a multiple of
    heads_kv; all tensors have one dtype (fp16, bf16, fp32) and one device. `mask` is a tilegen mask
    such as `tilegen.causal()`, its notation such as `"causal&window(127,0)"`, a function as
    `tilegen.predicate` takes it, or a bool tensor as `tilegen.from_bool` takes it. `score` changes
    scaled logits before the mask: a tilegen score such as `tilegen.softcap(20.0)`, or a function of
    (score, b, h, q_idx, kv_idx), whose tensors get gradients too. `kv_lengths` (batch,), integers,
    is for padded keys and values: batch entry b attends only to its first `kv_lengths[b]` keys.
    `scale` defaults to d_qk ** -0.5.

    lse is the natural log-sum-exp of each row, fp32, (batch, heads_q, seqlen_q). A row for which
    the mask keeps no key has out 0, lse -inf and zero gradients. `dropout_p` is the probability
    that a weight is dropped, reproducible by torch.manual_seed; lse counts all weights, dropped
    ones too. If v is the first columns of one head's keys, `k[..., :d_v]` as in absorbed
    multi-head latent attention, the forward loads them once. Inputs are cast under torch.autocast
    as for PyTorch's own attention.

    Never tunes unless TILEGEN_TUNE=1. On CPU tensors the same kernels run, compiled for the CPU,
    unless TILEGEN_CPU=torch is set. Raises InvalidProblem or Unsupported, naming the call.
    """
    if unknown:
        _refuse(unknown)
    if getattr(q, "is_nested", False):
        if kv_lengths is not None:
            raise InvalidProblem("jagged tensors have their own lengths; leave kv_lengths out")
        return attention_jagged(
            *(q, k, v),
            mask=mask,
            score=score,
            scale=scale,
            dropout_p=dropout_p,
            return_lse=return_lse,
        )
    out, lse = attend(q, k, v, mask, score, kv_lengths, scale, dropout_p)
    return (out, lse.contiguous()) if return_lse else out


def _refuse(unknown: dict[str, Any]) -> NoReturn:
    """Raise an error for arguments that `attention` does not have, naming what to write."""
    for name, value in unknown.items():
        if name in _INSTEAD:
            raise InvalidProblem(f"attention has no {name}, got {value!r}; {_INSTEAD[name]}")
    raise TypeError(f"attention() got an unexpected keyword argument {next(iter(unknown))!r}")


_INSTEAD = {
    **dict.fromkeys(("is_causal", "causal"), "for a causal mask write mask=tilegen.causal()"),
    "attn_mask": "write mask=attn_mask for bools, score=tilegen.bias(attn_mask) for numbers to add",
}
