"""Lower bound on the time of a launch. A record below the bound is a mistake or a forgery."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from tilegen.gpus.spec import catalogue
from tilegen.kernels.config import Dim, Kernel
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem
from tilegen.tuning.measure import Measurement
from tilegen.units import us_text

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec

ALLOWED = 0.75
"""Smallest credible median, as a part of the bound: some boards beat their catalogue figures."""


def why_not_credible(
    measurement: Measurement, problem: AttentionProblem, gpu: str, kernel: Kernel
) -> str:
    """Explain why a median is below the time that any launch needs. Empty if it is credible, or the
    GPU is not in the catalogue."""
    median = measurement.median_us
    # A mask only lowers the bound, and counting it is slow: try without it first.
    if median is None or median >= ALLOWED * _floor_us(problem, gpu, kernel, masked=False):
        return ""
    bound = _floor_us(problem, gpu, kernel, masked=True)
    if median >= ALLOWED * bound:
        return ""
    return (
        f"median_us must be at least {us_text(ALLOWED * bound)}, since {gpu} at its peaks takes "
        f"{us_text(bound)} for the bytes and products of {kernel}; got {us_text(median)}"
    )


@lru_cache(maxsize=4096)
def _floor_us(problem: AttentionProblem, gpu: str, kernel: Kernel, *, masked: bool) -> float:
    """Compute a lower bound on a launch [us]; 0 if the GPU is not in the catalogue."""
    if (spec := _catalogued(gpu)) is None:
        return 0.0
    kind, e = KERNELS[kernel], problem.element_bytes
    rows, columns = problem.seqlen_q, problem.seqlen_kv
    entries = rows * columns
    if masked:
        from tilegen.model.mask_size import mask_size  # loads the model

        size = mask_size(problem.mask, rows, columns)
        rows, columns, entries = size.rows, size.columns, size.entries
    heads, groups = problem.batch * problem.num_heads_q, problem.batch * problem.num_heads_kv
    # Only reads count: L2 is cleared before a launch, but may keep what the launch writes.
    read = [moved.tensor for moved in kind.floor if moved.direction == "read"]
    row_dims: list[Dim] = [one.head_dim for one in read if one.side == "rows" and one.head_dim]
    key_dims: list[Dim] = [one.head_dim for one in read if one.side == "columns" and one.head_dim]
    words = heads * rows * _width(problem, row_dims) + groups * columns * _width(problem, key_dims)
    flops = 2 * heads * entries * _width(problem, kind.products)
    peak = spec.vector_flops_32 if problem.dtype == "fp32" else spec.tensor_flops_16
    return 1e6 * max(words * e / spec.dram_bandwidth, flops / peak)


def _width(problem: AttentionProblem, dims: Iterable[Dim]) -> int:
    return sum(problem.head_dims[dim] for dim in dims)


def _catalogued(name: str) -> GpuSpec | None:

    return next((spec for spec in catalogue() if spec.name == name), None)
