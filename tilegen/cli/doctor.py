"""Findings of `tilegen doctor`: versions, GPU, tools and folders of this machine."""

from __future__ import annotations

import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tilegen import cpu, resources
from tilegen.environment import current
from tilegen.errors import TilegenError
from tilegen.gpus.spec import detect
from tilegen.private_files import NotPrivate, check_private
from tilegen.store import Location, list_records, locations
from tilegen.store.versions import installed
from tilegen.units import memory_text, rate_text
from tilegen.version import __version__

PACKAGES = ("torch", "triton", "llvmlite", "numpy", "sympy", "jinja2", "optuna")
OPTIONAL = {
    "cuda-bindings": "bundle",
    "s3fs": "s3",
    "aiohttp": "http",
    "ray": "ray",
    "matplotlib": "plot",
}
"""Optional packages, and the extra of tilegen that installs each."""


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    name: str
    value: str


def examine() -> list[Finding]:
    """List findings about this machine; a problem is a finding, not an error."""
    findings = [Finding("tilegen", __version__), Finding("python", platform.python_version())]
    findings += [
        Finding(name, installed(name) or "missing; install tilegen again") for name in PACKAGES
    ]
    findings += [
        Finding(name, installed(name) or f"not installed; pip install 'tilegen[{extra}]'")
        for name, extra in OPTIONAL.items()
    ]
    if gpu := detect():
        sizes = f"{gpu.num_sms} SMs, {memory_text(gpu.smem_per_block)} of shared memory per program"
        findings.append(Finding("gpu", f"{gpu.title}: {gpu.arch}, {sizes}"))
    else:
        findings.append(Finding("gpu", "none that PyTorch sees"))
    findings.append(Finding("cpu compiler", _cpu_compiler()))
    findings.append(Finding("calls on CPU", _cpu_calls()))
    findings += _processor()
    try:
        findings.append(Finding("templates", str(resources.data_dir("templates"))))
        findings.append(Finding("own directory", _writable(current().cache_dir)))
        findings += [Finding(f"{place.origin} records", _count(place)) for place in locations()]
    except TilegenError as error:
        findings.append(Finding("trouble", str(error)))
    return findings


def _cpu_compiler() -> str:
    """Return the processor that kernels are compiled for, or the reason why none are."""

    if reason := cpu.why_not_compiled():
        return reason
    from tilegen.cpu.target import host, processor

    target = host()
    pairs = ", products of bf16" if target.pairs else ""
    return f"{processor()}: {target.name} ({target.cpu}), {target.lanes} lanes of fp32{pairs}"


def _processor() -> list[Finding]:
    """Describe the processor: catalogue key, caches, memory, and rates measured here."""
    from tilegen.cpus import host

    findings = [Finding("cores", str(host.cores()))]
    if cpu.why_not_compiled():
        return findings
    from tilegen.cpus.rates import measured_cpu

    spec, known = measured_cpu(), host.current_cpu()
    caches = (memory_text(size) for size in (spec.l1_bytes, spec.l2_bytes, spec.l3_bytes))
    sizes = ", ".join(f"{size} of L{level}" for level, size in enumerate(caches, 1))
    memory = memory_text(host.memory_bytes())
    findings.append(Finding("processor", f"{known.name}: {sizes}, {memory} of memory"))
    rates = {
        "products of fp32": (spec.product_flops_32, known.product_flops_32, "flop/s"),
        "products of bf16": (spec.product_flops_16, known.product_flops_16, "flop/s"),
        "exponentials": (spec.exp2_rate, known.exp2_rate, "/s"),
        "reading from L2": (spec.l2_bandwidth, known.l2_bandwidth, "B/s"),
        "reading from L3": (spec.l3_bandwidth, known.l3_bandwidth, "B/s"),
        "reading from memory": (spec.dram_bandwidth, known.dram_bandwidth, "B/s"),
    }
    for name, (here, there, unit) in rates.items():
        rates = rate_text(here, unit), rate_text(there, unit)
        value = f"{rates[0]} a core; the catalogue has {rates[1]}"
        findings.append(Finding(name, value))
    return findings


def _cpu_calls() -> str:
    """Describe how calls on CPU tensors are computed."""

    try:
        reason = cpu.why_not()
    except TilegenError as error:  # a setting that does not exist
        return str(error)
    return f"PyTorch, since {reason}" if reason else "emitted kernels, compiled for this CPU"


def _count(location: Location) -> str:
    listed = list(list_records([location]))
    broken = sum(entry.record is None for entry in listed)
    return f"{len(listed)} in {location.address()}" + (
        f", {broken} of them broken" if broken else ""
    )


def _writable(folder: Path) -> str:
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            check_private(folder / "kernels")
            return str(folder)
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror}); set TILEGEN_CACHE_DIR"
    except NotPrivate as doubt:
        return f"{folder}; {doubt}, so no kernel is imported from there"
