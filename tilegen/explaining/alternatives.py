"""Choices for another fast memory, processor or mask: the things that would change a choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from tilegen.choose import on_cpu
from tilegen.choose.families import family, ranked_families
from tilegen.choose.ranker import best_of, estimate, joining
from tilegen.cpus import spec as cpus
from tilegen.device import Device
from tilegen.errors import Unsupported
from tilegen.explaining.cpu_records import CpuExplanation, OnProcessor
from tilegen.explaining.gpu_records import (
    FamilyOnMemory,
    FamilyUnderMask,
    KernelExplanation,
    OnMemory,
    PassExplanation,
)
from tilegen.explaining.records import UnderMask
from tilegen.gpus.spec import GpuSpec, with_fast_memory
from tilegen.kernels.config import Family, TileConfig
from tilegen.kernels.spec import Direction
from tilegen.masks.mask import causal, full
from tilegen.model.estimate import Candidate, CostEstimate
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask
from tilegen.units import ratio_text, seconds_text

OTHER_FAST_MEMORY = tuple(kib * 1024 for kib in (48, 64, 99, 163, 227))
"""Shared memory per program on GPUs from the GTX 1060 to the H200 [bytes]."""

Explained = KernelExplanation | CpuExplanation
"""An explanation of a kernel on a GPU or on a processor."""


class PickFields(TypedDict):
    """The fields of a `Pick`."""

    config: str | None
    seconds: float | None
    limit: str | None
    reason: str


class FamilyPickFields(TypedDict):
    """The fields of a `FamilyPick`."""

    family: Family | None
    seconds: float | None
    reason: str | None


def with_alternatives(
    explained: Sequence[Explained],
    problem: AttentionProblem,
    device: Device,
    *,
    with_passes: bool = True,
) -> tuple[Explained, ...]:
    """Add alternatives to explanations of kernels and, `with_passes`, to those of their passes.
    Formulas and plots need none."""
    problem = problem.normal()
    passes: dict[Direction, PassExplanation] = {}

    def of_pass(way: PassExplanation | None) -> PassExplanation | None:
        if way is None or not with_passes or not isinstance(device, GpuSpec):
            return way
        if way.direction not in passes:
            passes[way.direction] = alternatives_of_pass(way, problem, device)
        return passes[way.direction]

    return tuple(
        replace(_on_gpu(facts, problem, device), pass_=of_pass(facts.pass_))
        if isinstance(facts, KernelExplanation)
        else _on_processor(facts, problem, device)
        for facts in explained
    )


def _on_gpu(
    facts: KernelExplanation, problem: AttentionProblem, device: Device
) -> KernelExplanation:
    task = KernelTask.of(facts.kernel, problem, device)
    memories = ((size, with_fast_memory(task.gpu, size)) for size in OTHER_FAST_MEMORY)
    return replace(
        facts,
        other_fast_memory=tuple(
            OnMemory(fast_memory=size, **_best(replace(task, device=gpu))) for size, gpu in memories
        ),
        other_masks=_under_masks(task),
    )


def _on_processor(
    facts: CpuExplanation, problem: AttentionProblem, device: Device
) -> CpuExplanation:
    task = KernelTask.of(facts.kernel, problem, device)
    others = [spec for spec in cpus.catalogue() if spec.name != device.name]
    return replace(
        facts,
        other_processors=tuple(
            OnProcessor(processor=spec.name, **_best(replace(task, device=spec))) for spec in others
        ),
        other_masks=_under_masks(task),
    )


def _under_masks(task: KernelTask) -> tuple[UnderMask, ...]:
    return tuple(
        UnderMask(
            mask=mask.notation, **_best(replace(task, problem=replace(task.problem, mask=mask)))
        )
        for mask in (full(), causal())
        if mask != task.problem.mask
    )


def _best(task: KernelTask) -> PickFields:
    """Return the model's config, at the lengths of the problem."""
    try:
        if isinstance(task.device, GpuSpec):
            best = best_of(task)
            return pick(best.config, best.estimate, best.reason)
        task = joining(task)
        config = on_cpu.chosen_config(task)
        return pick(config, estimate(task.tiled(config)), "")
    except Unsupported as error:
        return {"config": None, "seconds": None, "limit": None, "reason": str(error)}


def pick(config: TileConfig, cost: CostEstimate, reason: str) -> PickFields:
    """Return the fields that describe a config in a line."""
    return {"config": config.key, "seconds": cost.seconds, "limit": cost.limit, "reason": reason}


def alternatives_of_pass(
    way: PassExplanation, problem: AttentionProblem, device: GpuSpec
) -> PassExplanation:
    """Add the best families for other fast memories and masks to the explanation of a pass."""
    masks = [mask for mask in (full(), causal()) if mask != problem.mask]
    return replace(
        way,
        other_fast_memory=tuple(
            FamilyOnMemory(
                fast_memory=size,
                **_family(problem, with_fast_memory(device, size), way.direction),
            )
            for size in OTHER_FAST_MEMORY
        ),
        other_masks=tuple(
            FamilyUnderMask(
                mask=mask.notation, **_family(replace(problem, mask=mask), device, way.direction)
            )
            for mask in masks
        ),
    )


def _family(problem: AttentionProblem, gpu: GpuSpec, direction: Direction) -> FamilyPickFields:
    try:
        chosen = family(problem, gpu, direction)
        seconds = dict(ranked_families(problem, gpu, direction))[chosen]
    except Unsupported as error:
        return {"family": None, "seconds": None, "reason": str(error)}
    return {"family": chosen, "seconds": seconds, "reason": None}


def compared(chosen: Candidate, other: Candidate, own: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a `NextPick` that compare another candidate with the chosen candidate.

    `own` are differences that only GPUs, or only processors, have.
    """
    mine, theirs = chosen.estimate, other.estimate
    terms = dict(mine.terms)
    grown = {name: seconds - terms[name] for name, seconds in theirs.terms}
    slower = theirs.seconds >= mine.seconds
    term = (max if slower else min)(grown, key=lambda name: grown[name])
    moved, others = (cost.read_bytes + cost.write_bytes for cost in (mine, theirs))
    traffic = others / moved if moved else None
    times = "traffic where this has none"
    if traffic is not None:
        times = f"{ratio_text(traffic)} times the traffic"
    differences = ["the same traffic" if moved == others else times, *own]
    if abs(grown[term]) >= 0.001 * mine.seconds:
        differences.append(f"{term} {'+' * (grown[term] > 0)}{seconds_text(grown[term])}")
    if theirs.limit != mine.limit:
        differences.append(f"limited by {theirs.limit}")
    return {
        **pick(other.config, theirs, other.reason),
        "slowdown": theirs.seconds / mine.seconds,
        "traffic_ratio": traffic,
        "term": term,
        "term_seconds": grown[term],
        "differs": ", ".join(differences),
    }
