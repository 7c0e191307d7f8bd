"""Dense keys and values laid out as the pages of a cache, for checks and timings of paged
kernels."""

from __future__ import annotations

import torch

from tilegen.kernels.split_kv import Requests


def in_pages(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Requests]:
    """Return q (1, heads, batch * seqlen_q, dim), pages (pages, heads, page, dim) of k and of v,
    and the requests, which say where the pages of each lie.

    The pages of a batch entry are not neighbours, and one more page than is needed is there; what
    lies beyond the last key is not a number, so that results show where it is read.
    """
    batch, _, rows, _ = q.shape
    length = k.shape[2]
    each = -(-length // page)
    order = torch.randperm(batch * each + 1, generator=torch.Generator().manual_seed(0))
    table = order[: batch * each].view(batch, each).to(q.device)

    def paged(x: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, 0, each * page - length), value=float("nan"))
        pages = padded.unflatten(2, (each, page)).transpose(1, 2).flatten(0, 1)
        found = torch.full_like(pages, float("nan"))[:1].repeat(batch * each + 1, 1, 1, 1)
        found[table.flatten()] = pages
        return found

    starts = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=q.device)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    requests = Requests(table.to(torch.int32), lengths, starts, rows, length)
    packed = q.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]
    pages = paged(k)
    values = pages[..., : v.shape[3]] if v.data_ptr() == k.data_ptr() else paged(v)
    return packed, pages, values, requests


def out_of_pages(x: torch.Tensor, batch: int) -> torch.Tensor:
    """Return (batch, heads, seqlen_q, ...) of (1, heads, batch * seqlen_q, ...)."""
    return x[0].unflatten(1, (batch, -1)).transpose(0, 1)
