"""The circumstances of a measurement: versions, machine, date."""

from __future__ import annotations

import hashlib
import platform
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import InvalidVersion, Version

from tilegen.device import ONE_THREAD, Device
from tilegen.version import __version__


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Versions that a measurement was taken with; empty if unknown."""

    tilegen: str = ""
    torch: str = ""
    triton: str = ""
    cuda: str = ""
    """Version of CUDA that PyTorch was built for; of HIP on AMD."""
    driver: str = ""
    """Version of the GPU's driver; of llvmlite for times on a processor."""


@cache
def current_versions() -> Versions:
    """Collect the versions in this process."""
    import torch

    return Versions(
        tilegen=__version__,
        torch=str(torch.__version__),
        triton=installed("triton") or installed("pytorch-triton-rocm"),
        cuda=str(torch.version.cuda or torch.version.hip or ""),
        driver=_driver(),
    )


def versions_for(device: Device) -> Versions:
    """Collect the versions that times on a device depend on. On a processor LLVM compiles, which
    llvmlite brings."""
    versions = current_versions()
    if device.policy == ONE_THREAD:
        return replace(versions, cuda="", driver=installed("llvmlite"))
    return versions


@cache
def this_machine() -> str:
    """Return twelve hexadecimal digits that identify this machine without naming it."""
    try:
        identity = Path("/etc/machine-id").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):  # containers often lack the file
        identity = ""
    return hashlib.sha256(f"{platform.node()}\n{identity}".encode()).hexdigest()[:12]


@lru_cache(maxsize=1024)
def release_order(text: str) -> tuple[bool, Version]:
    """Return a sort key for versions by PEP 440: release candidates come before their releases.

    A suffix outside PEP 440, as in 6.2.4-dd7f, is ignored. Texts without a number come first.
    """
    public = text.partition("+")[0]
    try:
        return True, Version(public)
    except InvalidVersion:
        digits = re.match(r"[0-9]+(\.[0-9]+)*", public)
        return digits is not None, Version(digits[0] if digits else "0")


def now() -> str:
    """Return the present time in the form of a record's date."""
    return _text(datetime.now(UTC))


def is_credible(date: str) -> bool:
    """Return True if a record's date is at most a day ahead of this machine's clock."""
    return date <= _text(datetime.now(UTC) + timedelta(days=1))


def second_after(date: str) -> str:
    """Return the date one second after `date`."""
    return _text(datetime.fromisoformat(date) + timedelta(seconds=1))


def _text(when: datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def installed(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _driver(kernel_module: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of the NVIDIA driver; empty if there is no driver."""
    try:
        match = re.search(r"\b\d{3,4}\.\d+(\.\d+)?\b", kernel_module.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError):
        return ""
    return match[0] if match else ""
