"""The circumstances of a measurement: versions, machine, date."""

from __future__ import annotations

import hashlib
import platform
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import InvalidVersion, Version

from tilegen.version import __version__


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Versions that a measurement was taken with; an empty text is "not known"."""

    tilegen: str = ""
    torch: str = ""
    triton: str = ""
    cuda: str = ""
    """Version that PyTorch was built for (CUDA, or HIP on AMD)."""
    driver: str = ""
    sympy: str = ""
    """Version of SymPy, which spells masks and scores canonically: no timing depends on it."""


@cache
def current_versions() -> Versions:
    """Return the versions in this process."""
    import torch

    return Versions(
        tilegen=__version__,
        torch=str(torch.__version__),
        triton=installed("triton") or installed("pytorch-triton-rocm"),
        cuda=str(torch.version.cuda or torch.version.hip or ""),
        driver=_driver(),
        sympy=installed("sympy"),
    )


@cache
def this_machine() -> str:
    """Return twelve hexadecimal digits that stand for this machine and do not name it."""
    try:
        identity = Path("/etc/machine-id").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):  # containers often have none, or one in common
        identity = ""
    return hashlib.sha256(f"{platform.node()}\n{identity}".encode()).hexdigest()[:12]


@lru_cache(maxsize=1024)
def release_order(text: str) -> tuple[bool, Version]:
    """Return the place of a version among others, by PEP 440: a candidate comes before its release.

    What follows the numbers is left out where PEP 440 does not know it, as in 6.2.4-dd7f; what has
    no numbers comes first.
    """
    public = text.partition("+")[0]
    try:
        return True, Version(public)
    except InvalidVersion:
        digits = re.match(r"[0-9]+(\.[0-9]+)*", public)
        return digits is not None, Version(digits[0] if digits else "0")


def now() -> str:
    """Return the time as a record's date."""
    return _text(datetime.now(UTC))


def is_credible(date: str) -> bool:
    """True for a record's date that is at most a day ahead of this machine's clock."""
    return date <= _text(datetime.now(UTC) + timedelta(days=1))


def second_after(date: str) -> str:
    """Return the date a second later than `date`."""
    return _text(datetime.fromisoformat(date) + timedelta(seconds=1))


def _text(when: datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def installed(package: str) -> str:
    """Return the version of a package, an empty text if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _driver(kernel_module: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the NVIDIA driver's version, or an empty text where there is none."""
    try:
        found = re.search(r"\b\d{3,4}\.\d+(\.\d+)?\b", kernel_module.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError):
        return ""
    return found[0] if found else ""
