"""Count launches, programs and steps of a kernel over a whole problem, or over its panels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tilegen.kernels.loops import Sliced
from tilegen.kernels.panels import panels
from tilegen.model.columns import Number, by_tile, exact
from tilegen.model.splits import splits_of
from tilegen.model.visits import visits
from tilegen.task import Tiled


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Launches, programs and steps of a kernel for a problem."""

    count: Number
    """Equal launches, one after the other."""
    programs: Number
    """Programs of all launches."""
    steps: Number
    """Steps of all programs."""
    partial: Number
    """Steps on tiles that need mask code."""
    longest: Number
    """Steps of the longest program."""


@by_tile
def launches(tiled: Tiled) -> Launches:
    """Count the programs and steps of a config; assumes equal programs within a panel."""
    task, spec, counts = tiled.task, tiled.spec, visits(tiled)
    if spec.sliced and spec.panel:
        return _over_panels(tiled, spec.sliced)
    tiles, in_turn = task.heads_kv * task.heads_of_group, 1
    programs, longest = counts.programs, counts.longest
    splits: Any
    if spec.masked:  # programs of splits without kept pairs end at once
        splits = splits_of(tiled)
        tiles = task.heads_kv * splits.tiles_of_group
        programs = splits.programs
        longest = splits.longest if spec.shares else np.minimum(longest, splits.longest)
        # A tile streams the rows of these query heads, one head after the other.
        in_turn = task.problem.group_size // task.heads_of_group
    return Launches(
        count=1,
        programs=np.maximum(1, tiles * programs // 1),
        steps=tiles * in_turn * counts.tiles,
        partial=tiles * in_turn * counts.partial_tiles,
        longest=in_turn * longest,
    )


def _over_panels(tiled: Tiled, loop: Sliced) -> Launches:
    task, counts = tiled.task, visits(tiled)
    problem = task.problem
    of_panels, groups = _panels(task.heads_q, problem.group_size, problem.seqlen_q, task.panel_rows)
    widths = (task.problem.head_dims[dim] for dim in loop.slices)
    slices = sum(-(-width // exact(tiled.config.block_d)) for width in widths)
    steps = task.heads_q * counts.tiles // 1
    if loop.loops:  # a program for each tile of scores
        programs: Any = np.maximum(1, steps)
    else:
        programs = loop.sides(task.heads_q, groups)[0] * counts.programs * slices
    return Launches(
        count=loop.launches * of_panels,
        programs=programs,
        steps=steps * slices,
        partial=0,
        longest=steps * slices / programs,
    )


@lru_cache(maxsize=1024)
def _panels(heads: int, group_size: int, seqlen_q: int, rows: int) -> tuple[int, int]:
    """Count panels, and the sum of their key-value heads."""
    of_one_head = rows < 2 * seqlen_q
    parts = list(
        panels(1, 1, seqlen_q, rows) if of_one_head else panels(heads, group_size, seqlen_q, rows)
    )
    times = heads if of_one_head else 1
    return times * len(parts), times * sum(-(-panel.num_heads // group_size) for panel in parts)
