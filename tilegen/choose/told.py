"""The model's candidates with what a compiler made of them, as far as that is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tilegen.choose.ranking import candidate_of, seconds_as_compiled
from tilegen.compiling.acceptable import objection
from tilegen.compiling.verdicts import remembered
from tilegen.emit.identity import rows_are_aligned
from tilegen.errors import BuildFailed
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.estimate import Candidate, Compiled
from tilegen.store.versions import installed

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec
    from tilegen.model.resources import Resources
    from tilegen.problem import AttentionProblem


def with_verdicts(
    problem: AttentionProblem,
    gpu: GpuSpec,
    kernel: Kernel,
    candidates: Sequence[Candidate],
    tried: Mapping[TileConfig, Resources | BuildFailed],
) -> list[Candidate]:
    """Return the candidates of a problem in normal form, each with what a compiler said of it.

    Configs `tried` just now come first, the fastest by its machine code before the others; tried
    configs that may not be used come last. Other candidates have the verdicts that are remembered,
    which change no order.
    """
    known, aligned = {one.config: one for one in candidates}, rows_are_aligned(problem)
    told: list[tuple[int, float, Candidate]] = []
    for config in dict.fromkeys([*tried, *known]):
        one = known.get(config) or candidate_of(problem, gpu, config, kernel)
        built = tried.get(config)
        if built is None:
            built = remembered(problem, config, kernel, gpu.arch, aligned=aligned)
        code = None if built is None else _compiled(problem, gpu, one, built)
        rank, seconds = 1, 0.0
        if config in tried and code is not None:
            rank, seconds = (2, 0.0) if code.objection else (0, code.seconds or 0.0)
        told.append((rank, seconds, replace(one, compiled=code)))
    return [one for *_, one in sorted(told, key=lambda one: one[:2])]


def _compiled(
    problem: AttentionProblem, gpu: GpuSpec, one: Candidate, built: Resources | BuildFailed
) -> Compiled:
    triton = installed("triton")
    if isinstance(built, BuildFailed):
        return Compiled(triton=triton, objection=str(built))
    return Compiled(
        triton=triton,
        resources=built,
        seconds=seconds_as_compiled(problem, gpu, one.config, one.kernel, built),
        objection=objection(built, gpu),
    )
