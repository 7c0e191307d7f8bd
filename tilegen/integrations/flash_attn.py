"""flash-attn's functions under their own names, computed by tilegen: change one import.

Signatures and layouts are those of flash-attn 2.8: (batch, seqlen, heads, dim), or packed (tokens,
heads, dim). Masks are aligned to the last query and the last key. Differences from flash-attn:
gradients of q, k and v are deterministic with any arguments, alibi_slopes get gradients if they
require them, and lse is differentiable. lse of a row without kept keys is -inf. max_seqlen
arguments are ignored without a block_table. Attention probabilities are never computed: callers
that request them get (out, lse, None). `flash_attn_with_kvcache` is in flash_cache.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilegen.calls.attention import attention
from tilegen.calls.varlen import attention_varlen
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.integrations import windows
from tilegen.integrations.flash_cache import flash_attn_with_kvcache as flash_attn_with_kvcache
from tilegen.integrations.flash_changes import mask_of, over_pages, score_of
from tilegen.masks.plain import plain_number
from tilegen.masks.values import Alignment
from tilegen.runtime.call import check_axes


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention (batch, seqlen_q, heads, dim) of q (batch, seqlen_q, heads, dim), k and v
    (batch, seqlen_kv, heads_kv, dim), differentiably.

    `dropout_p` is the probability that a weight is dropped, reproducible by torch.manual_seed.
    `window_size` holds the distances kept to the left and to the right; -1 is unbounded. A
    `softcap` above 0 limits logits to it. `alibi_slopes` (heads,) or (batch, heads) lower each
    logit by slope times distance, in both directions. With `return_attn_probs` returns (out, lse,
    None), lse (batch, heads, seqlen_q). Raises InvalidProblem or Unsupported.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_axes(name, x, "batch, seqlen, heads, dim")
    alignment = windows.alignment_of(q.shape[1], k.shape[1])
    out, lse = attention(
        *(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)),
        mask=mask_of(window_size, causal, alignment),
        score=score_of(softcap, alibi_slopes, alignment),
        scale=softmax_scale,
        dropout_p=dropout_p,
        return_lse=True,
    )
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn_func` of qkv (batch, seqlen, 3, heads, dim)."""
    q, k, v = _parts("qkv", qkv, "batch, seqlen, 3, heads, dim")
    return flash_attn_func(
        *(q, k, v),
        *(dropout_p, softmax_scale, causal, window_size),
        *(softcap, alibi_slopes, deterministic, return_attn_probs),
    )


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn_func` of kv (batch, seqlen_kv, 2, heads_kv, dim)."""
    k, v = _parts("kv", kv, "batch, seqlen, 2, heads_kv, dim")
    return flash_attn_func(
        *(q, k, v),
        *(dropout_p, softmax_scale, causal, window_size),
        *(softcap, alibi_slopes, deterministic, return_attn_probs),
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Compute attention (tokens_q, heads, dim) within each document of q (tokens_q, heads, dim), k
    and v (tokens_kv, heads_kv, dim), differentiably.

    cu_seqlens (documents + 1,) are the starts of documents, and the end of the last. Masks are
    aligned to the last query and the last key of each document. Other arguments are those of
    `flash_attn_func`; alibi_slopes may be (documents, heads). lse is (heads, tokens_q). Raises
    InvalidProblem or Unsupported.

    With a `block_table` (documents, most pages of a document) k and v are pages (pages, keys,
    heads_kv, dim). Dropout is then unsupported, the backward raises Unsupported, and max_seqlen_q
    is required.
    """
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_axes(name, x, "documents + 1")
    if block_table is not None:
        if dropout_p or max_seqlen_q is None:
            raise Unsupported("with a block_table leave dropout_p out and pass max_seqlen_q")
        out, lse = over_pages(
            *(q, k, v, block_table, cu_seqlens_k.diff()),
            q_starts=cu_seqlens_q,
            max_q_length=plain_number(max_seqlen_q),
            max_kv_length=plain_number(max_seqlen_k),
            mask=mask_of(window_size, causal, "bottom_right"),
            score=score_of(softcap, alibi_slopes, "bottom_right"),
            scale=softmax_scale,
        )
        return (out, lse, None) if return_attn_probs else out
    alignment: Alignment = "top_left" if cu_seqlens_q is cu_seqlens_k else "bottom_right"
    out, lse = attention_varlen(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k),
        mask=mask_of(window_size, causal, alignment),
        score=score_of(softcap, alibi_slopes, alignment),
        scale=softmax_scale,
        dropout_p=dropout_p,
        return_lse=True,
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn_varlen_func` of qkv (tokens, 3, heads, dim)."""
    q, k, v = _parts("qkv", qkv, "tokens, 3, heads, dim")
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen),
        *(dropout_p, softmax_scale, causal, window_size),
        *(softcap, alibi_slopes, deterministic, return_attn_probs),
    )


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn_varlen_func` of kv (tokens_kv, 2, heads_kv, dim)."""
    k, v = _parts("kv", kv, "tokens, 2, heads_kv, dim")
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *(dropout_p, softmax_scale, causal, window_size),
        *(softcap, alibi_slopes, deterministic, return_attn_probs),
    )


def _parts(name: str, x: torch.Tensor, axes: str) -> tuple[torch.Tensor, ...]:
    """Split tensors that are packed along the third dimension from the end. Raises
    InvalidProblem."""
    check_axes(name, x, axes)
    if x.shape[-3] != len(name):  # "qkv" or "kv"
        raise InvalidProblem(f"{name} must have shape ({axes}), got {tuple(x.shape)}")
    return x.unbind(-3)
