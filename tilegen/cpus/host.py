"""This machine's processor, as the system describes it."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from functools import cache
from pathlib import Path

from tilegen.cpus.spec import CpuSpec, Identity, spec_for

CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@cache
def current_cpu() -> CpuSpec:
    """Return this machine's processor with the catalogue's sizes and rates, which choices use: they
    must not depend on a machine's load, or on what its hypervisor says of caches."""
    from tilegen.cpu.target import host, processor

    return spec_for(identity_of(read(CPUINFO)), host().name, processor())


def with_own_sizes(spec: CpuSpec, caches: Path = CACHES) -> CpuSpec:
    """Return a processor with the sizes of caches that the system reports for this machine."""
    sizes: dict[str, int] = {}
    for folder in sorted(caches.glob("index*")):
        level, kind = read(folder / "level").strip(), read(folder / "type").strip()
        text = read(folder / "size").strip().removesuffix("K")
        if kind != "Instruction" and level in ("1", "2", "3") and text.isdecimal():
            sizes[f"l{level}_bytes"] = 1024 * int(text)
    return replace(spec, **sizes)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Return the size of this machine's memory [bytes]."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def identity_of(cpuinfo: str) -> Identity:
    """Return the identity of the first processor that /proc/cpuinfo describes."""
    first = cpuinfo.partition("\n\n")[0]
    pairs = (line.partition(":")[::2] for line in first.splitlines())
    fields = {name.strip().lower(): value.strip() for name, value in pairs}
    if "vendor_id" in fields:
        vendor, family, model = fields["vendor_id"], "cpu family", "model"
    else:
        vendor = fields.get("cpu implementer", platform.machine())
        family, model = "cpu architecture", "cpu part"
    return Identity(vendor, _number(fields.get(family, "")), _number(fields.get(model, "")))


def read(path: Path) -> str:
    """Read a file of the system; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return 0
