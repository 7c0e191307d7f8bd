"""The search space: every tile that a kernel can have for a problem."""

from __future__ import annotations

from dataclasses import replace

from tilegen.emit.identity import rows_are_aligned
from tilegen.errors import Unsupported
from tilegen.kernels.config import BLOCK_SIZES, OPTIONS, TileConfig
from tilegen.kernels.descriptors import why_not_described
from tilegen.kernels.registry import why_no_roles
from tilegen.kernels.spec import Knobs
from tilegen.masks.grouping import heads_of_tiles
from tilegen.task import KernelTask

MOST_LEFT = 2**28
"""Memory for partial results beside a serving engine's cache [bytes]: a guess."""


def legal_configs(task: KernelTask, *, describable: bool = True) -> list[TileConfig]:
    """Return the configs of `all_configs`, and the same configs with tensor descriptors if these
    are allowed."""
    plain, problem = all_configs(task), task.problem
    if task.spec.specialised:
        if reason := task.spec.why_not(problem):
            raise Unsupported(reason)
        return [
            config
            for one in plain
            for programs in {0, task.gpu.num_sms} & {*OPTIONS["persistent"].allowed}
            for turns in (False, True)
            if not why_no_roles(
                config := replace(one, descriptors=True, persistent=programs, turns=turns)
            )
        ]
    aligned = describable and rows_are_aligned(problem)
    if why_not_described(task.spec, problem.dtype, aligned=aligned, arch=task.device.arch):
        return plain
    return [tile for config in plain for tile in (config, replace(config, descriptors=True))]


def all_configs(task: KernelTask) -> list[TileConfig]:
    """Return all tile shapes that are not larger than the problem, in a fixed order, loaded by
    addresses."""
    problem, splits = task.problem, _splits(task)
    return [
        config
        for heads in (heads_of_tiles(problem) if task.spec.packs else (1,))
        for config in _configs(
            task, _rounded(problem.seqlen_q * heads), _rounded(problem.seqlen_kv), splits, heads
        )
    ]


def _splits(task: KernelTask) -> tuple[int, ...]:
    """Return the rows that a split, or a share, may have; 0 for kernels without them.

    Splits of divided requests leave at most MOST_LEFT bytes of partial results, or are the largest.
    If only splits larger than those of other kernels stay below that, the smallest of them is used:
    there are many queries then, and so many programs.
    """
    spec, problem = task.spec, task.problem
    streamed = task.lengths[0 if spec.shares else 1]
    every = spec.knobs.split_kv
    splits = tuple(split for split in every if split < 2 * streamed or not split) or every[:1]
    most = (spec.unpaged or spec).knobs.split_kv[-1]
    usual = tuple(split for split in splits if split <= most)
    if not task.divided:
        return usual
    each = 4 * task.heads_q * problem.seqlen_q * problem.head_dim_v
    few = tuple(n for n in splits if each * -(-streamed // n) <= MOST_LEFT) or splits[-1:]
    return tuple(split for split in few if split in usual) or few[:1]


def _configs(
    task: KernelTask, max_rows: int, max_columns: int, splits: tuple[int, ...], heads: int
) -> tuple[TileConfig, ...]:
    """Return the configs up to a tile size, cached across lengths."""
    key = "search space", task.kernel, max_rows, max_columns, splits, heads
    knobs = task.spec.knobs
    return task.lengthless.memo.once(key, lambda: _of(knobs, max_rows, max_columns, splits, heads))


def _of(
    knobs: Knobs, max_rows: int, max_columns: int, splits: tuple[int, ...], heads: int
) -> tuple[TileConfig, ...]:
    # If every tile is larger than the problem, the smallest is used.
    least = max(knobs.block_m[0], heads)
    rows = [block for block in knobs.block_m if least <= block <= max(max_rows, least)]
    columns = [block for block in knobs.block_n if block <= max(max_columns, knobs.block_n[0])]
    return tuple(
        TileConfig(
            block_m=block_m // heads,
            block_n=block_n,
            block_d=block_d,
            num_warps=num_warps,
            num_stages=num_stages,
            heads=heads,
            split_kv=split_kv,
        )
        for block_m in rows
        for block_n in columns
        for block_d in knobs.block_d
        for split_kv in splits
        for num_warps in knobs.num_warps
        for num_stages in knobs.num_stages
    )


def _rounded(length: int) -> int:
    """Return the largest block that a length can use; all long lengths share one result."""
    return min(max(BLOCK_SIZES[0], 1 << (length - 1).bit_length()), BLOCK_SIZES[-1])
