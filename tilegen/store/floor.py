"""The time below which no launch can lie: a record that claims less is a mistake, or a forgery."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from tilegen.kernels.config import Dim, Kernel
from tilegen.kernels.loops import WIDTHS
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem
from tilegen.tuning.measure import Measurement, us

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec

ALLOWED = 0.75
"""Part of the least time that a median may have: some boards run faster than the catalogue says."""
_OF_ROWS = ("q", "out", "dout")
"""Tensors with a row for each query; the others have one for each key."""


def too_fast(measurement: Measurement, problem: AttentionProblem, gpu: str, kernel: Kernel) -> str:
    """Return why no launch can have this median, an empty text if one can, as far as is known."""
    median = measurement.median_us
    # Most masks need not be counted: what is slow enough without one is so with it.
    if median is None or median >= ALLOWED * _floor_us(problem, gpu, kernel, masked=False):
        return ""
    least = _floor_us(problem, gpu, kernel, masked=True)
    if median >= ALLOWED * least:
        return ""
    return (
        f"median_us must be at least {us(ALLOWED * least)}, since {gpu} at its peaks takes "
        f"{us(least)} us for the bytes and products of {kernel}; got {median:g}"
    )


@lru_cache(maxsize=4096)
def _floor_us(problem: AttentionProblem, gpu: str, kernel: Kernel, *, masked: bool) -> float:
    """Return the microseconds that a launch takes at least; 0 for a GPU of no catalogue."""
    if (spec := _catalogued(gpu)) is None:
        return 0.0
    kind, e = KERNELS[kernel], problem.element_bytes
    rows, columns = problem.seqlen_q, problem.seqlen_kv
    entries = rows * columns
    if masked:
        from tilegen.model.mask_size import mask_size  # loads SymPy

        size = mask_size(problem.mask, rows, columns)
        rows, columns, entries = size.rows, size.columns, size.entries
    heads, groups = problem.batch * problem.num_heads_q, problem.batch * problem.num_heads_kv
    # What is written may stay in L2; what is read was cleared from it.
    read = [one.tensor for one in kind.floor if one.direction == "read"]
    words = heads * rows * _width(problem, [WIDTHS[one] for one in read if one in _OF_ROWS])
    words += groups * columns * _width(problem, [WIDTHS[one] for one in read if one in ("k", "v")])
    flops = 2 * heads * entries * _width(problem, kind.products)
    peak = spec.vector_flops_32 if problem.dtype == "fp32" else spec.tensor_flops_16
    return 1e6 * max(words * e / spec.dram_bandwidth, flops / peak)


def _width(problem: AttentionProblem, dims: Iterable[Dim]) -> int:
    return sum(problem.head_dims[one] for one in dims)


def _catalogued(name: str) -> GpuSpec | None:
    from tilegen.gpus.spec import catalogue

    return next((spec for spec in catalogue() if spec.name == name), None)
