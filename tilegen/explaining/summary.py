"""The six lines at the head of an explanation: problem, kernel, time, limit, bound, and what would
change the choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilegen.explaining.alternatives import Explained
from tilegen.explaining.cpu_records import CpuExplanation
from tilegen.explaining.gpu_records import KernelExplanation
from tilegen.explaining.records import Pick
from tilegen.units import (
    bytes_text,
    memory_text,
    percent_text,
    ratio_text,
    seconds_text,
)

LABELS = ("problem", "kernel", "time", "limit", "bound", "change")
"""The first words of the six lines."""
SAME = 0.0005
"""Part of a time below which two times are called equal."""


def summary(facts: Explained) -> list[str]:
    """Return the six lines of a kernel, whose alternatives are known."""
    texts = _on_gpu(facts) if isinstance(facts, KernelExplanation) else _on_cpu(facts)
    return [f"{label:9}{text}" for label, text in zip(LABELS, texts, strict=True)]


def slower(ratio: float) -> str:
    """Describe a ratio of times: `0.3 % slower`."""
    if abs(ratio - 1) < SAME:
        return "as fast"
    return f"{percent_text(abs(ratio - 1))} {'slower' if ratio > 1 else 'faster'}"


def _on_gpu(facts: KernelExplanation) -> Iterator[str]:
    time, parts = facts.time, facts.time.composition
    yield f"{facts.problem}, on {facts.gpu} with {memory_text(facts.fast_memory)} of shared memory"
    yield f"{facts.kernel} {facts.config.key}: {facts.tile}"
    yield f"{seconds_text(time.seconds)} predicted{_measured(facts)}"
    programs = "less" if parts.programs is None else seconds_text(parts.programs)
    traffic = f"traffic {seconds_text(parts.l2)} in L2 and {seconds_text(parts.dram)} in DRAM"
    yield f"{facts.waits_for}: programs take {programs}, {traffic}"
    yield _over_bound(facts, "between SMs and L2")
    yield "; ".join(_changes_on_gpu(facts)) or "nothing that was tried"


def _on_cpu(facts: CpuExplanation) -> Iterator[str]:
    time = facts.time
    yield f"{facts.problem}, on {facts.gpu} ({facts.title})"
    yield f"{facts.kernel} {facts.config.key}: {facts.tile}"
    yield f"{seconds_text(time.seconds)} predicted on one thread{_measured(facts)}"
    limit, part = facts.waits_for, time.terms[time.limit]
    if time.launch > part:
        limit, part = "a launch from Python", time.launch
    yield f"{limit}: {seconds_text(part)}, {percent_text(part / time.seconds)} of the time"
    yield _over_bound(facts, f"to and from {memory_text(facts.bound.on_chip_bytes)} of L2")
    yield "; ".join(_changes_on_cpu(facts)) or "nothing that was tried"


def _measured(facts: Explained) -> str:
    """Return the measured time with all in which the measurement differs; empty without a
    record."""
    if (measured := facts.measured) is None:
        return ""
    tile = f" with {measured.config}" if measured.config != facts.config.key else ""
    problem = f" for '{measured.problem}'" if measured.problem != facts.problem else ""
    return f"; {seconds_text(measured.seconds)} measured{tile}{problem}"


def _over_bound(facts: Explained, where: str) -> str:
    bound, moved = facts.bound, bytes_text(facts.traffic.moved)
    if bound.ratio is None:
        return f"{moved} {where}; the lower bound is 0"
    least = bytes_text(bound.bytes)
    return f"{moved} {where}, {ratio_text(bound.ratio)} times the lower bound of {least}"


def _changes_on_gpu(facts: KernelExplanation) -> Iterator[str]:
    for other in facts.next_best[:1]:
        yield f"next best {other.config}, {slower(other.slowdown)}"
    mine, memories = facts.model_config, facts.other_fast_memory or ()
    less = [x for x in memories if x.fast_memory < facts.fast_memory and x.config != mine]
    for other in less[-1:]:
        yield f"{_config(other)} with {memory_text(other.fast_memory)} of shared memory"
    for mask in facts.other_masks or ():
        if mask.config != mine:
            yield f"{_config(mask)} under {mask.mask}"


def _changes_on_cpu(facts: CpuExplanation) -> Iterator[str]:
    mine = facts.model_config
    for other in facts.next_best[:1]:
        yield f"next best {other.config}, {slower(other.cost_ratio)}"
    others = [other for other in facts.other_processors or () if other.config != mine]
    for other in others[:1]:
        same = (x.processor for x in others if x.config == other.config)
        yield f"{_config(other)} on {', '.join(same)}"
    for mask in facts.other_masks or ():
        if mask.config != mine:
            yield f"{_config(mask)} under {mask.mask}"


def _config(other: Pick) -> str:
    return other.config or "nothing fits"


def summaries(explained: Sequence[Explained]) -> list[str]:
    """Return the six lines of each kernel. The problem, which they share, stands once."""
    lines: list[str] = []
    for i, facts in enumerate(explained):
        lines += summary(facts) if i == 0 else ["", *summary(facts)[1:]]
    return lines
