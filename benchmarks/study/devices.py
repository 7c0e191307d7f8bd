"""The device table: fast memory in words, and the head dims where regimes change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.environment import Environment
from tilegen.gpus.spec import gpu
from tilegen.theory.regimes import device_regimes

SIZES = {4: "fp32", 2: "bf16, fp16", 1: "fp8"}


@dataclass(frozen=True, kw_only=True)
class DeviceRow(Environment):
    """One GPU and one size of elements; accumulators have 4 bytes."""

    device: str
    dtype: str
    element_bytes: int
    smem_kb: float
    on_chip_kb: float
    """Shared memory of one program, registers and tensor memory, the M of the bounds [KB]."""
    head_dim_smem: float
    """Head dim sqrt(M), where M is shared memory alone."""
    head_dim_on_chip: float
    """Head dim sqrt(M), where M is all on-chip memory and each register one word."""
    dividing_forward: float
    """Head dim above which the small-cache schedule of the forward moves fewer bytes."""
    dividing_backward: float
    """Head dim above which the small-cache schedule of the backward moves fewer bytes."""


def device_rows() -> Iterator[DeviceRow]:
    """Yield a row for every GPU of the catalogue and every size of elements."""
    for regime in device_regimes(tuple(SIZES)):
        spec = gpu(regime.gpu)
        yield DeviceRow(
            device=spec.title,
            dtype=SIZES[regime.element_bytes],
            element_bytes=regime.element_bytes,
            smem_kb=spec.smem_per_block / 1024,
            on_chip_kb=spec.on_chip_bytes / 1024,
            head_dim_smem=regime.head_dim_smem,
            head_dim_on_chip=regime.head_dim_on_chip,
            dividing_forward=regime.dividing_head_dims["forward"],
            dividing_backward=regime.dividing_head_dims["backward"],
        )
