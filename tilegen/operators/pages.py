"""`tilegen::paged` and `tilegen::append`: operators for calls over the pages of a cache.
torch.compile traces `attend_pages_watched`."""

from __future__ import annotations

from typing import Any

import torch

from tilegen.errors import InvalidProblem
from tilegen.operators.crossing import crossing
from tilegen.operators.rebuilding import rebuilt
from tilegen.runtime.call import check_axes
from tilegen.runtime.paged_call import QUERY_AXES
from tilegen.runtime.paged_dispatch import attend_pages, refuse_gradients
from tilegen.runtime.slots import append


def attend_pages_watched(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    q_starts: torch.Tensor | None,
    max_q_length: int | None,
    max_kv_length: int | None,
    mask: Any,
    score: Any,
    scale: float | None,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) as `attend_pages` does, by an operator. Raises InvalidProblem or
    Unsupported."""
    check_axes("q", q, QUERY_AXES[q_starts is not None])
    refuse_gradients(q, k_pages, v_pages, None)
    encoded = crossing(mask, score, None)
    if encoded.trained:
        refuse_gradients(encoded.tensors[encoded.trained[0]], k_pages, v_pages, None)
    encoded.fill(q)
    if q_starts is None:
        requests, _, max_q_length, _ = q.shape
        end = (requests + 1) * max_q_length
        q_starts = torch.arange(0, end, max_q_length, dtype=torch.int32, device=q.device)
        q = q.transpose(1, 2).flatten(0, 1)
    if max_q_length is None:
        raise InvalidProblem("with q_starts max_q_length is needed, the most queries of a request")
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out, lse = torch.ops.tilegen.paged(
        *(q, k_pages, v_pages, block_table, kv_lengths, q_starts, max_q_length, max_kv_length),
        *(encoded.text, encoded.tensors, factor, layout),
    )
    return out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)


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
    decoded, _ = rebuilt(changes, tensors, (), (max_q_length, room), None)
    where = block_table, kv_lengths, q_starts
    bounds = max_q_length, max_kv_length
    with torch.no_grad():
        out, lse = attend_pages(*(q, k_pages, v_pages, *where, *bounds, decoded, scale, layout))
    return out.squeeze(0).transpose(0, 1).contiguous(), lse.squeeze(0).contiguous()


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
