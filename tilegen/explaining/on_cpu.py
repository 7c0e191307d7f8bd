"""Explain the tile of a kernel on a processor: terms of its time, levels of memory, other tiles."""

from __future__ import annotations

from tilegen.choose import on_cpu
from tilegen.choose.choice import Choice
from tilegen.choose.ranker import joining
from tilegen.cpus.spec import CpuSpec
from tilegen.explaining.alternatives import compared
from tilegen.explaining.common import (
    BY_MODEL,
    bound_facts,
    splits_in_words,
    traffic_facts,
)
from tilegen.explaining.cpu_records import (
    CpuExplanation,
    CpuNextBest,
    CpuPassExplanation,
    CpuTimeFacts,
    LevelFacts,
)
from tilegen.explaining.mask_effect import explain_mask
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import FAMILIES, check_config
from tilegen.kernels.spec import Direction
from tilegen.model import cpu_time
from tilegen.model.bounds import lower_bound_with
from tilegen.model.cpu_levels import bytes_from
from tilegen.model.estimate import Candidate, CostEstimate
from tilegen.model.launches import launches
from tilegen.model.visits import visits
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

SHOWN = 3
"""Number of other tiles in an explanation."""


def explain(
    task: KernelTask, config: TileConfig | None = None, choice: Choice | None = None
) -> CpuExplanation:
    """Explain a config of a kernel on a processor: `config`, the config of a choice, or by default
    the model's. Raises Unsupported."""
    asked = config is not None
    if config is not None:
        check_config(config, task.kernel)
    elif choice is not None:
        config = choice.config
    task = joining(task)
    by_model = on_cpu.chosen_config(task)
    tiled = task.tiled(config or by_model)
    chosen = on_cpu.candidate_of(tiled)
    cost, space = chosen.estimate, on_cpu.space(task)
    others = [other for other in on_cpu.ranked(task) if other != tiled.config][:SHOWN]
    return CpuExplanation(
        problem=task.problem.key,
        gpu=task.device.name,
        title=task.device.title,
        kernel=task.kernel,
        config=tiled.config,
        tile=tiled.spec.loop.tile(tiled.config),
        choice="" if asked else _choice_line(task, choice, len(space)),
        model_config=by_model.key,
        reason=chosen.reason,
        splits=splits_in_words(tiled),
        mask=explain_mask(task, chosen),
        tiles=visits(tiled),
        traffic=traffic_facts(tiled, cost),
        levels=_levels(tiled),
        bound=bound_facts(task, moved=cost.read_bytes + cost.write_bytes),
        time=_time(tiled, cost),
        waits_for=cpu_time.TERMS[cost.limit],
        ranked_for=task.problem.bucket.key,
        tried=len(space),
        next_best=tuple(_next_best(chosen, on_cpu.candidate_of(task.tiled(x))) for x in others),
    )


def explain_pass(problem: AttentionProblem, direction: Direction) -> CpuPassExplanation:
    """Explain the kernels of a pass, which rules choose. Raises Unsupported."""
    problem = problem.normal()
    family = on_cpu.family_on_cpu(problem, direction)
    return CpuPassExplanation(
        direction=direction,
        family=family.name,
        kernels=family.names,
        left_out={
            name: reason
            for name, spec in FAMILIES[direction].items()
            if (reason := spec.why_not(problem, "cpu"))
        },
    )


def _choice_line(task: KernelTask, choice: Choice | None, tried: int) -> str:
    """Describe in a line where the config comes from."""
    if choice is not None and choice.ranked.origin != "model":
        return choice.source
    if task.spec.packs and tried > 1:
        return "rules, since the keys are divided over threads, which the model does not count"
    if tried == 1:
        return "rules, which leave one tile"
    return BY_MODEL if choice is None else f"the model, the first of {tried} tiles"


def _levels(tiled: Tiled) -> tuple[LevelFacts, ...]:
    spec = _cpu(tiled)
    moved = bytes_from(tiled, spec)
    return tuple(
        LevelFacts(
            level=level.name,
            fast_bytes=level.fast_bytes,
            bytes=count,
            bound_bytes=lower_bound_with(tiled.task, level.fast_bytes),
            bandwidth=level.bandwidth,
        )
        for level, count in zip(cpu_time.levels_of(spec), moved, strict=True)
    )


def _time(tiled: Tiled, cost: CostEstimate) -> CpuTimeFacts:
    spec, programs = _cpu(tiled), launches(tiled).programs
    levels = cpu_time.levels_of(spec)
    return CpuTimeFacts(
        seconds=cost.seconds,
        limit=cost.limit,
        flops=cost.flops,
        programs=programs,
        terms=dict(cost.terms),
        launch=cpu_time.LAUNCH_SECONDS,
        streams_from=levels[cpu_time.source_of(tiled, spec)].name,
        stream_bytes=cpu_time.stream_bytes(tiled),
        idle={
            threads: 1 - 1 / cpu_time.rounds_over_work(programs, threads)
            for threads in cpu_time.THREADS
        },
        rates={
            "products": spec.product_flops(tiled.problem.dtype),
            "exponentials": spec.exp2_rate,
            **{level.name: level.bandwidth for level in levels},
        },
        rates_measured=spec.measured,
        rates_source=spec.source,
    )


def _next_best(chosen: Candidate, other: Candidate) -> CpuNextBest:
    """Compare another tile with the tile explained."""
    mine, theirs = chosen.estimate, other.estimate
    own: list[str] = []
    if theirs.waves != mine.waves:
        own.append(f"{theirs.waves:.0f} programs, not {mine.waves:.0f}")
    return CpuNextBest(
        **compared(chosen, other, own),
        cost_ratio=theirs.cost / mine.cost,
        programs=int(theirs.waves),
    )


def _cpu(tiled: Tiled) -> CpuSpec:
    assert isinstance(tiled.device, CpuSpec), tiled.device
    return tiled.device
