"""Writes into the pages of a cache: behind the keys of requests, or to named places."""

from __future__ import annotations

import torch

from tilegen.errors import InvalidProblem
from tilegen.runtime.paged_call import LAYOUTS


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
    """Write keys and values as `append_paged` says. Raises InvalidProblem."""
    k_nhd, _ = _as_nhd(k_pages, v_pages, layout)
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
    request = torch.searchsorted(ends, tokens, right=True).clamp(max=requests - 1)
    at = (kv_lengths.to(torch.int64) - ends)[request] + tokens
    page = k_nhd.shape[1]
    at = at.clamp(0, block_table.shape[1] * page - 1)
    slots = block_table[request, at // page].long() * page + at % page
    write_slots(k, v, k_pages, v_pages, slots.where(tokens < ends[-1], -1), layout=layout)


def write_slots(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    layout: str = "NHD",
) -> None:
    """Write keys and values of tokens to places of a cache, in place.

    Shapes: k and v (tokens, heads_kv, d), slots (tokens,): `page * keys of a page + row`, each at
    most once, -1 for a token that is left out. Pages and `layout` are those of `attention_paged`.
    Nothing is read on the host, so that a CUDA graph may hold it. Raises InvalidProblem.
    """
    pages = _as_nhd(k_pages, v_pages, layout)
    if k.ndim != 3 or k.shape[:-1] != v.shape[:-1] or slots.shape != k.shape[:1]:
        raise InvalidProblem(
            "k and v must hold as many tokens and heads, (tokens, heads, dim), and slots one place "
            f"for each, got {tuple(k.shape)}, {tuple(v.shape)} and {tuple(slots.shape)}"
        )
    if not len(slots):
        return
    # A token that is left out writes again what another one writes; where all are left out, what
    # is there already.
    kept = slots >= 0
    tokens = torch.arange(len(slots), device=slots.device)
    token = tokens.where(kept, kept.to(torch.uint8).argmax())
    at = slots[token].clamp(min=0).long()
    at = at // pages[0].shape[1], at % pages[0].shape[1]
    is_new = kept[token][:, None, None]
    for cache, x in zip(pages, (k, v), strict=True):
        cache.index_put_(at, torch.where(is_new, x[token].to(cache.dtype), cache[at]))


def _as_nhd(k_pages: torch.Tensor, v_pages: torch.Tensor, layout: str) -> list[torch.Tensor]:
    """Return views (pages, page, heads, d). Raises InvalidProblem."""
    if layout not in LAYOUTS:
        raise InvalidProblem(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return [x if layout == "NHD" else x.transpose(1, 2) for x in (k_pages, v_pages)]
