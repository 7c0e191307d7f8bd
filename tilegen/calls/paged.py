"""Attention over the pages of a cache: requests of any lengths, in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from tilegen.calls.entry import is_watched, refuse_jit
from tilegen.errors import TilegenError
from tilegen.launch.changes import Changes
from tilegen.masks.kinds import FULL
from tilegen.masks.mask import Mask
from tilegen.masks.score import Score
from tilegen.runtime.call import ScoreFunction, score_of, shown
from tilegen.runtime.paged_dispatch import attend_pages


def attention_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    *,
    q_starts: torch.Tensor | None = None,
    max_q_length: int | None = None,
    max_kv_length: int | None = None,
    mask: Mask | None = None,
    score: Score | ScoreFunction | None = None,
    scale: float | None = None,
    layout: str = "NHD",
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """Return attention of queries over the pages of a cache of keys and values, without gradients.

    Shapes: q (requests, heads_q, seqlen_q, d_qk), or (total_q, heads_q, d_qk) with `q_starts`
    (requests + 1,), which says where each request's queries start: prompts, chunks of prompts and
    decoding in one call. k_pages and v_pages are (pages, page, heads_kv, d_qk or d_v) in layout
    NHD, (pages, heads_kv, page, ...) in HND, with any strides but a dense last dimension: slices of
    one tensor that holds both will do. `block_table` (requests, most pages of a request) has the
    pages of each request, in the order of its keys, and `kv_lengths` (requests,) its number of
    keys, those of the queries among them; both are integers on the device of q, as is `q_starts`,
    and none is read on the host. A page holds a power of two of at most 256 keys.

    `mask` and `score` see positions, lengths and b of a request: `tilegen.causal("bottom_right")`
    lets its last query see its last key, and `tilegen.tree(parents)` verifies a tree of drafts.
    `max_kv_length` bounds kv_lengths (by default what the block table has room for), and
    `max_q_length` the queries of a request, needed with `q_starts`; both only bound the work, so
    that a CUDA graph of the largest serves all lengths. The result is like q, lse (requests,
    heads_q, seqlen_q) or (heads_q, total_q), fp32; rows of no request are undefined. `out`, of the
    result's shape and of q's dtype, is written in place and returned. Raises InvalidProblem or
    Unsupported, naming the call.
    """
    where = block_table, kv_lengths, q_starts
    bounds = max_q_length, max_kv_length
    refuse_jit()
    try:
        watched = is_watched(q)
        if watched:
            made, lse = _watched(q, k_pages, v_pages, *where, *bounds, mask, score, scale, layout)
        else:
            found = None if score is None else score_of(score)
            changes = Changes(FULL if mask is None else mask, found)
            given = q, k_pages, v_pages, *where, *bounds, changes, scale, layout
            made, lse = attend_pages(*given, out)
    except TilegenError as error:
        if is_dynamo_compiling():  # which names the call itself, and may not join texts
            raise
        given = (("q", q), ("k_pages", k_pages), ("v_pages", v_pages))
        shapes = ", ".join(f"{name} {shown(x)}" for name, x in given)
        raise type(error)(f"{error}; the call was paged, {shapes}, mask {mask}") from None
    if out is None or watched or made.data_ptr() != out.data_ptr():  # not written where it lies
        is_packed = q_starts is not None
        made = made.squeeze(0).transpose(0, 1) if is_packed else _unpacked(made, kv_lengths)
        out = made if out is None else out.copy_(made)
    if not return_lse:
        return out
    lse = lse.contiguous()
    return out, lse.squeeze(0) if q_starts is not None else _unpacked(lse, kv_lengths)


def _watched(q: torch.Tensor, *call: Any) -> tuple[Any, Any]:
    from tilegen.operators.pages import attend_pages_watched

    return attend_pages_watched(q, *call)


def _unpacked(x: torch.Tensor, kv_lengths: torch.Tensor) -> torch.Tensor:
    """Return (requests, heads, rows, ...) of (1, heads, requests * rows, ...), a view."""
    _, heads, _, *rest = x.shape
    return x.view(heads, kv_lengths.shape[0], -1, *rest).transpose(0, 1)
