"""Choose kernels and tiles for a processor: family and splits by rules, tiles by records or the
model.

A choice depends only on the problem, records and the processor's row in the catalogue. It does not
depend on the number of threads or on a clock, because results must not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from tilegen.cpu.choice import FEW_ROWS, config_by_rule, family_by_rule
from tilegen.errors import Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import check_config
from tilegen.kernels.spec import Direction, FamilySpec
from tilegen.model.columns import Number, floats, tiles_of
from tilegen.model.cpu_time import (
    LAUNCH_SECONDS,
    TERMS,
    idle_factor,
    seconds_of,
    stopped,
    weighted,
)
from tilegen.model.estimate import Candidate, CostEstimate
from tilegen.model.launches import launches
from tilegen.model.traffic import traffic
from tilegen.problem import AttentionProblem
from tilegen.sympy_lock import one_at_a_time
from tilegen.task import KernelTask, Tiled
from tilegen.units import bytes_text, percent_text, ratio_text


def family_on_cpu(problem: AttentionProblem, direction: Direction) -> FamilySpec:
    """Choose the family of a pass. Raises Unsupported if it cannot compute the problem."""
    problem = problem.bucket  # lengths are powers of two
    family = family_by_rule(problem, direction)
    if reason := family.why_not(problem, "cpu"):
        raise Unsupported(reason)
    return family


def usual_config(task: KernelTask) -> TileConfig:
    """Choose the tile of a kernel by rules, without the model. Raises Unsupported for kernels that
    no call on a processor launches."""
    config = config_by_rule(task.problem.bucket, task.kernel)
    try:
        check_config(config, task.kernel)
    except Unsupported as error:
        raise Unsupported(
            f"no call on a processor launches {task.kernel}: {error}; leave the kernel out"
        ) from None
    return config


def space(task: KernelTask) -> list[TileConfig]:
    """Return the tiles that a kernel can have on a processor, the usual tile first.

    Splits and shares are fixed by rules: they divide work over threads, and single-thread timings
    cannot rank them. The rows of tiles with several heads or few queries are fixed, too. Kernels
    that pass over their rows once have a single tile.
    """
    usual, spec, problem = usual_config(task), task.spec, task.problem.bucket
    if not spec.masked or task.in_order:
        return [usual]
    rows = spec.knobs.block_m
    if spec.packs or usual.heads > 1 or usual.block_m < rows[0]:
        rows = (usual.block_m,)
    configs = [usual]
    for block_m in rows:
        if block_m > _rounded(problem.seqlen_q) and block_m > rows[0]:
            continue
        for block_n in spec.knobs.block_n:
            if block_n > _rounded(problem.seqlen_kv) and block_n > spec.knobs.block_n[0]:
                continue
            if not usual.split_kv or block_n <= usual.split_kv:
                configs.append(replace(usual, block_m=block_m, block_n=block_n))
    return list(dict.fromkeys(configs))


def chosen_config(task: KernelTask) -> TileConfig:
    """Choose the tile that calls use without a record: the first of `ranked`, or the tile of the
    rules if there is nothing to rank."""
    return _chosen(_of_bucket(task))


@lru_cache(maxsize=1024)
def _chosen(task: KernelTask) -> TileConfig:
    usual, configs = usual_config(task), space(task)
    # The model cannot predict keys divided over threads, nor products that wait for memory.
    if task.spec.packs or usual.block_m < FEW_ROWS:
        return usual
    return configs[0] if len(configs) == 1 else ranked(task, configs)[0]


@one_at_a_time
def ranked(task: KernelTask, configs: Sequence[TileConfig] | None = None) -> list[TileConfig]:
    """Rank tiles by the model's times, the fastest first. The times hold for machines with any
    number of threads: see `idle_factor`."""
    task = _of_bucket(task)
    configs = list(configs or space(task))
    costs = dict(zip(configs, _cost(tiles_of(task, configs)).tolist(), strict=True))
    return sorted(costs, key=lambda config: (costs[config], config))


def candidates(task: KernelTask, configs: Sequence[TileConfig] | None = None) -> list[Candidate]:
    """Return tiles with the model's estimates and reasons, the fastest first. The tile that calls
    use without a record precedes all others."""
    task = _of_bucket(_joining(task))
    order = dict.fromkeys((chosen_config(task), *ranked(task, configs)))
    tiles = order if configs is None else [config for config in order if config in configs]
    return [candidate_of(task.tiled(config)) for config in tiles]


@one_at_a_time
def candidate_of(tiled: Tiled) -> Candidate:
    """Return a tile with the model's estimate, and a sentence that gives the reason for it."""
    cost = estimate(tiled)
    moved, least = cost.read_bytes + cost.write_bytes, cost.lower_bound_bytes
    bound = f", {ratio_text(moved / least)} times the lower bound" if least else ""
    limit, seconds = TERMS[cost.limit], dict(cost.terms)[cost.limit]
    if seconds < LAUNCH_SECONDS:
        limit, seconds = "a launch from Python", LAUNCH_SECONDS
    reason = (
        f"{tiled.spec.loop.tile(tiled.config)}: {bytes_text(moved)} to and from caches{bound}; "
        f"{percent_text(seconds / cost.seconds)} of the time is {limit}"
    )
    return Candidate(kernel=cost.kernel, config=cost.config, estimate=cost, reason=reason)


@one_at_a_time
def estimate(tiled: Tiled) -> CostEstimate:
    """Predict the cost of a tile on one thread."""
    from tilegen.model.bounds import lower_bound_bytes  # loads formulas that choices do not need

    moved, run, terms = traffic(tiled), launches(tiled), weighted(tiled)
    seconds = seconds_of(tiled)
    return CostEstimate(
        kernel=tiled.spec.name,
        config=tiled.config,
        read_bytes=moved.read_bytes,
        write_bytes=moved.write_bytes,
        dram_bytes=0,
        lower_bound_bytes=lower_bound_bytes(tiled.task),
        smem_bytes=0,
        registers=0,
        flops=int(2 * tiled.step.multiply_adds * float(run.steps - stopped(tiled) * run.partial)),
        seconds=seconds,
        limit=max(terms, key=terms.__getitem__),
        terms=tuple(terms.items()),
        waves=float(run.programs),
        cost=float(_cost(tiled)),
    )


def _cost(tiled: Tiled) -> Number:
    """Return the predicted time by which tiles are ranked [s]."""
    return seconds_of(tiled) * floats(idle_factor(launches(tiled).programs))


def _joining(task: KernelTask) -> KernelTask:
    """Settle the splits of a kernel that joins them: the splits of the choice without records."""
    before = task.before
    return task if task.joined or before is None else replace(task, joined=chosen_config(before))


def _of_bucket(task: KernelTask) -> KernelTask:
    bucket = task.problem.bucket  # lengths are powers of two
    return task if bucket == task.problem else replace(task, problem=bucket)


@one_at_a_time
def tuned_space(task: KernelTask) -> list[TileConfig]:
    """Return the tiles that a tuner may try: those that leave no more threads idle than the choice
    without tuning, which single-thread timings cannot see."""
    task = _of_bucket(task)
    most = idle_factor(launches(task.tiled(chosen_config(task))).programs)
    configs = space(task)
    idle = idle_factor(launches(tiles_of(task, configs)).programs)
    return [config for config, part in zip(configs, idle, strict=True) if part <= most]


def may_tune(task: KernelTask) -> bool:
    """Return True if a kernel has more than one tile to try on a processor."""
    return len(space(task)) > 1 and len(tuned_space(task)) > 1


def _rounded(length: int) -> int:
    return 1 << (length - 1).bit_length()
