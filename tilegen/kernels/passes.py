"""A pass, forward or backward, as a sequence of launches: which kernels a family needs, in what
order, over which panels.

A panel is what the small-cache kernels share through L2: the scores of some query rows of one head,
or of several whole heads. Kernels of one pass agree on nothing else, so each has its own config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from tilegen.kernels.config import BLOCK_SIZES, Kernel

if TYPE_CHECKING:
    import torch

    from tilegen.gpus.spec import GpuSpec
    from tilegen.problem import AttentionProblem

Launch = Callable[..., Any]
SCORE_WIDTH = 128
"""Keys of one score tile of the small-cache forward where nobody says otherwise."""
PANEL_STEP = BLOCK_SIZES[-1]
"""Panels start at multiples of it, so that their tiles are tiles of the whole, whatever its
size."""


@dataclass(frozen=True)
class Panel:
    """Some query rows of one head, or all of several; heads are numbered through all batches."""

    head_first: int
    num_heads: int
    row_first: int
    num_rows: int
    begins: bool
    """Whether no earlier panel has rows of the same key-value heads."""
    ends: bool
    """Whether no later one has."""


def panels(num_heads: int, group_size: int, seqlen_q: int, rows: int) -> Iterator[Panel]:
    """Yield panels of at most `rows` query rows (but at least PANEL_STEP), in the order of their
    heads."""
    if rows < 2 * seqlen_q:  # of one head each
        step = max(PANEL_STEP, rows // PANEL_STEP * PANEL_STEP)
        for head in range(num_heads):
            for first in range(0, seqlen_q, step):
                num_rows = min(step, seqlen_q - first)
                begins = head % group_size == 0 and first == 0
                ends = head % group_size == group_size - 1 and first + num_rows == seqlen_q
                yield Panel(head, 1, first, num_rows, begins, ends)
        return
    heads = rows // seqlen_q
    # Whole groups, or parts of one.
    heads = heads // group_size * group_size or heads
    limit = num_heads if heads >= group_size else group_size
    for start in range(0, num_heads, limit):
        for first in range(start, start + limit, heads):
            count = min(heads, start + limit - first)
            begins, ends = first % group_size == 0, (first + count) % group_size == 0
            yield Panel(first, count, 0, seqlen_q, begins, ends)


L2_PART = 0.5
"""Of L2 that a panel may fill; the tiles that stream past it need the rest."""
TILE = 128
"""Side of the tile by which programs of a small-cache kernel are counted."""


def panel_rows(
    *, seqlen_kv: int, head_dim: int, score_bytes: int, l2_bytes: int, num_sms: int
) -> int:
    """Return how many query rows go into a panel: as many as L2 holds, but enough to give every SM
    a program. Memory is that many rows of seqlen_kv scores, linear in the length."""
    in_l2 = int(L2_PART * l2_bytes) // (seqlen_kv * score_bytes)
    one_wave = -(-num_sms // -(-head_dim // TILE)) * TILE
    return max(in_l2, one_wave)


def rows_for(
    problem: AttentionProblem, gpu: GpuSpec, direction: Literal["forward", "backward"]
) -> int:
    """Return the query rows that a panel of a pass holds on a GPU."""
    panels_at_once = 1 if direction == "forward" else 2  # weights, and in the backward gradients
    return panel_rows(
        seqlen_kv=problem.seqlen_kv,
        head_dim=min(problem.head_dim_qk, problem.head_dim_v),
        score_bytes=problem.element_bytes * panels_at_once,
        l2_bytes=gpu.l2_bytes,
        num_sms=gpu.num_sms,
    )


@lru_cache(maxsize=1024)
def panels_per_group(group_size: int, seqlen_q: int, rows: int) -> int:
    """Return how many panels of `rows` the query heads of one key-value head are computed in; whole
    heads of other groups may share the only one."""
    return sum(1 for _ in panels(group_size, group_size, seqlen_q, rows))


def forward(
    launch: Mapping[Kernel, Launch],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    panel_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) from whichever family of forward kernels `launch` has.

    `panel_rows` bounds the memory of the small-cache family: 16 bits or 32 for each of its
    seqlen_kv scores.
    """
    if whole := launch.get("fwd") or launch.get("fwd_streamed"):
        return whole(q, k, v, scale)
    import torch

    out = empty_like(q, v.shape[3])
    batch, num_heads_q, seqlen_q, _ = q.shape
    lse = torch.empty((batch, num_heads_q, seqlen_q), device=q.device, dtype=torch.float32)
    group_size = num_heads_q // k.shape[1]
    for p in panels(batch * num_heads_q, group_size, seqlen_q, panel_rows):
        scores = launch["fwd_scores"](
            q, k, p.head_first, p.num_heads, p.row_first, p.num_rows, scale
        )
        launch["fwd_values"](*scores, v, out, lse, p.head_first, p.row_first)
        del scores  # its memory is the next panel's
    return out, lse


def gradients(
    launch: Mapping[Kernel, Launch],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    *,
    panel_rows: int,
    wants_dq: bool = True,
    wants_dkdv: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return (dq, dk, dv) from whichever family of backward kernels `launch` has; None for those
    not wanted."""
    dq = dk = dv = None
    if "bwd_scores" not in launch:
        if wants_dq:
            dq = launch["bwd_dq"](q, k, v, dout, lse, delta, scale)
        if wants_dkdv:
            dk, dv = launch["bwd_dkdv"](q, k, v, dout, lse, delta, scale)
        return dq, dk, dv
    import torch

    batch, num_heads_q, seqlen_q, head_dim_qk = q.shape
    _, num_heads_kv, seqlen_kv, head_dim_v = v.shape
    group_size = num_heads_q // num_heads_kv
    parts = list(panels(batch * num_heads_q, group_size, seqlen_q, panel_rows))
    if wants_dq:
        dq = empty_like(q, head_dim_qk)
    columns: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, float]] = []
    if wants_dkdv:
        dk, dv = empty_like(k, head_dim_qk), empty_like(v, head_dim_v)
        carried = 0 if all(p.begins and p.ends for p in parts) else seqlen_kv
        for which, y, grad, factor in ((0, dout, dv, 1.0), (1, q, dk, scale)):
            acc = torch.empty((carried, grad.shape[3]), device=q.device, dtype=torch.float32)
            columns.append((which, y, acc, grad, factor))
    for p in parts:
        made = launch["bwd_scores"](
            *(q, k, v, dout, lse, delta),
            *(p.head_first, p.num_heads, p.row_first, p.num_rows, scale),
        )
        for which, y, acc, grad, factor in columns:
            launch["bwd_columns"](
                made[which], y, acc, grad, p.head_first, p.row_first, p.begins, p.ends, factor
            )
        if dq is not None:
            launch["bwd_rows"](made[1], k, dq, p.head_first, p.row_first, scale)
        del made  # its memory is the next panel's
    return dq, dk, dv


def empty_like(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return an uninitialised tensor laid out like `tensor` (heads inside or outside of rows)."""
    batch, heads, seqlen, _ = tensor.shape
    if tensor.stride(1) < tensor.stride(2):
        return tensor.new_empty((batch, seqlen, heads, head_dim)).transpose(1, 2)
    return tensor.new_empty((batch, heads, seqlen, head_dim))
