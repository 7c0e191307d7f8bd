"""The entry of a table that stands for an architecture the table does not name."""

from __future__ import annotations

from collections.abc import Collection


def nearest(arch: str, known: Collection[str]) -> str:
    """Return `arch` if known, else the newest older one of the same vendor, else the oldest."""
    if arch in known:
        return arch
    vendor = arch[:3]
    same = sorted((name for name in known if name[:3] == vendor), key=_number) or sorted(known)
    older = [name for name in same if _number(name) <= _number(arch)]
    return older[-1] if older else same[0]


def on_tensor_cores(dtype: str, arch: str) -> bool:
    """True where matrix products of a dtype run on an architecture's tensor cores.

    NVIDIA's tensor cores take bf16 from sm_80 on; IEEE fp32 runs on none. Other products are made
    of fp32 multiply-adds.
    """
    return dtype == "fp16" or (
        dtype == "bf16" and not (arch.startswith("sm_") and _number(arch) < 80)
    )


def _number(arch: str) -> int:
    """Return 90 for `sm_90`; `gfx90a` counts in hexadecimal, so that 90a comes before 942."""
    digits = arch[3:].lstrip("_")
    return int(digits, 16 if arch.startswith("gfx") else 10)
