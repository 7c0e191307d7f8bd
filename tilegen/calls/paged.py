"""Attention over the pages of a cache: requests of any lengths in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import has_torch_function_variadic

from tilegen.calls.entry import attend
from tilegen.calls.masks import GivenMask
from tilegen.launch.changes import Pages
from tilegen.masks.plain import check_plain
from tilegen.masks.score import Score
from tilegen.runtime.call import ScoreFunction


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
    mask: GivenMask | None = None,
    score: Score | ScoreFunction | None = None,
    scale: float | None = None,
    layout: str = "NHD",
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """Compute attention of queries over the pages of a cache of keys and values, without gradients.

    Prompts, chunks of prompts and decoding steps can share a call. Shapes: q (requests, heads_q,
    seqlen_q, d_qk), or (total_q, heads_q, d_qk) with `q_starts` (requests + 1,), the start of each
    request's queries. k_pages and v_pages are (pages, page, heads_kv, d_qk or d_v) in layout NHD,
    (pages, heads_kv, page, d_qk or d_v) in layout HND. Only their last dimension must be dense, so
    both may be slices of one tensor. A page holds a power of two of at most 256 keys.
    `block_table` (requests, most pages of a request) lists the pages of each request in the order
    of its keys. `kv_lengths` (requests,) counts the keys of each request, including those of the
    queries. `block_table`, `kv_lengths` and `q_starts` are integers on the device of q, and are not
    read on the host.

    `mask`, in any form that `attention` takes, and `score` see positions and lengths within a
    request, and b is the request: `tilegen.causal("bottom_right")` lets the last query see the last
    key, and `tilegen.tree(parents)` verifies a tree of drafts. `max_kv_length` is an upper bound of
    `kv_lengths`, by default the room of the block table. `max_q_length` is an upper bound of the
    queries of a request, required with `q_starts`. Both bound only the work, so a CUDA graph
    captured with the largest lengths serves all lengths.

    The result has the shape of q with d_v columns; lse is fp32, (requests, heads_q, seqlen_q) or
    (heads_q, total_q). Rows that belong to no request are undefined. `out`, of the result's shape
    and q's dtype, is written in place and returned. Raises InvalidProblem or Unsupported, naming
    the call.
    """
    if has_torch_function_variadic(k_pages, v_pages, block_table, kv_lengths, q_starts, out):
        check_plain(k_pages=k_pages, v_pages=v_pages, block_table=block_table)
        check_plain(kv_lengths=kv_lengths, q_starts=q_starts, out=out)
    bounds = max_q_length, max_kv_length
    pages = Pages(block_table, kv_lengths, q_starts, *bounds, layout, out)
    result, lse = attend(q, k_pages, v_pages, mask, score, scale=scale, pages=pages)
    if not return_lse:
        return result
    if q_starts is not None:
        return result, lse.contiguous()
    # Kernels write heads outside of requests: only pairs of a score are copied.
    return result, lse.transpose(0, 1).contiguous().transpose(0, 1)
