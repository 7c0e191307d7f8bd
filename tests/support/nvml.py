"""A stand-in of NVML, and of the parts of torch.cuda that a timer uses."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilegen.tuning import surroundings
from tilegen.tuning.measure import measure
from tilegen.tuning.surroundings import Surroundings

UUID = "c0ffee00-0000-4000-8000-000000000001"
STRANGER = 2**22 + 1
"""No process has this number: it is above the system's highest."""


class NvmlError(Exception):
    """The error of every function of NVML."""


class Nvml(SimpleNamespace):
    """A stand-in of the module pynvml, for one GPU that this process uses alone."""

    def __init__(self) -> None:
        super().__init__()
        self.compute, self.graphics = [os.getpid()], list[int]()
        self.reasons, self.clocks = itertools.cycle([0x4]), itertools.cycle([1980])
        self.limit, self.fails = 700_000, set[str]()

    def _or_fail(self, name: str, value: Any) -> Any:
        if name in self.fails:
            raise NvmlError("Not Supported")
        return value

    def nvmlInit(self) -> None:
        self._or_fail("nvmlInit", None)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == f"GPU-{UUID}"
        return self._or_fail("nvmlDeviceGetHandleByUUID", "the GPU")

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: str) -> int:
        return self._or_fail("nvmlDeviceGetCurrentClocksEventReasons", next(self.reasons))

    def nvmlDeviceGetClockInfo(self, gpu: str, clock: int) -> int:
        assert (gpu, clock) == ("the GPU", 1)
        return self._or_fail("nvmlDeviceGetClockInfo", next(self.clocks))

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: str) -> int:
        return self._or_fail("nvmlDeviceGetEnforcedPowerLimit", self.limit)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: str) -> list[SimpleNamespace]:
        pids = self._or_fail("nvmlDeviceGetComputeRunningProcesses", self.compute)
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: str) -> list[SimpleNamespace]:
        pids = self._or_fail("nvmlDeviceGetGraphicsRunningProcesses", self.graphics)
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids]


class Buffer:
    def zero_(self) -> None:
        pass


class Event:
    def __init__(self, enable_timing: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 0.25


def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvml]:
    """Install a GPU with NVML, in the system's first namespace of processes."""
    stand_in = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)  # type: ignore
    monkeypatch.setattr(surroundings, "_sees_all_processes", lambda: True)
    surroundings._nvml.cache_clear()
    properties = SimpleNamespace(uuid=UUID, L2_cache_size=2**20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda n, dtype, device: Buffer())
    yield stand_in
    surroundings._nvml.cache_clear()


def measured() -> Surroundings:
    measurement = measure(lambda: None, seconds=0.001)
    assert measurement.median_us == 250.0, measurement
    return measurement.surroundings
