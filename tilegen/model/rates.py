"""Read rates.toml: rates that kernels reach, as parts of a GPU's peaks, and the instructions that
they need."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tilegen.gpus.nearest import nearest
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel
from tilegen.kernels.spec import KernelSpec


@dataclass(frozen=True, kw_only=True)
class Rates:
    """A family of rates.toml, which describes the fields."""

    tensor_efficiency: float
    vector_efficiency: float
    exposed: float | dict[str, float]
    full_rate_rows: int
    narrow_rate: float
    operand_rows: int
    l2_efficiency: float
    dram_efficiency: float
    pushed_out: float
    latency_seconds: float
    step_clk: float
    epilogue: float
    lockstep: float
    spilled: float
    launch_seconds: float
    following_seconds: float

    def exposed_of(self, kernel: Kernel) -> float:
        """Return the part of a kernel's softmax that matrix products do not hide. Kernels without a
        measured part have the forward's."""
        if isinstance(self.exposed, dict):
            return self.exposed.get(kernel, self.exposed["fwd"])
        return self.exposed


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Instructions of a thread per unit of work, from rates.toml."""

    score: float
    masked_score: float
    accumulator: float
    step: float
    stage: float


@cache
def rates_of(arch: str) -> Rates:
    """Return the rates of an architecture, or of the nearest older one."""
    families: dict[str, Any] = {
        name: row for row in _table()["family"] for name in row["architectures"]
    }
    row = families[nearest(arch, families)]
    return Rates(**{field: row[field] for field in Rates.__dataclass_fields__})


def instructions(spec: KernelSpec) -> Instructions:
    """Return the instruction counts of a kernel's inner loop, or those of the forward if it has
    none."""
    return _instructions(spec.fitted_as)


@cache
def _instructions(kernel: str) -> Instructions:
    counted = _table()["instructions"]
    return Instructions(**counted.get(kernel, counted["fwd"]))


def peak_flops_per_clk(gpu: GpuSpec, *, vector: bool) -> float:
    """Compute the FLOPs per clock that matrix products of a good kernel reach on one SM. With
    `vector` they run outside of the tensor cores."""
    rates = rates_of(gpu.arch)
    peak = (
        gpu.vector_flops_32 * rates.vector_efficiency
        if vector
        else gpu.tensor_flops_16 * rates.tensor_efficiency
    )
    return peak / (gpu.num_sms * gpu.clock_hz)


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((files("tilegen.model") / "rates.toml").read_text(encoding="utf-8"))
