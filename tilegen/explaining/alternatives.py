"""Choices for another fast memory or another mask, shown at the end of explanations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tilegen.choose.families import family, ranked_families
from tilegen.choose.ranker import best_of
from tilegen.errors import Unsupported
from tilegen.gpus.spec import GpuSpec, with_fast_memory
from tilegen.kernels.registry import KERNELS
from tilegen.kernels.spec import Direction
from tilegen.masks.mask import causal, full
from tilegen.model.estimate import Candidate
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask

OTHER_FAST_MEMORY = tuple(kib * 1024 for kib in (48, 64, 99, 163, 227))
"""Shared memory per program on GPUs from the GTX 1060 to the H200 [bytes]."""

Values = dict[str, Any]


def with_alternatives(
    explained: Sequence[Values],
    problem: AttentionProblem,
    device: GpuSpec,
    *,
    with_passes: bool = True,
) -> list[Values]:
    """Add alternatives to explanations of kernels and, `with_passes`, to those of their passes.
    Formulas and plots need none."""
    problem = problem.normal()
    passes: dict[Direction, Values] = {
        facts["pass"]["direction"]: facts["pass"] for facts in explained
    }
    if with_passes:
        passes = {
            direction: way | alternatives_of_pass(problem, device, direction)
            for direction, way in passes.items()
        }

    def of_kernel(facts: Values) -> Values:
        spec = KERNELS[facts["kernel"]]
        return _alternatives(
            problem, device, lambda problem, gpu: _config(KernelTask(spec, problem, gpu))
        )

    return [
        facts | of_kernel(facts) | {"pass": passes[facts["pass"]["direction"]]}
        for facts in explained
    ]


def alternatives_of_pass(
    problem: AttentionProblem, device: GpuSpec, direction: Direction
) -> Values:
    """Return the best families of a pass for other fast memories and masks, as plain values."""
    return _alternatives(problem, device, lambda problem, gpu: _family(problem, gpu, direction))


def _alternatives(
    problem: AttentionProblem,
    device: GpuSpec,
    choice: Callable[[AttentionProblem, GpuSpec], Values],
) -> Values:
    return {
        "other_fast_memory": [
            {"fast_memory": size} | choice(problem, with_fast_memory(device, size))
            for size in OTHER_FAST_MEMORY
        ],
        "other_masks": [
            {"mask": mask.notation} | choice(replace(problem, mask=mask), device)
            for mask in (full(), causal())
            if mask != problem.mask
        ],
    }


def short(candidate: Candidate) -> Values:
    """Return the config of a candidate with its time and reason, as plain values."""
    cost = candidate.estimate
    return {
        "config": candidate.config.key,
        "seconds": cost.seconds,
        "limit": cost.limit,
        "reason": candidate.reason,
    }


def _config(task: KernelTask) -> Values:
    try:
        return short(best_of(task))
    except Unsupported as error:
        return {"config": None, "seconds": None, "limit": None, "reason": str(error)}


def _family(problem: AttentionProblem, gpu: GpuSpec, direction: Direction) -> Values:
    try:
        chosen = family(problem, gpu, direction)
        seconds = dict(ranked_families(problem, gpu, direction))[chosen]
    except Unsupported as error:
        return {"family": None, "seconds": None, "reason": str(error)}
    return {"family": chosen, "seconds": seconds, "reason": None}
