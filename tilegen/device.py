"""`Device`: the properties that GPUs and processors share, and that kernels are chosen for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

COLD_L2 = "cold_l2"
"""Name of the timing method on GPUs: the median of single launches between two events on the
stream, with L2 cleared before each launch."""
ONE_THREAD = "one_thread"
"""Name of the timing method on processors: the median of single launches on one thread, by the
thread's own clock, alternating with launches of the best config so far."""


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
    policy: ClassVar[str] = COLD_L2
    """Name of the timing method; records keep the times of different methods apart."""

    @property
    def on_chip_bytes(self) -> int:
        """Fast memory, the `M` of the bounds [bytes]."""
        raise NotImplementedError

    @property
    def memories(self) -> int:
        """Number of such memories, the `P` of the bounds."""
        return 1
