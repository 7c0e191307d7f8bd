"""Attention over packed sequences: documents of different lengths, concatenated."""

from __future__ import annotations

from typing import Any, cast

import torch

from tilegen.calls.entry import attend, is_watched, refuse_jit
from tilegen.calls.masks import GivenMask, as_mask
from tilegen.calls.paged import attention_paged
from tilegen.environment import current
from tilegen.errors import InvalidProblem
from tilegen.launch.autograd import computes_by_torch, empty_lse, needs_gradients
from tilegen.masks.made import InDocuments, is_traced
from tilegen.masks.mask import Mask
from tilegen.masks.packed import check_cu_seqlens, longest_of, packed
from tilegen.masks.plain import check_plain
from tilegen.masks.score import Score
from tilegen.masks.snapshots import TensorCache
from tilegen.masks.values import is_captured, is_checked
from tilegen.runtime.call import (
    ScoreFunction,
    autocast,
    autocast_dtype,
    check_axes,
    kind_shown,
    score_of,
)

MAX_MASKS = 64
"""Packed masks cached for further layers and steps with the same tensors as cu_seqlens."""


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor | None = None,
    *,
    mask: GivenMask | None = None,
    score: Score | ScoreFunction | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """Compute attention within each document of packed sequences, differentiably.

    Shapes: q (total_q, heads_q, d_qk), k (total_kv, heads_kv, d_qk), v (total_kv, heads_kv, d_v),
    out (total_q, heads_q, d_v); with `return_lse` also lse (heads_q, total_q). cu_seqlens are
    integers (documents + 1,), from 0 to at most the total; tokens beyond the last document have out
    0, lse -inf and zero gradients, and reach nothing. `cu_seqlens_kv` defaults to `cu_seqlens_q`;
    only then, or if both are one object, tilegen knows that queries and keys have the same
    documents. cu_seqlens may be changed in place: each call builds its tables from them. `mask`
    and `score` see positions and lengths within a document, and b is the document. `dropout_p` is
    the probability that a weight is dropped, drawn by the place of the pair among all tokens.
    Nothing is padded, and other lengths of documents need no other kernels. Under
    TILEGEN_BATCH_INVARIANT=1 a document without gradients has the same bits as in a call of its
    own. Raises InvalidProblem or Unsupported.
    """
    refuse_jit()
    cu_kv = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_kv)):
        if not isinstance(x, torch.Tensor):  # only a tensor shows that it was changed in place
            raise InvalidProblem(f"{name} must be a tensor of integers, got {type(x).__name__}")
        check_plain(**{name: x})
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_axes(name, x, "tokens, heads, head_dim")
    mask = None if mask is None else as_mask(mask)
    # A graph under torch.compile reads the settings when it runs: `is_watched` comes first.
    if not is_watched(q) and current().batch_invariant and not computes_by_torch(q.device):
        call = (q, k, v, cu_seqlens_q, cu_kv), mask, score_of(score), scale
        if q.numel() and k.numel() and not dropout_p and not needs_gradients(q, k, v, call[2]):
            out, lse = _by_document(*call)
            return (out, lse) if return_lse else out
    lengths = q.shape[0], k.shape[0]
    whole = packed_mask(cu_seqlens_q, cu_kv, mask, lengths[1])
    inside: Any = score
    if not is_traced():
        inside = score_of(score)
    elif score is not None:
        inside = InDocuments(score, cu_seqlens_q, cu_kv)
    if isinstance(inside, Score):
        from tilegen.masks.packed_score import within_documents

        inside = within_documents(inside, cu_seqlens_q, cu_kv, lengths)
    out, lse = attend(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        mask=whole,
        score=inside,
        scale=scale,
        dropout_p=dropout_p,
    )
    out = out[0].transpose(0, 1)
    return (out, lse[0].contiguous()) if return_lse else out


def _by_document(
    packed_tensors: tuple[torch.Tensor, ...],
    mask: Mask | None,
    score: Score | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) with tiles that begin at the starts of documents.

    The bits of a document then do not depend on the documents before it. Each document is a
    request, and each key a page.
    """
    *tensors, cu_q, cu_kv = packed_tensors
    if (dtype := autocast_dtype(tensors[0].device)) is not None:
        tensors = [autocast(tensor, dtype) for tensor in tensors]
    q, k, v = tensors
    tokens = len(q), len(k)
    packed_mask(cu_q, cu_kv, mask, tokens[1])  # for its checks
    cu_q, cu_kv = (cu_seqlens.to(q.device) for cu_seqlens in (cu_q, cu_kv))
    if is_checked(cu_q) and is_checked(cu_kv):
        check_cu_seqlens(cu_q, cu_kv, tokens)
    longest_q, longest_kv = tokens
    if not is_captured(q.device):  # tighter bounds mean less work; .diff() waits for the device
        longest_q, longest_kv = longest_of(cu_q), longest_of(cu_kv)
    table = cu_kv[:-1, None] + torch.arange(longest_kv, device=q.device)
    out, lse = attention_paged(
        *(q, k[:, None], v[:, None], table.clamp(max=tokens[1] - 1).int(), cu_kv.diff()),
        q_starts=cu_q,
        max_q_length=longest_q,
        mask=mask,
        score=score,
        scale=scale,
        return_lse=True,
    )
    beyond = torch.arange(len(q), device=q.device) >= cu_q[-1]
    nothing = empty_lse(None if score is None else score.sink_logits, q.device)
    return out.masked_fill(beyond[:, None, None], 0.0), torch.where(beyond, nothing, lse)


def attention_jagged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: GivenMask | None = None,
    score: Score | ScoreFunction | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """Compute attention of jagged nested tensors (batch, heads, ragged, dim), as PyTorch lays them
    out. Each sequence of the batch is a document. lse is nested too, (batch, heads, ragged)."""
    parts: list[torch.Tensor] = []
    offsets: list[torch.Tensor] = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not getattr(x, "is_nested", False) or x.layout != torch.jagged or x.dim() != 4:
            raise InvalidProblem(
                f"{name} must be a jagged nested tensor of 4 dimensions "
                f"(layout=torch.jagged), got {kind_shown(x)}"
            )
        rows = cast("Any", x.transpose(1, 2))  # (batch, ragged, heads, dim)
        if rows.lengths() is not None or rows._ragged_idx != 1:
            raise InvalidProblem(
                f"{name} must be (batch, heads, ragged, dim) without holes between sequences; "
                "torch.nested.nested_tensor(list(x.unbind()), layout=torch.jagged) has none"
            )
        parts.append(rows.values())
        offsets.append(rows.offsets())
    if offsets[1] is not offsets[2] and is_checked(offsets[1]):
        lengths = [starts.diff().tolist() for starts in offsets[1:]]
        if lengths[0] != lengths[1]:
            raise InvalidProblem(
                f"k and v must have sequences of the same lengths, got {lengths[0]} and "
                f"{lengths[1]}"
            )
    out, lse = attention_varlen(
        *(parts[0], parts[1], parts[2], offsets[0], offsets[1]),
        mask=mask,
        score=score,
        scale=scale,
        dropout_p=dropout_p,
        return_lse=True,
    )
    out, lse = (
        torch.nested.nested_tensor_from_jagged(rows, offsets[0]).transpose(1, 2)
        for rows in (out, lse.transpose(0, 1).contiguous())
    )
    return (out, lse) if return_lse else out


def packed_mask(cu_q: torch.Tensor, cu_kv: torch.Tensor, mask: Mask | None, tokens: int) -> Mask:
    """Return the mask of packed documents, cached for the same tensors."""
    if is_traced():
        return packed(cu_q, cu_kv, mask, tokens=tokens)
    given = (cu_q,) if cu_kv is cu_q else (cu_q, cu_kv)

    def make() -> Mask:
        # Aliases: the cache must not keep the tensors alive.
        aliases = [cu_seqlens.detach() for cu_seqlens in given]
        return packed(aliases[0], aliases[-1], mask, tokens=tokens)

    return _masks.get((mask, tokens.bit_length()), given, make)


# A mask of packed documents reads the elements at each call.
_masks: TensorCache[Mask] = TensorCache(MAX_MASKS, elements=False)
