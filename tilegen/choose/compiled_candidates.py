"""The model's candidates with the compiler's results, if known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tilegen.choose.ranker import candidate_of, time_as_compiled
from tilegen.compiling.acceptable import why_not_used
from tilegen.compiling.verdicts import remembered
from tilegen.emit.identity import rows_are_aligned
from tilegen.errors import BuildFailed
from tilegen.kernels.config import TileConfig
from tilegen.model.estimate import Candidate, Compiled
from tilegen.store.versions import installed
from tilegen.task import KernelTask, Tiled

if TYPE_CHECKING:
    from tilegen.model.resources import Resources


def with_verdicts(
    task: KernelTask,
    candidates: Sequence[Candidate],
    tried: Mapping[TileConfig, Resources | BuildFailed],
) -> list[Candidate]:
    """Return the candidates of a task, each with the resources that a compiler reported for it.

    Configs `tried` just now come first, ordered by the time of their machine code, or last if they
    are not usable. Other candidates get their cached results and keep their order.
    """
    known, aligned = {one.config: one for one in candidates}, rows_are_aligned(task.problem)
    ordered: list[tuple[int, float, Candidate]] = []
    for config in dict.fromkeys([*tried, *known]):
        tiled = task.tiled(config)
        candidate = known.get(config) or candidate_of(tiled)
        built = tried.get(config)
        if built is None:
            built = remembered(tiled, aligned=aligned)
        code = None if built is None else _compiled(tiled, built)
        rank, seconds = 1, 0.0
        if config in tried and code is not None:
            rank, seconds = (2, 0.0) if code.why_not_used else (0, code.seconds or 0.0)
        ordered.append((rank, seconds, replace(candidate, compiled=code)))
    return [candidate for *_, candidate in sorted(ordered, key=lambda entry: entry[:2])]


def _compiled(tiled: Tiled, built: Resources | BuildFailed) -> Compiled:
    triton = installed("triton")
    if isinstance(built, BuildFailed):
        return Compiled(triton=triton, why_not_used=str(built))
    return Compiled(
        triton=triton,
        resources=built,
        seconds=time_as_compiled(tiled, built).seconds,
        why_not_used=why_not_used(built, tiled.gpu),
    )
