"""The whole compiler on one screen: from a problem and a GPU to right kernels and their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilegen.build.compiler import CompiledKernel, compile_many, first_that_fits
from tilegen.check.verification import Check, reduced, require, verify_anywhere
from tilegen.choose.families import kernels_of
from tilegen.choose.ranking import propose
from tilegen.disk import log
from tilegen.emit.kernel_files import RenderedKernel
from tilegen.emit.render import render
from tilegen.errors import BuildFailed
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.estimate import Candidate
from tilegen.problem import AttentionProblem
from tilegen.store import TuningRecord
from tilegen.tuning.tuner import tune

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec

Built = Sequence[tuple[Candidate, CompiledKernel | BuildFailed]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the pipeline leaves for one kernel."""

    candidates: Sequence[Candidate]
    built: Built
    chosen: Candidate
    record: TuningRecord | None
    """None where nobody has measured: the model's choice is no finding, and is not kept."""


def run(
    problem: AttentionProblem,
    gpu: GpuSpec,
    *,
    top: int = 5,
    tune_seconds: float | None = None,
    on_stage: Callable[[str, Any], None] = lambda name, value: None,
) -> dict[Kernel, Outcome]:
    """Return, for forward and backward, the kernels to use; each has been compiled and verified.

    `tune_seconds` per kernel are spent on the GPU at hand; with None the model's choice is a line
    of the log. `on_stage(name, value)` is told what each stage made.
    """
    # AttentionProblem, GpuSpec -> [Kernel]
    kernels: tuple[Kernel, ...] = kernels_of(problem, gpu)
    on_stage("families", kernels)

    # AttentionProblem, GpuSpec -> {Kernel: [Candidate]}
    candidates: dict[Kernel, list[Candidate]] = {
        kernel: propose(problem, gpu, kernel=kernel, top=top) for kernel in kernels
    }
    on_stage("propose", candidates)

    # [Candidate] -> [RenderedKernel]
    rendered: dict[Kernel, list[RenderedKernel]] = {
        k: [render(problem, c.config, k) for c in ranked] for k, ranked in candidates.items()
    }
    on_stage("render", rendered)

    # [RenderedKernel] -> [CompiledKernel | BuildFailed]
    everything = [one for ranked in rendered.values() for one in ranked]
    outcome = {one.digest: result for one, result in compile_many(everything, gpu.arch)}
    built: dict[Kernel, Built] = {
        k: [(c, outcome[one.digest]) for c, one in zip(candidates[k], ranked, strict=True)]
        for k, ranked in rendered.items()
    }
    on_stage("build", built)

    # [CompiledKernel | BuildFailed] -> Candidate
    chosen: dict[Kernel, Candidate] = {
        kernel: choose(results, gpu) for kernel, results in built.items()
    }
    on_stage("choose", chosen)

    # {Kernel: TileConfig} -> [Check]
    checks: tuple[Check, ...] = verify_anywhere(reduced(problem), configs(chosen))
    on_stage("verify", checks)
    require(checks)

    # Candidate -> TuningRecord -> JSON
    records: dict[Kernel, TuningRecord] = {}
    for kernel, candidate in chosen.items():
        if tune_seconds:
            records[kernel] = tune(problem, gpu, kernel=kernel, seconds=tune_seconds)
        else:
            log.info("%s for '%s': %s, the model's choice", kernel, problem, candidate.config.key)
    on_stage("tune", records)

    return {
        kernel: Outcome(
            candidates=candidates[kernel],
            built=built[kernel],
            chosen=chosen[kernel],
            record=records.get(kernel),
        )
        for kernel in kernels
    }


def choose(built: Built, gpu: GpuSpec) -> Candidate:
    """Return the best-ranked candidate that compiled to what may be used. Raises BuildFailed."""
    best = first_that_fits([result for _, result in built], gpu)
    return next(candidate for candidate, result in built if result is best)


def configs(chosen: dict[Kernel, Candidate]) -> dict[Kernel, TileConfig]:
    """Return the config of each kernel's candidate."""
    return {kernel: candidate.config for kernel, candidate in chosen.items()}
