"""Append new keys and values to the pages of a cache."""

from __future__ import annotations

import torch
from torch.overrides import has_torch_function_variadic

from tilegen.calls.entry import is_watched, refuse_jit
from tilegen.launch.derivatives import refuse_tangents
from tilegen.masks.plain import check_plain
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
    """Append keys and values of new tokens to those of their requests, in place.

    Shapes: k and v (requests, heads_kv, new, d), or (total, heads_kv, d) with `q_starts`
    (requests + 1,), the start of each request's tokens. Tokens before the first start and after
    the last are skipped. Pages, `block_table` and `layout` are those of `attention_paged`; k and v
    are cast to the dtype of the pages. `kv_lengths` (requests,) counts the keys of each request
    including the new ones, as the call of `attention_paged` that follows takes it. Nothing is read
    on the host, so a CUDA graph can capture the call. Raises InvalidProblem or Unsupported.
    """
    call = k, v, k_pages, v_pages, block_table, kv_lengths, q_starts, layout
    refuse_jit()
    refuse_tangents(k, v)
    if has_torch_function_variadic(*call[:7]):
        check_plain(k=k, v=v, k_pages=k_pages, v_pages=v_pages, block_table=block_table)
        check_plain(kv_lengths=kv_lengths, q_starts=q_starts)
    if is_watched(k):
        from tilegen.operators.pages import append_operator

        append_operator(*call)
    else:
        append(*call)
