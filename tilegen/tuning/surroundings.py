"""Surroundings of a measurement: the clock of a GPU, and what other processes did meanwhile.

What cannot be read is unknown, and never counts as quiet.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

QUIET_LOAD = 0.5
"""Cores that other processes may use beside a measurement on a processor. One busy thread is 1."""
LEAST_SECONDS = 0.25
"""Shortest time over which a load is computed [s]: the system counts in ticks of 10 ms."""
MOST = 100_000
"""Largest number that a record holds. Drivers answer 2**32 - 1 for what they do not know."""
REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""NVML's reasons for a lower clock, by their bits."""
IDLE = "gpu_idle"
# A fast kernel reaches the power limit by itself, so that the cap says nothing of its surroundings.
HARMLESS = (IDLE, "applications_clocks_setting", "sw_power_cap")
"""Reasons that do not count as throttled."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The clock, the power limit and other processes during a measurement. None is unknown."""

    clock_mhz: int | None = None
    """Clock of the SMs while repeats ran, the median of readings [MHz]."""
    throttled: tuple[str, ...] | None = None
    """NVML's reasons for a lower clock while repeats ran, in order."""
    power_limit_w: int | None = None
    """Power limit of the GPU [W]."""
    others: int | None = None
    """Number of other processes on the GPU."""
    load: float | None = None
    """Cores of the processor that other processes used meanwhile, in the mean."""

    @property
    def is_quiet(self) -> bool | None:
        """True if nothing disturbed the measurement, False if something did, None if unknown."""
        if self.others or self.slowed or (self.load or 0.0) > QUIET_LOAD:
            return False
        is_known = None not in (self.others, self.throttled) or self.load is not None
        return True if is_known else None

    @property
    def slowed(self) -> tuple[str, ...]:
        """The reasons that count as throttled."""
        return tuple(name for name in self.throttled or () if name not in HARMLESS)

    def __str__(self) -> str:
        known: list[str] = []
        if self.others:
            known.append(f"beside {self.others} other process{'es' * (self.others > 1)}")
        if self.slowed:
            known.append(f"throttled by {' and '.join(self.slowed)}")
        if self.load is not None and self.load > QUIET_LOAD:
            known.append(f"beside a load of {self.load:g} cores")
        quiet = "in quiet" if self.is_quiet else "in unknown surroundings"
        known = known or [quiet]
        if self.clock_mhz is not None:
            known.append(f"at {self.clock_mhz} MHz")
        if self.power_limit_w is not None:
            known.append(f"with a power limit of {self.power_limit_w} W")
        return ", ".join(known)


UNKNOWN = Surroundings()


class OnGpu:
    """Readings on the GPU of this process; nothing is known without NVML, or of other vendors."""

    _gpu: Any = None

    def begin(self) -> None:
        """Forget earlier readings, and count the other processes."""
        self._nvml = _nvml()
        if self._nvml is not None:
            import torch

            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            uuid = getattr(properties, "uuid", None)
            self._gpu = self._ask("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
        self._clocks: list[int] = []
        self._reasons: list[int] = []
        self._others = [self._count()]

    def read(self) -> None:
        """Read clock and reasons, while launches are queued."""
        if self._gpu is None:
            return
        # The name before is that of drivers up to 535.
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", self._gpu)
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", self._gpu)
        if isinstance(reasons, int):
            if reasons & 1:  # the queue had ended
                return
            self._reasons.append(reasons)
        sm_clock = 1
        clock = self._ask("nvmlDeviceGetClockInfo", self._gpu, sm_clock)
        if isinstance(clock, int) and clock <= MOST:
            self._clocks.append(clock)

    def seen(self) -> Surroundings:
        """Return the surroundings since `begin`."""
        if self._gpu is None:
            return UNKNOWN
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit", self._gpu)
        is_limit = isinstance(limit, int) and limit <= 1000 * MOST
        counts = [*self._others, self._count()]
        known = [count for count in counts if count is not None]
        return Surroundings(
            clock_mhz=statistics.median_low(self._clocks) if self._clocks else None,
            throttled=_names(self._reasons) if self._reasons else None,
            power_limit_w=round(limit / 1000) if is_limit else None,
            others=max(known) if len(known) == len(counts) else None,
        )

    def _count(self) -> int | None:
        """Count the other processes on the GPU; None if they cannot be seen."""
        if self._gpu is None or not _sees_all_processes():
            return None
        lists = [
            self._ask(f"nvmlDeviceGet{kind}RunningProcesses", self._gpu)
            for kind in ("Compute", "Graphics")
        ]
        if not all(isinstance(processes, list) for processes in lists):
            return None
        ids = {process.pid for processes in lists for process in processes}
        # A list without this process hides others, too: of a container, or under MPS.
        return len(ids) - 1 if os.getpid() in ids else None

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call a function of NVML; None if it fails, or this version has none of the name."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except Exception:  # NVMLError and others: a measurement never fails for its surroundings
            return None


def _names(readings: Sequence[int]) -> tuple[str, ...]:
    bits = {1 << i for reading in readings for i in range(64) if reading >> i & 1}
    return tuple(REASONS.get(bit, f"reason_{bit:#x}") for bit in sorted(bits))


@cache
def _nvml() -> Any:
    """Load and initialise NVML; None without the extra `nvml`, or without its library."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # ImportError, NVMLError
        return None
    return nvml


@cache
def _sees_all_processes(own: Path = Path("/proc/self/ns/pid")) -> bool:
    """Return True outside of containers: in the first namespace of processes."""
    first = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel
    try:
        return str(own.readlink()) == first
    except OSError:
        return False


@dataclass
class OnCpu:
    """The load of this machine by other processes; unknown where the system does not count it."""

    stat: Path = Path("/proc/stat")
    mounts: Path = Path("/proc/self/mountinfo")
    _marks: list[tuple[float, float, float]] = field(
        default_factory=list[tuple[float, float, float]]
    )

    def begin(self) -> None:
        """Read the processor's clocks before a measurement."""
        self._marks = [*self._marks[-50:], self._mark()]

    def seen(self) -> Surroundings:
        """Return the load since `begin`, or since an earlier `begin` if that is too short ago."""
        now, busy, own = self._mark()
        before = [mark for mark in self._marks if now - mark[0] >= LEAST_SECONDS]
        if not before:
            return UNKNOWN
        then, busy_then, own_then = before[-1]
        seconds, busy, own = now - then, busy - busy_then, own - own_then
        load = (busy - own) / seconds
        # Where fewer cores were busy than this process used, the file shows something else.
        if not busy > 0 or load < -0.2:
            return UNKNOWN
        return Surroundings(load=round(max(0.0, load), 2))

    def _mark(self) -> tuple[float, float, float]:
        """Return the time, and the seconds that all processes and this one used so far."""
        return time.monotonic(), self._busy(), sum(os.times()[:4])

    def _busy(self) -> float:
        """Return the seconds that all cores were busy; NaN if unknown."""
        try:
            # A container's own file (lxcfs) shows the container alone.
            if " /proc/stat " in self.mounts.read_text(encoding="utf-8"):
                return float("nan")
            first = self.stat.read_text(encoding="ascii").split("\n")[0].split()
            user, nice, system, _idle, _wait, *interrupts = map(int, first[1:9])
        except (OSError, ValueError):
            return float("nan")
        return sum((user, nice, system, *interrupts)) / os.sysconf("SC_CLK_TCK")
