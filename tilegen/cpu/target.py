"""Processors for which kernels are compiled."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tilegen.errors import InvalidProblem

X86_TRIPLE = "x86_64-unknown-linux-gnu"
ARM_TRIPLE = "aarch64-unknown-linux-gnu"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A processor as the compiler sees it: vectors, products, conversions."""

    name: str
    """avx512bf16, avx512, avx2, sse2, neon or neonbf16."""
    triple: str = X86_TRIPLE
    cpu: str = "generic"
    """LLVM's name of the processor."""
    features: str = ""
    """LLVM's list of features, such as +avx2,+fma."""
    lanes: int
    """fp32 elements of a vector."""
    rows: int = 6
    """Rows of a microkernel."""
    vectors: int = 2
    """Vectors of a microkernel's row, a power of two as widths of tiles are; rows x vectors
    accumulators stay in registers."""
    unroll: int = 4
    """Steps of a microkernel's loop that are unrolled."""
    fma: bool = True
    rounds: bool = True
    """True: one instruction rounds to an integer."""
    halves: bool = True
    """True: instructions convert between fp16 and fp32."""
    pairs: str = ""
    """Instruction that multiplies pairs of bf16 and adds to fp32: x86 (vdpbf16ps), arm (bfdot) or
    emulated (the same data layout in plain fp32, for tests of that layout on any machine)."""
    masked16: bool = False
    """True: one instruction loads or stores 16-bit elements under a mask."""
    scalef: bool = False
    """True: vscalefps multiplies by a power of two."""
    amx: bool = False
    """True: products of bf16 use AMX if they divide into whole tiles."""
    level: int = 2
    """LLVM's level of code generation. Level 0, for tests of results, halves the compile time and
    gives slower kernels."""

    def __post_init__(self) -> None:
        """Raise InvalidProblem for a number of vectors that does not divide widths of tiles."""
        if self.vectors < 1 or self.vectors & (self.vectors - 1):
            raise InvalidProblem(
                "vectors of a target must be a power of two, since they divide tiles whose widths "
                f"are; got {self.vectors}"
            )

    @property
    def key(self) -> str:
        """A text that contains everything that the machine code depends on."""
        return f"{self.name} {self.triple} {self.cpu} {self.features} O{self.level}"


AVX512 = Target(
    name="avx512",
    cpu="skylake-avx512",
    lanes=16,
    rows=4,
    vectors=4,
    masked16=True,
    scalef=True,
)
AVX512_BF16 = Target(
    name="avx512bf16",
    cpu="cooperlake",
    lanes=16,
    rows=4,
    vectors=4,
    pairs="x86",
    masked16=True,
    scalef=True,
)
AMX = Target(
    name="amx",
    cpu="sapphirerapids",
    lanes=16,
    rows=4,
    vectors=4,
    pairs="x86",
    masked16=True,
    scalef=True,
    amx=True,
)
"""Compiled in tests only: no machine has run it."""
AVX2 = Target(name="avx2", cpu="haswell", lanes=8)
SSE2 = Target(name="sse2", cpu="x86-64", lanes=4, rows=4, fma=False, rounds=False, halves=False)
NEON = Target(name="neon", triple=ARM_TRIPLE, cpu="neoverse-n1", lanes=4, rows=4, vectors=4)
NEON_BF16 = Target(
    name="neonbf16",
    triple=ARM_TRIPLE,
    cpu="neoverse-v1",
    lanes=4,
    rows=4,
    vectors=4,
    pairs="arm",
)
TARGETS = {
    target.name: target for target in (AMX, AVX512_BF16, AVX512, AVX2, SSE2, NEON, NEON_BF16)
}


@cache
def host() -> Target:
    """Return this machine's processor, as LLVM detects it."""
    import llvmlite.binding as llvm

    triple = llvm.get_process_triple()
    features = llvm.get_host_cpu_features()
    has = {name for name, present in features.items() if present}
    if triple.startswith(("aarch64", "arm64")):
        base = NEON_BF16 if "bf16" in has else NEON
    elif {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= has:
        base = AVX512_BF16 if "avx512bf16" in has else AVX512
    elif {"avx2", "fma", "f16c"} <= has:
        base = AVX2
    else:
        base = SSE2
    values = vars(base) | {
        "triple": triple,
        "cpu": llvm.get_host_cpu_name(),
        "features": features.flatten(),
    }
    if base is SSE2:  # further features of an old processor must not change the layout of vectors
        values |= {"cpu": "x86-64", "features": ""}
    return Target(**values)


def processor() -> str:
    """Return the name of this machine's processor, as the system reports it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
