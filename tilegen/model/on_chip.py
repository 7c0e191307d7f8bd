"""Resources that an SM has for its programs, and limits of a program: rules by family of
architectures.

The rules are calibrated against what the compiler reports: footprint.toml holds rules about shared
memory, registers.toml a fit of registers that `python -m benchmarks.calibrate_footprint` makes
again.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from tilegen.gpus.nearest import nearest
from tilegen.gpus.spec import SMEM_RESERVED_PER_PROGRAM, GpuSpec
from tilegen.kernels.config import TileConfig, threads_of
from tilegen.model.resources import Resources

TENSOR_MEMORY_COLUMNS = 512
TENSOR_MEMORY_LANES = 128
"""Words of 32 bits in a column of tensor memory, which has as many lanes."""
ROWS_PER_WARP, COLUMNS_PER_WARP = 16, 8
"""Smallest tile that one warp's matrix instructions make."""
MAX_PROGRAMS_PER_SM = 32
MOST_SPILLED = 128
"""Bytes of registers that a thread of a usable kernel may spill: 32 of 255.

Inner loops of kernels compiled for sm_90 have about 5 loads and stores of local memory in 100
instructions where a thread spills 120 bytes, and 7 where it spills 136; at 160 bytes ptxas was seen
to wait for each matrix product before it issues the next.
"""
SPILL_DOUBT = 1.35
"""Factor of the registers of a thread up to which the fit may predict and a config still be
proposed. Among kernels compiled for NVIDIA's architectures 1.0 to 1.3 % of the usable ones lie
above, and 31 to 63 % of those that spill too much (benchmarks/results/footprint.csv): the fit takes
out the hopeless, compiling decides about the others."""
SMEM_DOUBT = 1.1
"""Factor of the limit of shared memory up to which a config may be predicted to need it and still
be compiled by a tuner, or be taken from a record. In the catalogue on four GPUs, configs that are
faster by machine code than the first choice lie below, except for fp32 slices, 3 % faster
(benchmarks/results/machine_code.csv)."""
MORE_DOUBT = {"sm_80": 1.15}
"""Factor of SPILL_DOUBT by register fit; 1 for fits that are not named. Of the dK/dV kernels for
sm_80 that may be used 14 % lie above SPILL_DOUBT and none above 1.15 times as much: operands of
mma.sync are read again from shared memory where registers are short, which the fit does not know.
Of 106 kernels of the catalogue, 42 become up to 12 % faster on an A100 by their machine code."""
MAX_WARPS_PER_SM = {"sm_": 48, "gfx": 32}
"""Warps of an SM that run at once, each of 64 (AMD) or 32 threads; some parts hold 64 warps, but
registers end sooner."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Resources that one program needs, and its limits."""

    smem_bytes: int
    registers: int
    """32-bit registers of a thread, had it no limit."""
    columns: int
    """Columns of tensor memory; 0 where there is none."""
    max_registers: int
    """Registers that a thread may have."""
    more_doubt: float = 1.0
    """See MORE_DOUBT."""

    @property
    def spill_bytes(self) -> int:
        """Bytes of local memory that a thread is predicted to spill into."""
        return 4 * max(0, self.registers - self.max_registers)

    @property
    def surely_spills(self) -> bool:
        """True where even a fit that errs on the high side means more than a usable kernel may
        spill."""
        return self.registers > self.more_doubt * SPILL_DOUBT * self.max_registers

    def as_compiled(self, used: Resources) -> Footprint:
        """Return the footprint with the resources that the compiler reports."""
        registers = used.registers
        if used.spill_bytes:
            registers = self.max_registers + -(-used.spill_bytes // 4)
        return replace(self, registers=registers, smem_bytes=used.shared_bytes)

    def fits(self, gpu: GpuSpec) -> bool:
        """True for a program that can run at all, by prediction."""
        return self._fits(gpu, 1.0)

    def may_fit(self, gpu: GpuSpec) -> bool:
        """True for a program that may be able to run: predictions err on the large side."""
        return self._fits(gpu, SMEM_DOUBT)

    def _fits(self, gpu: GpuSpec, doubt: float) -> bool:
        columns = self.columns <= TENSOR_MEMORY_COLUMNS
        return columns and self.smem_bytes <= doubt * gpu.smem_per_block


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of footprint.toml; the fields are described there."""

    max_registers: int
    registers_per_sm: int
    rows_in_place: int
    kept_leave: bool
    tensor_memory: bool
    pipelines: bool
    smem_overhead: int
    once_more: dict[str, float]
    more_doubt: float
    """See MORE_DOUBT."""
    registers: dict[str, tuple[float, ...]]
    """Coefficients of `footprint.register_features`, for 16-bit and for fp32 operands."""


def max_registers(arch: str, num_warps: int) -> int:
    """Return the most registers that one thread of a program may have."""
    rules = family(arch)
    return min(rules.max_registers, rules.registers_per_sm // threads_of(arch, num_warps))


def residents(needs: Footprint, gpu: GpuSpec, config: TileConfig) -> int:
    """Return how many programs share an SM; at least 1."""
    rules = family(gpu.arch)
    registers = min(needs.registers, rules.max_registers) * threads_of(gpu.arch, config.num_warps)
    limits = [
        gpu.smem_per_sm // (needs.smem_bytes + SMEM_RESERVED_PER_PROGRAM),
        gpu.registers_per_sm // max(registers, 1),
        MAX_WARPS_PER_SM[gpu.arch[:3]] // config.num_warps,
        MAX_PROGRAMS_PER_SM,
    ]
    if needs.columns:  # allocated in powers of two, at least 32
        limits.append(TENSOR_MEMORY_COLUMNS // max(32, 1 << (needs.columns - 1).bit_length()))
    return max(1, min(limits))


MAX_UNROLLED = 1800
"""Multiply-adds of one fp32 product in a thread; beyond, the compiler spills thousands of bytes."""


@cache
def family(arch: str) -> Family:
    """Return the rules of an architecture; an unknown one takes those of the nearest older one."""
    rules: dict[str, dict[str, Any]] = {
        name: row for row in _table("footprint.toml")["family"] for name in row["architectures"]
    }
    row = rules[nearest(arch, rules)]
    fits: dict[str, dict[str, list[float]]] = _table("registers.toml")["architecture"]
    fit = nearest(arch, fits)
    registers = {name: tuple(values) for name, values in fits[fit].items()}
    fields = {name: row[name] for name in Family.__dataclass_fields__ if name in row}
    return Family(**fields, registers=registers, more_doubt=MORE_DOUBT.get(fit, 1.0))


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((files("tilegen.model") / name).read_text(encoding="utf-8"))
