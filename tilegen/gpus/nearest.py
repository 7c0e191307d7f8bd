"""Stand-ins for architectures that a table does not contain."""

from __future__ import annotations

from collections.abc import Collection


def nearest(arch: str, known: Collection[str]) -> str:
    """Return `arch` if it is known, or else the newest older architecture, or else the oldest.

    Only architectures of the same vendor count, if any is known.
    """
    if arch in known:
        return arch
    vendor = arch[:3]
    same = sorted((name for name in known if name[:3] == vendor), key=_number) or sorted(known)
    older = [name for name in same if _number(name) <= _number(arch)]
    return older[-1] if older else same[0]


def on_tensor_cores(dtype: str, arch: str) -> bool:
    """Return True if matrix products of a dtype run on an architecture's tensor cores.

    NVIDIA's tensor cores support bf16 from sm_80 on, and no tensor cores support IEEE fp32. Other
    products are computed by fp32 multiply-adds.
    """
    return dtype == "fp16" or (
        dtype == "bf16" and not (arch.startswith("sm_") and _number(arch) < 80)
    )


def _number(arch: str) -> int:
    """Return 90 for `sm_90`. AMD's numbers are hexadecimal, so gfx90a comes before gfx942."""
    digits = arch[3:].lstrip("_")
    return int(digits, 16 if arch.startswith("gfx") else 10)
