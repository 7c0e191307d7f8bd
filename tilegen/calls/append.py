"""New keys and values, written into the pages of a cache."""

from __future__ import annotations

import torch

from tilegen.calls.entry import is_watched, refuse_jit
from tilegen.runtime.slots import append


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
    (requests + 1,), which says where each request's tokens start; tokens before the first and
    after the last are left out. Pages, whose dtype k and v are cast to, `block_table` and `layout`
    are those of `attention_paged`, and `kv_lengths` (requests,) the keys of each request with the
    new ones, as the call of attention that follows takes them. Nothing is read on the host, so that
    a CUDA graph may hold it. Raises InvalidProblem.
    """
    call = k, v, k_pages, v_pages, block_table, kv_lengths, q_starts, layout
    refuse_jit()
    if is_watched(k):
        from tilegen.operators.pages import append_operator

        append_operator(*call)
    else:
        append(*call)
