"""Resources of an SM for its programs, and limits of a program: rules by family of architectures.

The rules are calibrated against the compiler's reports. footprint.toml holds rules about shared
memory, registers.toml a fit of registers, made by `python -m benchmarks.calibrate_footprint`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache, reduce
from importlib.resources import files
from typing import Any

import numpy as np

from tilegen.gpus.nearest import nearest
from tilegen.gpus.spec import SMEM_RESERVED_PER_PROGRAM, GpuSpec
from tilegen.kernels.config import TileConfig, threads_of
from tilegen.model.columns import Number, picked
from tilegen.model.resources import Resources

TENSOR_MEMORY_COLUMNS = 512
TENSOR_MEMORY_LANES = 128
"""Words of 32 bits in a column of tensor memory, one per lane."""
ROWS_PER_WARP, COLUMNS_PER_WARP = 16, 8
"""Smallest tile that matrix instructions of one warp compute."""
MAX_PROGRAMS_PER_SM = 32
MOST_SPILLED = 128
"""Bytes of registers that a thread of a usable kernel may spill: 32 of 255 registers.

Of 100 instructions in inner loops of kernels compiled for sm_90, about 5 load or store local memory
if a thread spills 120 bytes, and 7 if it spills 136. At 160 bytes ptxas was observed to wait for
each matrix product before it issues the next.
"""
SPILL_DOUBT = 1.35
"""A config whose predicted registers exceed the limit of a thread by more than this factor is not
proposed. Of the kernels compiled for NVIDIA's architectures, 1.0 to 1.3 % of the usable ones lie
above, and 31 to 63 % of those that spill too much (benchmarks/results/footprint.csv). The fit
removes the hopeless configs; compiling decides about the others."""
SMEM_DOUBT = 1.1
"""A config whose predicted shared memory exceeds the limit by more than this factor is neither
compiled by a tuner nor taken from a record. In the catalogue on four GPUs, configs that are faster
by machine code than the first choice lie below, except for fp32 slices, 3 % faster
(benchmarks/results/machine_code.csv)."""
MORE_DOUBT = {"sm_80": 1.15}
"""Factor of SPILL_DOUBT by register fit, 1 by default. Of the usable dK/dV kernels for sm_80, 14 %
lie above SPILL_DOUBT and none above 1.15 times as much. The fit does not know that operands of
mma.sync are read again from shared memory if registers are short. Of 106 kernels of the catalogue,
42 become up to 12 % faster on an A100 by their machine code."""
MAX_WARPS_PER_SM = {"sm_": 48, "gfx": 32}
"""Warps that run on an SM at once, of 64 (AMD) or 32 threads. Some parts hold 64 warps, but run out
of registers before."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Resources that a program needs, and its limits."""

    smem_bytes: Number
    registers: Number
    """32-bit registers of a thread without a limit."""
    columns: Number
    """Columns of tensor memory; 0 if there is none."""
    max_registers: Number
    """Most registers of a thread."""
    more_doubt: float = 1.0
    """See MORE_DOUBT."""

    @property
    def spill_bytes(self) -> Number:
        """Local memory that a thread is predicted to spill to [bytes]."""
        return 4 * (self.registers - self.max_registers) * (self.registers > self.max_registers)

    @property
    def surely_spills(self) -> bool:
        """True if a thread spills more than a usable kernel may, even if the fit errs by
        SPILL_DOUBT."""
        return self.registers > self.more_doubt * SPILL_DOUBT * self.max_registers

    def as_compiled(self, used: Resources) -> Footprint:
        """Return this footprint with the compiler's numbers."""
        registers = used.registers
        if used.spill_bytes:
            registers = self.max_registers + -(-used.spill_bytes // 4)
        return replace(self, registers=registers, smem_bytes=used.shared_bytes)

    def fits(self, gpu: GpuSpec) -> bool:
        """Check whether a program is predicted to fit."""
        return self._fits(gpu, 1.0)

    def may_fit(self, gpu: GpuSpec) -> bool:
        """Check whether a program may fit; predictions tend to be too large."""
        return self._fits(gpu, SMEM_DOUBT)

    def _fits(self, gpu: GpuSpec, doubt: float) -> bool:
        columns = self.columns <= TENSOR_MEMORY_COLUMNS
        return columns & (self.smem_bytes <= doubt * gpu.smem_per_block)


@dataclass(frozen=True, kw_only=True)
class UnitsOfFamily:
    """A family of footprint.toml, which describes the fields."""

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
    """Return the most registers that a thread of a program may have."""
    rules = family(arch)
    registers = rules.registers_per_sm // threads_of(arch, num_warps)
    return picked(np.minimum(rules.max_registers, registers), ...)


def residents(needs: Footprint, gpu: GpuSpec, config: TileConfig) -> int:
    """Count the programs that share an SM; at least 1."""
    rules = family(gpu.arch)
    held: Any = np.minimum(needs.registers, rules.max_registers)
    registers: Any = np.maximum(1, held * threads_of(gpu.arch, config.num_warps))
    bits: Any = np.frexp(np.maximum(needs.columns - 1, 1))[1]
    columns = np.maximum(32, 1 << bits)  # allocated in powers of two from 32 on
    limits = [
        gpu.smem_per_sm // (needs.smem_bytes + SMEM_RESERVED_PER_PROGRAM),
        gpu.registers_per_sm // registers,
        MAX_WARPS_PER_SM[gpu.arch[:3]] // config.num_warps,
        np.where(needs.columns, TENSOR_MEMORY_COLUMNS // columns, MAX_PROGRAMS_PER_SM),
        MAX_PROGRAMS_PER_SM,
    ]
    return picked(np.maximum(1, reduce(np.minimum, limits)), ...)


MAX_UNROLLED = 1800
"""Multiply-adds of an fp32 product in a thread, above which the compiler spills thousands of
bytes."""


@cache
def family(arch: str) -> UnitsOfFamily:
    """Return the rules of an architecture, or of the nearest older one if it is unknown."""
    rules: dict[str, dict[str, Any]] = {
        name: row for row in _table("footprint.toml")["family"] for name in row["architectures"]
    }
    row = rules[nearest(arch, rules)]
    fits: dict[str, dict[str, list[float]]] = _table("registers.toml")["architecture"]
    fit = nearest(arch, fits)
    registers = {name: tuple(values) for name, values in fits[fit].items()}
    fields = {name: row[name] for name in UnitsOfFamily.__dataclass_fields__ if name in row}
    return UnitsOfFamily(**fields, registers=registers, more_doubt=MORE_DOUBT.get(fit, 1.0))


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((files("tilegen.model") / name).read_text(encoding="utf-8"))
