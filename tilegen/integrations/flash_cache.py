"""flash-attn's attention over a cache of keys and values, which it extends in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilegen.bounded_cache import BoundedCache
from tilegen.calls.append import append_paged
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.integrations.flash_changes import mask_of, over_pages, score_of
from tilegen.masks.plain import plain_number
from tilegen.masks.values import is_checked
from tilegen.problem import PAGES
from tilegen.runtime.call import check_axes, shown
from tilegen.runtime.paged_call import PAGE_AXES, readable

NEW_AXES, CACHE_AXES = "batch, seqlen, heads, dim", "caches, seqlen, heads_kv, dim"


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Compute attention (batch, seqlen_q, heads, dim) of q (batch, seqlen_q, heads, dim) over a
    cache. The backward raises Unsupported.

    k_cache and v_cache are (caches, seqlen_cache, heads_kv, dim). `cache_batch_idx` (batch,)
    selects the caches of the batch, by default the first. With a `block_table` (batch, most pages
    of an entry) they are pages (pages, page, heads_kv, dim) instead, of a power of two of at most
    256 keys. `cache_seqlens` (batch,), or one number for all, counts the keys in each cache (by
    default all). New k and v (batch, seqlen_new, heads_kv, dim) are first appended in place. Masks
    are aligned to the last query and the last key. `num_splits` is ignored: the model chooses it.
    Rotary embeddings and padding on the left are unsupported: rotate q and k before the call. With
    `return_softmax_lse` returns (out, lse), lse (batch, heads, seqlen_q). Raises InvalidProblem or
    Unsupported.
    """
    if rotary_cos is not None or rotary_sin is not None:
        raise Unsupported("expected rotary_cos=None: rotate q and k before the call")
    if cache_leftpad is not None:
        raise Unsupported("expected cache_leftpad=None: keys begin at the first")
    if (k is None) != (v is None):
        raise InvalidProblem("expected k and v together, or neither")
    new = () if k is None else (("k", k, NEW_AXES), ("v", v, NEW_AXES))
    given = ("k_cache", k_cache), ("v_cache", v_cache)
    axes = CACHE_AXES if block_table is None else PAGE_AXES["NHD"]
    caches_given = ((name, cache, axes) for name, cache in given)
    for name, x, expected in (("q", q, NEW_AXES), *caches_given, *new):
        check_axes(name, x, expected)
    if block_table is None:
        if k_cache.shape[:3] != v_cache.shape[:3]:
            raise InvalidProblem(
                "k_cache and v_cache must hold as many caches, keys and heads, got "
                f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
            )
        k_pages, v_pages, step = _as_pages(k_cache, v_cache)
        caches, seqlen = k_cache.shape[:2]
        table = _table_of(caches, seqlen // k_pages.shape[1], step, cache_batch_idx, q)
    elif cache_batch_idx is not None:
        raise InvalidProblem("leave cache_batch_idx out: the block_table selects the pages")
    else:
        check_axes("block_table", block_table, "batch, pages of one")
        k_pages, v_pages, table = k_cache, v_cache, block_table
    lengths = _lengths(cache_seqlens, q, table.shape[1] * k_pages.shape[1])
    if k is not None and v is not None:
        lengths = lengths + k.shape[1]
        append_paged(
            *(k.transpose(1, 2), v.transpose(1, 2), k_pages, v_pages, table, lengths),
        )
    out, lse = over_pages(
        *(q.transpose(1, 2), k_pages, v_pages, table, lengths),
        mask=mask_of(window_size, causal, "bottom_right"),
        score=score_of(softcap, alibi_slopes, "bottom_right"),
        scale=softmax_scale,
    )
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def _as_pages(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """View caches (caches, seqlen, heads, dim) as pages, which can be written.

    Also returns the number of pages from one cache to the next. Raises Unsupported if there is no
    such view.
    """
    caches, seqlen = k.shape[:2]
    if not seqlen:
        return k.flatten(0, 1)[:, None], v.flatten(0, 1)[:, None], 0
    for page in (size for size in reversed(PAGES) if seqlen % size == 0):
        steps = {_pages_between(x, page) for x in (k, v)} if caches > 1 else {seqlen // page}
        if len(steps) == 1 and (step := steps.pop()) is not None:
            pages = (caches - 1) * step + seqlen // page
            k, v = (
                x.as_strided((pages, page, *x.shape[2:]), (page * x.stride(1), *x.stride()[1:]))
                for x in (k, v)
            )
            return k, v, step
    raise Unsupported(
        "k_cache and v_cache must have equal strides, and caches must begin a whole number of keys "
        f"apart, got strides {k.stride()} and {v.stride()} for shapes {tuple(k.shape)} "
        f"and {tuple(v.shape)}"
    )


def _pages_between(cache: torch.Tensor, page: int) -> int | None:
    """Return the number of pages from one cache to the next; None if it is not an integer."""
    step, rest = divmod(cache.stride(0), max(1, page * cache.stride(1)))
    return None if rest else step


def _table_of(
    caches: int, pages_each: int, step: int, chosen: torch.Tensor | None, q: torch.Tensor
) -> torch.Tensor:
    """Return the block table of a batch: the pages of the `chosen` caches, by default the first.
    Raises InvalidProblem."""
    batch, device = q.shape[0], q.device

    def all_pages() -> torch.Tensor:
        first = torch.arange(caches, dtype=torch.int32, device=device)[:, None] * step
        return first + torch.arange(pages_each, dtype=torch.int32, device=device)

    table = _tables.get((caches, pages_each, step, device), all_pages)
    if chosen is None:
        if caches < batch:
            raise InvalidProblem(f"k_cache must hold at least {batch} caches, got {caches}")
        return table[:batch]
    check_axes("cache_batch_idx", chosen, "batch")
    if len(chosen) != batch:
        raise InvalidProblem(f"cache_batch_idx must be ({batch},), got {tuple(chosen.shape)}")
    chosen = readable(chosen)
    if is_checked(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < caches:
        raise InvalidProblem(f"cache_batch_idx must be 0..{caches - 1}, got {chosen.tolist()}")
    return table[chosen]


def _lengths(given: torch.Tensor | int | None, q: torch.Tensor, room: int) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        return given
    given = plain_number(given)
    if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
        raise InvalidProblem(
            f"cache_seqlens must be a tensor (batch,) or one integer, got {shown(given)}"
        )
    return torch.full((q.shape[0],), room if given is None else given, device=q.device)


_tables: BoundedCache[Any, torch.Tensor] = BoundedCache(64)
