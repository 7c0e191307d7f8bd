"""The search space: every tile that a kernel can have for a problem."""

from __future__ import annotations

from dataclasses import replace

from tilegen.emit.identity import rows_are_aligned
from tilegen.errors import Unsupported
from tilegen.kernels.config import BLOCK_SIZES, OPTIONS, TileConfig
from tilegen.kernels.descriptors import why_not_described
from tilegen.kernels.registry import why_no_roles
from tilegen.masks.grouping import heads_of_tiles
from tilegen.model.columns import Columns
from tilegen.task import KernelTask

MOST_LEFT = 2**28
"""Memory for partial results beside a serving engine's cache [bytes]: a guess."""


def legal_configs(task: KernelTask, *, describable: bool = True) -> list[TileConfig]:
    """Return the configs of `all_configs`, and the same configs with tensor descriptors if these
    are allowed."""
    return legal_columns(task, describable=describable).configs


def legal_columns(task: KernelTask, *, describable: bool = True) -> Columns:
    """Return `legal_configs` as columns, all configs without descriptors first."""
    plain, problem = _all(task), task.problem
    if task.spec.specialised:
        if reason := task.spec.why_not(problem):
            raise Unsupported(reason)
        programs_of = {0, task.gpu.num_sms * task.spec.persists} & {*OPTIONS["persistent"].allowed}
        return Columns.of(
            [
                config
                for one in plain.configs
                for programs in programs_of
                for turns in (False, True)[: 1 + task.spec.persists]
                if not why_no_roles(
                    task.spec,
                    config := replace(one, descriptors=True, persistent=programs, turns=turns),
                )
            ]
        )
    aligned = describable and rows_are_aligned(problem)
    if why_not_described(task.spec, problem.dtype, aligned=aligned, arch=task.device.arch):
        return plain
    return Columns.joined([plain, plain.having(descriptors=True)])


def all_configs(task: KernelTask) -> list[TileConfig]:
    """Return all tile shapes that are not larger than the problem, in a fixed order, loaded by
    addresses."""
    return _all(task).configs


def _all(task: KernelTask) -> Columns:
    problem, knobs = task.problem, task.spec.knobs

    def tiles(heads: int) -> Columns:
        # If every tile is larger than the problem, the smallest is used.
        least = max(knobs.block_m[0], heads)
        most = max(_power_of_two(problem.seqlen_q * heads), least)
        widest = max(_power_of_two(problem.seqlen_kv), knobs.block_n[0])
        return Columns.product(
            heads=[heads],
            block_m=[block // heads for block in knobs.block_m if least <= block <= most],
            block_n=[block for block in knobs.block_n if block <= widest],
            block_d=knobs.block_d,
            split_kv=_splits(task),
            num_warps=knobs.num_warps,
            num_stages=knobs.num_stages,
        )

    return Columns.joined(map(tiles, heads_of_tiles(problem) if task.spec.packs else (1,)))


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


def _power_of_two(length: int) -> int:
    """Return the largest block that a length can use."""
    return max(BLOCK_SIZES[0], 1 << (length - 1).bit_length())
