"""The six lines at the head of an explanation: problem, kernel, time, limit, bound, and what would
change the choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilegen.choose.reason import limit_in_words
from tilegen.explaining.explained import OTHER_FAST_MEMORY, ExplainedKernel, moved
from tilegen.gpus.spec import GpuSpec
from tilegen.model import cpu_time
from tilegen.model.estimate import Candidate
from tilegen.model.footprint import footprint
from tilegen.model.time import time
from tilegen.units import bytes_text, memory_text, percent_text, ratio_text, seconds_text

LABELS = ("problem", "kernel", "time", "limit", "bound", "change")
"""The first words of the six lines."""
SAME = 0.0005
"""Part of a time below which two times are called equal."""


def summaries(explained: Sequence[ExplainedKernel]) -> list[str]:
    """Return the six lines of each kernel. The problem, which they share, stands once."""
    lines: list[str] = []
    for i, of in enumerate(explained):
        lines += summary(of) if i == 0 else ["", *summary(of)[1:]]
    return lines


def summary(of: ExplainedKernel) -> list[str]:
    """Return the six lines of a kernel."""
    device, on_gpu = of.tiled.device, isinstance(of.tiled.device, GpuSpec)
    known = f"({device.title})"
    if isinstance(device, GpuSpec):
        known = f"with {memory_text(device.smem_per_block)} of shared memory"
    thread = "" if on_gpu else " on one thread"
    texts = (
        f"{of.tiled.problem.key}, on {device.name} {known}",
        f"{of.kernel} {of.config.key}: {of.tiled.spec.loop.tile(of.config)}",
        f"{seconds_text(of.cost.seconds)} predicted{thread}{_measured(of)}",
        _limit_on_gpu(of) if on_gpu else _limit_on_cpu(of),
        _over_bound(of),
        "; ".join(_changes(of)) or "nothing that was tried",
    )
    return [f"{label:9}{text}" for label, text in zip(LABELS, texts, strict=True)]


def slower(ratio: float) -> str:
    """Describe a ratio of times: `0.3 % slower`."""
    if abs(ratio - 1) < SAME:
        return "as fast"
    return f"{percent_text(abs(ratio - 1))} {'slower' if ratio > 1 else 'faster'}"


def _measured(of: ExplainedKernel) -> str:
    """Return the measured time with all in which the measurement differs; empty without a
    record."""
    if of.measured is None:
        return ""
    record = of.measured.record
    tile = "" if record.config == of.config else f" with {record.config.key}"
    key = record.problem.key
    problem = "" if key == of.tiled.problem.key else f" for '{key}'"
    seconds = 1e-6 * (record.measurement.median_us or 0)
    return f"; {seconds_text(seconds)} measured{tile}{problem}"


def _limit_on_gpu(of: ExplainedKernel) -> str:
    on_sms = float(time(of.tiled, footprint(of.tiled)).on_sms)
    seconds = {**dict(of.cost.terms), "on_sms": on_sms}
    programs, l2, dram = (seconds_text(seconds[name]) for name in ("on_sms", "l2", "dram"))
    limit = limit_in_words(of.tiled, of.cost)
    return f"{limit}: programs take {programs}, traffic {l2} in L2 and {dram} in DRAM"


def _limit_on_cpu(of: ExplainedKernel) -> str:
    limit, seconds = cpu_time.TERMS[of.cost.limit], dict(of.cost.terms)[of.cost.limit]
    if seconds < cpu_time.LAUNCH_SECONDS:
        limit, seconds = "a launch from Python", cpu_time.LAUNCH_SECONDS
    part = percent_text(seconds / of.cost.seconds)
    return f"{limit}: {seconds_text(seconds)}, {part} of the time"


def _over_bound(of: ExplainedKernel) -> str:
    device, least, size = of.tiled.device, of.cost.lower_bound_bytes, moved(of.cost)
    where = "between SMs and L2"
    if not isinstance(device, GpuSpec):
        where = f"to and from {memory_text(device.on_chip_bytes)} of L2"
    if not least:
        return f"{bytes_text(size)} {where}; the lower bound is 0"
    ratio = ratio_text(size / least)
    return f"{bytes_text(size)} {where}, {ratio} times the lower bound of {bytes_text(least)}"


def _changes(of: ExplainedKernel) -> Iterator[str]:
    mine, device = of.ranked[0].config.key, of.tiled.device
    for other in of.others[:1]:
        ratio = other.estimate.seconds / of.cost.seconds
        if not isinstance(device, GpuSpec):  # with idle threads, by which tiles are ranked
            ratio = other.estimate.cost / of.cost.cost
        yield f"next best {other.config.key}, {slower(ratio)}"
    others = {name: _config(best) for name, best in of.on_other_devices.items()}
    changed = {name: config for name, config in others.items() if config != mine}
    if isinstance(device, GpuSpec):
        sizes = {memory_text(size): size for size in OTHER_FAST_MEMORY}
        less = [name for name in changed if sizes[name] < device.smem_per_block]
        for name in less[-1:]:
            yield f"{changed[name]} with {name} of shared memory"
    elif changed:
        first = next(iter(changed.values()))
        names = ", ".join(name for name, config in changed.items() if config == first)
        yield f"{first} on {names}"
    for mask, best in of.under_other_masks.items():
        if _config(best) != mine:
            yield f"{_config(best)} under {mask}"


def _config(best: Candidate | str) -> str:
    return "nothing fits" if isinstance(best, str) else best.config.key
