"""Lay out dense keys and values as pages of a cache, for checks and timings of paged kernels."""

from __future__ import annotations

import torch

from tilegen.kernels.split_kv import Requests


def in_pages(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Requests]:
    """Lay out dense tensors (batch, heads, seqlen, dim) for a paged call.

    Returns q (1, heads, batch * seqlen_q, dim), the pages of k and of v (pages, heads, page, dim),
    and the requests with their block table. Pages are shuffled, and one of them is unused. Elements
    beyond the last key are NaN, so that a result shows if a kernel reads them.
    """
    batch, _, rows, _ = q.shape
    length = k.shape[2]
    pages_each = -(-length // page)
    order = torch.randperm(batch * pages_each + 1, generator=torch.Generator().manual_seed(0))
    table = order[: batch * pages_each].view(batch, pages_each).to(q.device)

    def paged(x: torch.Tensor) -> torch.Tensor:
        missing = pages_each * page - length
        padded = torch.nn.functional.pad(x, (0, 0, 0, missing), value=float("nan"))
        pages = padded.unflatten(2, (pages_each, page)).transpose(1, 2).flatten(0, 1)
        cache = torch.full_like(pages, float("nan"))[:1].repeat(batch * pages_each + 1, 1, 1, 1)
        cache[table.flatten()] = pages
        return cache

    starts = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=q.device)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    requests = Requests(table.to(torch.int32), lengths, starts, rows, length)
    packed = q.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]
    pages = paged(k)
    values = pages[..., : v.shape[3]] if v.data_ptr() == k.data_ptr() else paged(v)
    return packed, pages, values, requests


def out_of_pages(x: torch.Tensor, batch: int) -> torch.Tensor:
    """View (1, heads, batch * seqlen_q, ...) as (batch, heads, seqlen_q, ...)."""
    return x[0].unflatten(1, (batch, -1)).transpose(0, 1)
