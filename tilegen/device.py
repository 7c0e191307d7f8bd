"""What a GPU and a processor have in common: `Device`, the place that kernels are chosen for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Device:
    """The properties of a device that records and families depend on."""

    name: str
    """Catalogue key, such as `h200` or `zen5`; also the folder of the device's tuning records."""
    title: str
    """Full name, such as `NVIDIA H200 SXM`."""
    arch: str
    """Architecture that kernels are compiled for: `sm_90`, `gfx942`; of a processor the target,
    such as `avx512bf16`."""
    source: str
    """Sources of the numbers, and which of the numbers are estimates."""
