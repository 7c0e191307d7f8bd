"""Count launches, programs and steps of a kernel over a whole problem, or over its panels."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from tilegen.kernels.loops import Sliced
from tilegen.kernels.panels import panels
from tilegen.model.mask_size import size_of
from tilegen.model.splits import splits_of
from tilegen.model.visits import visits
from tilegen.task import KernelTask, Tiled


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Launches, programs and steps of a kernel for a problem."""

    count: int
    """Equal launches, one after the other."""
    programs: int
    """Programs of all launches."""
    steps: int | Fraction
    """Steps of all programs."""
    partial: int | Fraction
    """Steps on tiles that need mask code."""
    longest: float
    """Steps of the longest program."""

    @property
    def masked(self) -> float:
        """Part of the steps that need mask code."""
        return float(self.partial / self.steps) if self.steps else 0.0


def launches(tiled: Tiled) -> Launches:
    """Count the programs and steps of a config; assumes equal programs within a panel."""
    return tiled.by_tile("launches", lambda: _launches(tiled))


def _launches(tiled: Tiled) -> Launches:
    task, spec, counts = tiled.task, tiled.spec, visits(tiled)
    if spec.sliced and spec.panel:
        return _over_panels(tiled, spec.sliced)
    tiles, in_turn = task.heads_kv * task.heads_of_group, 1
    programs, longest = counts.programs, counts.longest
    if spec.masked:  # programs of splits without kept pairs end at once
        splits = splits_of(tiled)
        tiles = task.heads_kv * splits.tiles_of_group
        programs = splits.programs
        longest = splits.longest if spec.shares else min(longest, splits.longest)
        # A tile streams the rows of these query heads, one head after the other.
        in_turn = task.problem.group_size // task.heads_of_group
    return Launches(
        count=1,
        programs=max(1, int(tiles * programs)),
        steps=tiles * in_turn * counts.tiles,
        partial=tiles * in_turn * counts.partial_tiles,
        longest=in_turn * longest,
    )


def _over_panels(tiled: Tiled, loop: Sliced) -> Launches:
    task, counts = tiled.task, visits(tiled)
    of_panels, groups = task.memo.once(
        ("panels", task.device, task.direction), lambda: _panels(task)
    )
    widths = (task.problem.head_dims[dim] for dim in loop.slices)
    slices = sum(-(-width // tiled.config.block_d) for width in widths)
    steps = int(task.heads_q * counts.tiles)
    if loop.loops:  # a program for each tile of scores
        programs = max(1, steps)
    else:
        programs = loop.sides(task.heads_q, groups)[0] * counts.programs * slices
    return Launches(
        count=loop.launches * of_panels,
        programs=programs,
        steps=steps * slices,
        partial=0,
        longest=steps * slices / programs,
    )


def kept_entries(task: KernelTask) -> int:
    """Count the scores of all heads that the mask keeps; 0 if a step is not a tile of scores.

    Programs take at least one step for each tile that these scores would fill.
    """
    if not task.spec.is_fused:
        return 0
    return task.heads_q * size_of(task).entries


def _panels(task: KernelTask) -> tuple[int, int]:
    """Count panels, and the sum of their key-value heads."""
    group_size, seqlen_q = task.problem.group_size, task.problem.seqlen_q
    heads, rows = task.heads_q, task.panel_rows
    of_one_head = rows < 2 * seqlen_q
    parts = list(
        panels(1, 1, seqlen_q, rows) if of_one_head else panels(heads, group_size, seqlen_q, rows)
    )
    times = heads if of_one_head else 1
    return times * len(parts), times * sum(-(-panel.num_heads // group_size) for panel in parts)
