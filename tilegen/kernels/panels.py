"""Panels: scores that small-cache kernels share through L2. A panel holds some query rows of one
head, or all rows of several heads. Kernels of a pass share nothing else, so each has its own
config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tilegen.kernels.config import BLOCK_SIZES

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec
    from tilegen.kernels.spec import Direction
    from tilegen.problem import AttentionProblem

Launch = Callable[..., Any]
"""Launches one kernel."""
SCORE_WIDTH = 128
"""Default width of a score tile of the small-cache forward [keys]."""
PANEL_STEP = BLOCK_SIZES[-1]
"""Query rows: panels start at multiples of this step, so that their tiles do not depend on the
panel's size."""


@dataclass(frozen=True)
class Panel:
    """Some query rows of one head, or all rows of several; heads are numbered across batches."""

    head_first: int
    num_heads: int
    row_first: int
    num_rows: int
    begins: bool
    """True if no earlier panel has rows of the same key-value heads."""
    ends: bool
    """True if no later panel has rows of the same key-value heads."""


def panels(num_heads: int, group_size: int, seqlen_q: int, rows: int) -> Iterator[Panel]:
    """Yield panels of at most `rows` query rows (but at least PANEL_STEP), in the order of their
    heads."""
    if rows < 2 * seqlen_q:  # each part of one head
        step = max(PANEL_STEP, rows // PANEL_STEP * PANEL_STEP)
        for head in range(num_heads):
            for first in range(0, seqlen_q, step):
                num_rows = min(step, seqlen_q - first)
                begins = head % group_size == 0 and first == 0
                ends = head % group_size == group_size - 1 and first + num_rows == seqlen_q
                yield Panel(head, 1, first, num_rows, begins, ends)
        return
    heads = rows // seqlen_q
    # Either whole groups, or part of a single group.
    heads = heads // group_size * group_size or heads
    limit = num_heads if heads >= group_size else group_size
    for start in range(0, num_heads, limit):
        for first in range(start, start + limit, heads):
            count = min(heads, start + limit - first)
            begins, ends = first % group_size == 0, (first + count) % group_size == 0
            yield Panel(first, count, 0, seqlen_q, begins, ends)


L2_PART = 0.5
"""Share of L2 that a panel may fill; streamed tiles need the rest."""
TILE = 128
"""The side of the tile that determines the number of programs of a small-cache kernel."""


def panel_rows(
    *, seqlen_kv: int, head_dim: int, score_bytes: int, l2_bytes: int, num_sms: int
) -> int:
    """Return the query rows of a panel: as many as L2 holds, but enough to give every SM a program.
    A panel has seqlen_kv scores for each row, so its memory is linear in the length."""
    in_l2 = int(L2_PART * l2_bytes) // (seqlen_kv * score_bytes)
    one_wave = -(-num_sms // -(-head_dim // TILE)) * TILE
    return max(in_l2, one_wave)


def panels_at_once(direction: Direction) -> int:
    """Return the number of panels that the kernels of a pass share: weights, and in the backward
    gradients."""
    return 1 if direction == "forward" else 2


def rows_for(problem: AttentionProblem, gpu: GpuSpec, direction: Direction) -> int:
    """Return the query rows that a panel of a pass holds on a GPU."""
    return panel_rows(
        seqlen_kv=problem.seqlen_kv,
        head_dim=min(problem.head_dim_qk, problem.head_dim_v),
        score_bytes=problem.element_bytes * panels_at_once(direction),
        l2_bytes=gpu.l2_bytes,
        num_sms=gpu.num_sms,
    )


@lru_cache(maxsize=1024)
def panels_per_group(group_size: int, seqlen_q: int, rows: int) -> int:
    """Count the panels of `rows` query rows for the query heads of one key-value head. Heads of
    several groups may share a panel, if it holds whole groups."""
    return sum(1 for _ in panels(group_size, group_size, seqlen_q, rows))
