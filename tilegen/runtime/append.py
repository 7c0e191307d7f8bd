"""New keys and values, written into the pages of a cache."""

from __future__ import annotations

import torch

from tilegen.errors import InvalidProblem
from tilegen.runtime.entry import is_watched
from tilegen.runtime.paged_call import LAYOUTS


def append_paged(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    *,
    q_starts: torch.Tensor | None = None,
    layout: str = "NHD",
) -> None:
    """Write keys and values of new tokens behind those that requests have, in place.

    Shapes: k and v (requests, heads_kv, new, d), or (total, heads_kv, d) with `q_starts`
    (requests + 1,), which says where each request's tokens start; tokens after the last are left
    out. Pages, `block_table` and `layout` are those of `attention_paged`, and `kv_lengths`
    (requests,) the keys of each request with the new ones, as the call of attention that follows
    takes them. Nothing is read on the host, so that a CUDA graph may hold it. Raises
    InvalidProblem.
    """
    call = k, v, k_pages, v_pages, block_table, kv_lengths, q_starts, layout
    if is_watched(k):
        from tilegen.runtime.operators.pages import append_operator

        append_operator(*call)
    else:
        append(*call)


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    q_starts: torch.Tensor | None,
    layout: str,
) -> None:
    """Write keys and values as `append_paged` says, whoever watches."""
    if layout not in LAYOUTS:
        raise InvalidProblem(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if k.shape[:-1] != v.shape[:-1] or k.ndim != (4 if q_starts is None else 3):
        raise InvalidProblem(
            "k and v must hold as many tokens and heads, (requests, heads, new, dim), or with "
            f"q_starts (total, heads, dim), got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    requests = len(kv_lengths)
    if q_starts is None:
        new = k.shape[2]
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        q_starts = torch.arange(0, (requests + 1) * new, new, device=k.device)
        if len(k) != requests * new:
            raise InvalidProblem(f"k must have {requests} requests, got {len(k) // new}")
    if len(block_table) != requests or len(q_starts) != requests + 1:
        raise InvalidProblem(
            f"block_table must have {requests} rows, as kv_lengths has, and q_starts one more, got "
            f"{len(block_table)} and {len(q_starts)}"
        )
    tokens = torch.arange(len(k), device=k.device)
    ends = q_starts[1:].to(torch.int64)
    # Tokens behind the last write again what the last one writes; where there is none, what is
    # there already.
    token = torch.minimum(tokens, ends[-1] - 1).clamp(min=0)
    request = torch.searchsorted(ends, token, right=True).clamp(max=requests - 1)
    at = (kv_lengths.to(torch.int64) - ends)[request] + token
    pages = [x if layout == "NHD" else x.transpose(1, 2) for x in (k_pages, v_pages)]
    page = pages[0].shape[1]
    at = at.clamp(0, block_table.shape[1] * page - 1)
    slots = block_table[request, at // page].long(), at % page
    is_new = (token < ends[-1])[:, None, None]
    for cache, x in zip(pages, (k, v), strict=True):
        cache.index_put_(slots, torch.where(is_new, x[token].to(cache.dtype), cache[slots]))
