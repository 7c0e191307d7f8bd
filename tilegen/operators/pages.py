"""`tilegen::paged` and `tilegen::append`: operators for calls over the pages of a cache.
torch.compile traces `attend_pages`."""

from __future__ import annotations

from typing import Any

import torch

from tilegen.errors import InvalidProblem
from tilegen.launch.autograd import refuse_gradients
from tilegen.launch.changes import Pages
from tilegen.launch.derivatives import refuse_tangents
from tilegen.operators.crossing import crossing
from tilegen.operators.library import computed
from tilegen.runtime.call import check_axes
from tilegen.runtime.paged_call import QUERY_AXES
from tilegen.runtime.slots import append


def attend_pages(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    pages: Pages,
    mask: Any,
    score: Any,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) of a call of `attention_paged` by an operator. Raises InvalidProblem or
    Unsupported."""
    q_starts, longest_q = pages.q_starts, pages.max_q_length
    check_axes("q", q, QUERY_AXES[q_starts is not None])
    refuse_gradients(q, k_pages, v_pages, None)
    encoded = crossing(mask, score, None)
    refuse_tangents(*encoded.tensors)
    if encoded.trained:
        refuse_gradients(encoded.tensors[encoded.trained[0]], k_pages, v_pages, None)
    encoded.fill(q)
    requests = None
    if q_starts is None:
        requests, _, longest_q, _ = q.shape
        q_starts = torch.arange(requests + 1, dtype=torch.int32, device=q.device) * longest_q
        q = q.transpose(1, 2).flatten(0, 1)
    if longest_q is None:
        raise InvalidProblem("with q_starts max_q_length is needed, the most queries of a request")
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out, lse = torch.ops.tilegen.paged(
        *(q, k_pages, v_pages, pages.block_table, pages.lengths, q_starts, longest_q),
        *(pages.max_kv_length, encoded.text, encoded.tensors, factor, pages.layout),
    )
    if requests is not None:
        each = requests, longest_q  # explicit: -1 is ambiguous without elements
        out = out.unflatten(0, each).transpose(1, 2)
        lse = lse.unflatten(1, each).transpose(0, 1)
    return (out if pages.out is None else pages.out.copy_(out)), lse


@torch.library.custom_op("tilegen::paged", mutates_args=())
def paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    q_starts: torch.Tensor,
    max_q_length: int,
    max_kv_length: int | None,
    changes: str,
    tensors: list[torch.Tensor],
    scale: float,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attention_paged` with packed queries; `changes` and `tensors` are a crossing.

    Returns out (total_q, heads, d_v) and lse (heads, total_q), dense.
    """
    page = k_pages.shape[1 if layout == "NHD" else 2]
    room = block_table.shape[1] * page if max_kv_length is None else max_kv_length
    bounds = max_q_length, max_kv_length
    pages = Pages(block_table, kv_lengths, q_starts, *bounds, layout, None)
    lengths = max_q_length, room
    out, lse = computed(q, k_pages, v_pages, changes, tensors, lengths, scale, pages=pages)
    return out.contiguous(), lse.contiguous()


@paged.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[Any, Any]:
    total, heads, _width = q.shape
    return q.new_empty((total, heads, v.shape[3])), q.new_empty((heads, total), dtype=torch.float32)


@torch.library.custom_op("tilegen::append", mutates_args=("k_pages", "v_pages"))
def append_operator(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    q_starts: torch.Tensor | None,
    layout: str,
) -> None:
    """Write new keys and values into pages, as `append_paged` does."""
    append(k, v, k_pages, v_pages, block_table, kv_lengths, q_starts, layout)


@append_operator.register_fake
def _(*_: Any) -> None:
    return None
