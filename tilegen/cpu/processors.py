"""Processors that kernels are compiled for ahead of time, and the features that they need.

Features are named as in Linux's /proc/cpuinfo, so that a machine without LLVM, and a program in
another language, can check them. LLVM may use all features of a processor, so all of them that code
of a kernel could contain are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tilegen.cpu.target import AVX2, AVX512, AVX512_BF16, NEON_BF16, SSE2, Target

CPUINFO = Path("/proc/cpuinfo")
_FEATURES = ("flags", "Features")
"""Names of the lines of CPUINFO that list features, on x86 and on Arm."""
_V3 = "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
_ZEN4 = (
    f"{_V4} avx512ifma avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq "
    "avx512_bf16 gfni sse4a"
)
_NEOVERSE_V2 = (
    "asimd fphp asimdhp asimdrdm asimddp asimdfhm atomics fcma jscvt crc32 lrcpc ilrcpc flagm "
    "sve sve2 svebitperm i8mm svei8mm bf16 svebf16 frint"
)


@dataclass(frozen=True, kw_only=True)
class Processor:
    """A processor, or a level of an instruction set, that kernels are compiled for."""

    name: str
    """Name of the architecture, as LLVM and compilers for C have it: x86-64-v3, znver4."""
    target: Target
    features: tuple[str, ...]
    """Features that a machine must have, as CPUINFO names them."""
    emulation: str
    """Name that linkers have for the format of the object files."""
    triple: str
    """Prefix of cross tools, such as aarch64-linux-gnu."""


def _x86(name: str, target: Target, features: str) -> Processor:
    return Processor(
        name=name,
        target=replace(target, cpu=name),
        features=tuple(features.split()),
        emulation="elf_x86_64",
        triple="x86_64-linux-gnu",
    )


PROCESSORS = {
    processor.name: processor
    for processor in (
        Processor(
            name="neoverse-v2",
            target=replace(NEON_BF16, cpu="neoverse-v2"),
            features=tuple(_NEOVERSE_V2.split()),
            emulation="aarch64linux",
            triple="aarch64-linux-gnu",
        ),
        _x86("znver4", AVX512_BF16, _ZEN4),
        _x86("x86-64-v4", AVX512, _V4),
        _x86("x86-64-v3", AVX2, _V3),
        _x86("x86-64", SSE2, "sse2"),
    )
}
"""Processors by name. Of several that a machine can run, the first is the best."""


@dataclass(frozen=True, kw_only=True)
class OnCpu:
    """Facts about a kernel in a shared object that a launch needs."""

    features: tuple[str, ...]
    """Features of the processor, as /proc/cpuinfo names them."""
    scratch_bytes: int
    """Scratch memory of a thread [bytes]; it begins at a multiple of 64."""
    written: tuple[str, ...]
    """Arguments through which the kernel writes. Their memory must overlap with no other
    argument's."""
    added: tuple[str, ...]
    """Arguments in `written` that the kernel only adds to. Threads add to copies of them, which
    the launch adds in order."""


@cache
def host_features() -> frozenset[str]:
    """Return the features that every core of this machine has; empty if the system does not list
    them."""
    if not CPUINFO.is_file():
        return frozenset()
    lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    listed = (line.partition(":") for line in lines)
    cores = [frozenset(words.split()) for name, _, words in listed if name.strip() in _FEATURES]
    return frozenset.intersection(*cores) if cores else frozenset()


def missing(features: Sequence[str]) -> list[str]:
    """Return the features that this machine lacks, in the given order."""
    return [feature for feature in features if feature not in host_features()]


def runs_here(name: str) -> bool:
    """Check whether this machine runs code compiled for a processor."""
    return name in PROCESSORS and not missing(PROCESSORS[name].features)
