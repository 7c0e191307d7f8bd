"""Properties of processors: `CpuSpec` and the catalogue in cpus.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, ClassVar

from tilegen.device import ONE_THREAD, Device
from tilegen.errors import Unsupported, did_you_mean

PAIRED = ("avx512bf16", "amx", "neonbf16")
"""Targets that multiply bf16; others multiply in fp32."""
_TYPICAL = {
    "amx": "sapphire-rapids",
    "avx512bf16": "zen4",
    "avx512": "ice-lake",
    "avx2": "zen3",
    "sse2": "zen3",
    "neonbf16": "neoverse-v2",
    "neon": "neoverse-v2",
}
"""The processor whose rates a processor with a target has, where the catalogue has no row for
it."""


@dataclass(frozen=True, kw_only=True)
class CpuSpec(Device):
    """The properties of a processor that the choice of tiles depends on. Rates are of one core."""

    lanes: int
    """fp32 elements of a vector."""
    l1_bytes: int
    """Size of a core's L1 cache of data [bytes]."""
    l2_bytes: int
    """Size of a core's L2 cache [bytes]."""
    l3_bytes: int
    """Size of the L3 cache that cores share [bytes]."""
    product_flops_32: float
    """Matrix products of fp32 [flop/s]."""
    product_flops_16: float
    """Matrix products of bf16 with fp32 sums [flop/s]; fp32's rate where they run in fp32."""
    exp2_rate: float
    """Exponentials to base 2 [1/s]."""
    l2_bandwidth: float
    """Rate at which a core reads from L2 [bytes/s]."""
    l3_bandwidth: float
    """Rate at which a core reads from L3 [bytes/s]."""
    dram_bandwidth: float
    """Rate at which a core reads from memory [bytes/s]."""
    policy: ClassVar[str] = ONE_THREAD
    measured: bool
    """True: the rates were measured. False: they are computed from documents, or estimates."""

    @property
    def on_chip_bytes(self) -> int:
        """Fast memory, the `M` of the bounds: a core's L2 [bytes]."""
        return self.l2_bytes

    @property
    def pairs(self) -> bool:
        """Whether instructions multiply bf16."""
        return self.arch in PAIRED

    def product_flops(self, dtype: str) -> float:
        """Return the rate of matrix products of a dtype [flop/s]. fp16 is converted to fp32."""
        return self.product_flops_16 if dtype == "bf16" and self.pairs else self.product_flops_32


@dataclass(frozen=True)
class Identity:
    """The numbers by which a processor names itself."""

    vendor: str
    """Vendor of an x86 processor; implementer of an Arm core, in hexadecimal digits."""
    family: int
    model: int


def cpu(name: str) -> CpuSpec:
    """Look up a processor in the catalogue. Raises Unsupported."""
    rows = {spec.name: spec for spec in catalogue()}
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    if key not in rows:
        raise Unsupported(
            f"processor must be one of {', '.join(rows)}; got {name!r}{did_you_mean(key, rows)}"
        )
    return rows[key]


def catalogue() -> tuple[CpuSpec, ...]:
    """Return the processors of cpus.toml."""
    return tuple(spec for spec, _ in _rows())


def spec_for(identity: Identity, arch: str, title: str) -> CpuSpec:
    """Return the catalogue's numbers for a processor and the target it compiles for.

    A processor without a row has the rates of a typical processor with its target, and its numbers
    in its name. So has a processor whose hypervisor hides instructions: it has another name, since
    its records are of another target.
    """
    base = next((spec for spec, ids in _rows() if _matches(identity, ids)), None)
    if base is not None and base.arch == arch:
        return base
    typical = cpu(_TYPICAL.get(arch, "zen3"))
    numbers = f"{identity.vendor}-{identity.family}-{identity.model}".lower()
    name = f"{base.name}-{arch}" if base else f"{numbers}-{arch}"
    why = f"compiles for {arch}" if base else "not in cpus.toml"
    rate = {"sse2": 0.5}.get(arch, 1.0)
    return replace(
        typical,
        name=name,
        title=title,
        arch=arch,
        lanes=4 if arch == "sse2" else typical.lanes,
        product_flops_32=rate * typical.product_flops_32,
        product_flops_16=typical.product_flops_16 if arch in PAIRED else typical.product_flops_32,
        exp2_rate=rate * typical.exp2_rate,
        measured=False,
        source=f"{why}: rates of {typical.title}",
    )


def spec_of_target(cpu_name: str, arch: str) -> CpuSpec:
    """Return the numbers for a processor that kernels are compiled for, by LLVM's name.

    They are those of the catalogue, or of a typical processor with its target.
    """
    row = _OF_LLVM.get(cpu_name, cpu_name)
    if any(row == spec.name for spec in catalogue()):
        return cpu(row)
    return spec_for(Identity(cpu_name, 0, 0), arch, cpu_name)


_OF_LLVM = {
    "znver5": "zen5",
    "znver4": "zen4",
    "znver3": "zen3",
    "sapphirerapids": "sapphire-rapids",
}


def _matches(identity: Identity, ids: list[Any]) -> bool:
    for vendor, family, models in ids:
        if (vendor, family) != (identity.vendor, identity.family):
            continue
        if not models or models[0] <= identity.model <= models[-1]:
            return True
    return False


@cache
def _rows() -> tuple[tuple[CpuSpec, list[Any]], ...]:
    """Load the catalogue: each row, with the identities of its processors."""
    table = tomllib.loads((files("tilegen.cpus") / "cpus.toml").read_text(encoding="utf-8"))
    rows: list[tuple[CpuSpec, list[Any]]] = []
    for row in table["cpu"]:
        ids = row.pop("ids")
        rows.append((CpuSpec(**row), ids))
    return tuple(rows)
