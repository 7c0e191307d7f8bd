"""flash-attn's functions, by its names, with tilegen's kernels: change one import.

Signatures and layouts are those of flash-attn 2.8: (batch, seqlen, heads, dim), or packed (tokens,
heads, dim). Masks end at the last query and the last key. What differs: gradients of q, k and v are
deterministic whether asked for or not, alibi_slopes get gradients where they require them, lse is
differentiable, and that of a row that is left nothing is -inf. The lengths of the longest sequences
are not looked at. Whoever asks for attention probabilities gets (out, lse, None): they are never
made. There is no `flash_attn_with_kvcache`, since keys and values in pages are not done yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.integrations import windows
from tilegen.masks import score as scores
from tilegen.masks.made import made_once
from tilegen.masks.mask import Mask
from tilegen.masks.parts import Alignment
from tilegen.masks.score import Score
from tilegen.runtime.attention import attention
from tilegen.runtime.varlen import attention_varlen


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
    """Return attention (batch, seqlen_q, heads, dim) of q (batch, seqlen_q, heads, dim), k and v
    (batch, seqlen_kv, heads_kv, dim), differentiable.

    `dropout_p` is the probability that a weight is dropped, drawn from torch.manual_seed.
    `window_size` holds the distances that are kept to the left and to the right, -1 is unbounded.
    A `softcap` above 0 keeps logits within it; alibi_slopes (heads,) or (batch, heads) lower each
    logit by its distance, in both directions. With `return_attn_probs` (out, lse (batch, heads,
    seqlen_q), None). Raises InvalidProblem or Unsupported.
    """
    alignment = windows.alignment_of(q.shape[1], k.shape[1])
    out, lse = attention(
        *(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)),
        mask=_mask(window_size, causal, alignment),
        score=_score(softcap, alibi_slopes, alignment),
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
    """Return `flash_attn_func` of qkv (batch, seqlen, 3, heads, dim)."""
    q, k, v = _parts("qkv", qkv, 5, 3)
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
    """Return `flash_attn_func` of kv (batch, seqlen_kv, 2, heads_kv, dim)."""
    k, v = _parts("kv", kv, 5, 2)
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
    """Return attention (tokens_q, heads, dim) within each document of q (tokens_q, heads, dim), k
    and v (tokens_kv, heads_kv, dim), differentiable.

    cu_seqlens (documents + 1,) say where documents start, and where the last one ends; masks end at
    the last query and the last key of each. Other arguments are those of `flash_attn_func`, slopes
    of shape (documents, heads) among them; lse is (heads, tokens_q). Raises InvalidProblem or
    Unsupported.
    """
    if block_table is not None:
        raise Unsupported("expected block_table=None, since keys and values in pages are not done")
    alignment: Alignment = "top_left" if cu_seqlens_q is cu_seqlens_k else "bottom_right"
    out, lse = attention_varlen(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k),
        mask=_mask(window_size, causal, alignment),
        score=_score(softcap, alibi_slopes, alignment),
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
    """Return `flash_attn_varlen_func` of qkv (tokens, 3, heads, dim)."""
    q, k, v = _parts("qkv", qkv, 4, 3)
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
    """Return `flash_attn_varlen_func` of kv (tokens_kv, 2, heads_kv, dim)."""
    k, v = _parts("kv", kv, 4, 2)
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *(dropout_p, softmax_scale, causal, window_size),
        *(softcap, alibi_slopes, deterministic, return_attn_probs),
    )


def _parts(name: str, x: torch.Tensor, dimensions: int, count: int) -> tuple[torch.Tensor, ...]:
    """Return what is packed along the third dimension from behind. Raises InvalidProblem."""
    if x.ndim != dimensions or x.shape[-3] != count:
        leading = "batch, seqlen" if dimensions == 5 else "tokens"
        raise InvalidProblem(
            f"{name} must have shape ({leading}, {count}, heads, dim), got {tuple(x.shape)}"
        )
    return x.unbind(-3)


def _mask(window_size: Sequence[int], causal: bool, alignment: Alignment) -> Mask:
    """Return the mask of a call. Raises InvalidProblem."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise InvalidProblem(
            f"window_size must be two distances (left, right), got {window_size!r}"
        ) from None
    return windows.flash_attn(left, right, bool(causal), alignment)


def _score(softcap: float, alibi_slopes: torch.Tensor | None, alignment: Alignment) -> Score | None:
    """Return the change of the scores of a call, None where there is none. Raises
    InvalidProblem."""
    if alibi_slopes is None:
        return None if softcap <= 0 else _softcap(softcap)
    if alibi_slopes.ndim not in (1, 2):
        raise InvalidProblem(
            "alibi_slopes must have shape (heads,) or (batch, heads), got "
            f"{tuple(alibi_slopes.shape)}"
        )
    axes = "h" if alibi_slopes.ndim == 1 else "bh"
    text = _text(max(0.0, softcap), axes, alignment)
    return Score(text, (alibi_slopes,), sizes=((0, axes),))


_softcap = made_once(scores.softcap)


@made_once
def _text(softcap: float, axes: str, alignment: Alignment) -> str:
    """Return the canonical text of a soft cap, where it is above 0, and then of the distance of a
    pair times a slope."""
    capped = scores.softcap(softcap).text if softcap else "s"
    distance = "k-q" if alignment == "top_left" else "k+seqlen_q-q-seqlen_kv"
    return f"{capped}-abs({distance})*t0[{','.join(axes)}]"
