"""Every tile that a kernel can have for a problem: what there is to rank."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tilegen.emit.identity import rows_are_aligned
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import BLOCK_SIZES, Kernel, TileConfig
from tilegen.kernels.descriptors import why_not_described
from tilegen.kernels.registry import KERNELS
from tilegen.kernels.split_kv import FWD_SPLIT, is_divided
from tilegen.masks.grouping import heads_of_tiles
from tilegen.problem import AttentionProblem

MOST_LEFT = 2**28
"""Bytes of partial results for which a serving engine is taken to have room beside its cache."""


def legal_configs(
    problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel, *, describable: bool = True
) -> list[TileConfig]:
    """Return what `all_configs` does, and those with tensor descriptors where there can be any."""
    plain = all_configs(problem, kernel)
    aligned = describable and rows_are_aligned(problem)
    if why_not_described(KERNELS[kernel], problem.dtype, aligned=aligned, arch=gpu.arch):
        return plain
    return [one for config in plain for one in (config, _described(config))]


@lru_cache(maxsize=8192)
def _described(config: TileConfig) -> TileConfig:
    return replace(config, descriptors=True)


def all_configs(problem: AttentionProblem, kernel: Kernel) -> list[TileConfig]:
    """Return every tile shape that is not larger than the problem, in a fixed order, loaded by
    addresses."""
    spec, keys, splits = KERNELS[kernel], problem.seqlen_kv, _splits(problem, kernel)
    return [
        one
        for heads in (heads_of_tiles(problem) if spec.packs else (1,))
        for one in _configs(
            _rounded(problem.seqlen_q * heads), _rounded(keys), splits, heads, kernel
        )
    ]


def _splits(problem: AttentionProblem, kernel: Kernel) -> tuple[int, ...]:
    """Return the rows that a split may have; 0 for kernels without splits.

    Splits over which requests divide their keys leave MOST_LEFT bytes of partial results at most,
    or are the largest. Where only splits larger than those of other kernels do, the smallest of
    them is taken: queries are many there, and so are programs.
    """
    spec = KERNELS[kernel]
    passing = problem.seqlen_q if spec.stays == "columns" else problem.seqlen_kv
    every = spec.knobs.split_kv
    splits = tuple(split for split in every if split < 2 * passing or not split) or every[:1]
    usual = tuple(one for one in splits if one <= FWD_SPLIT.knobs.split_kv[-1])
    if not (spec.pages and is_divided(problem)):
        return usual
    each = 4 * problem.batch * problem.num_heads_q * problem.seqlen_q * problem.head_dim_v
    few = tuple(one for one in splits if each * -(-passing // one) <= MOST_LEFT) or splits[-1:]
    return tuple(one for one in few if one in usual) or few[:1]


@lru_cache(maxsize=256)
def _configs(
    max_rows: int, max_columns: int, splits: tuple[int, ...], heads: int, kernel: Kernel
) -> tuple[TileConfig, ...]:
    knobs = KERNELS[kernel].knobs
    # A tile larger than the problem is better than none.
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
    """Return the largest block that a length can use; the same for all long ones."""
    return min(max(BLOCK_SIZES[0], 1 << (length - 1).bit_length()), BLOCK_SIZES[-1])
