"""Memory of this process: what is in use, its peak, and a limit for what it may still take."""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path

import torch

GIB = 2**30


def available() -> int:
    """Return the memory of this machine that processes may still take [bytes]."""
    return _kibibytes("/proc/meminfo", "MemAvailable") * 1024


def in_use(device: str) -> int:
    """Return the memory in use by this process, or by tensors on a GPU [bytes]."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    return _kibibytes("/proc/self/status", "VmRSS") * 1024


def peak(device: str) -> int:
    """Return the most that was in use since `start_over` [bytes]."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return _kibibytes("/proc/self/status", "VmHWM") * 1024


def start_over(device: str) -> None:
    """Give back what is free, and begin a new peak."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again


def limit(more: float, device: str) -> None:
    """Let this process take at most `more` bytes beyond what it has.

    Allocations beyond the limit fail, so that neither the machine nor a neighbour is affected.
    """
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, more / total))
        return
    have = _kibibytes("/proc/self/status", "VmSize") * 1024
    most = int(have + more)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _kibibytes(path: str, name: str) -> int:
    with Path(path).open(encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{name}:"))
