"""The model's ranking: the configs of a task, the fastest first, with the reason for each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tilegen.choose import on_cpu
from tilegen.choose.reason import reason_of
from tilegen.choose.search_space import legal_configs
from tilegen.disk import say_once
from tilegen.errors import Unsupported
from tilegen.gpus.nearest import on_tensor_cores
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import TileConfig
from tilegen.kernels.descriptors import without
from tilegen.model.as_compiled import clocks_as_compiled
from tilegen.model.bounds import lower_bound_bytes
from tilegen.model.estimate import Candidate, CostEstimate
from tilegen.model.footprint import footprint
from tilegen.model.launches import kept_entries, launches
from tilegen.model.on_chip import Footprint
from tilegen.model.time import Time, l2_seconds, launch_seconds, least_seconds, step_clocks, time
from tilegen.model.traffic import traffic
from tilegen.sympy_lock import one_at_a_time
from tilegen.task import KernelTask, Tiled

if TYPE_CHECKING:
    from tilegen.model.resources import Resources

REGISTER_DOUBT = 1.8
"""Predicted registers per thread, as a multiple of the limit, up to which a tuner compiles a
config. On four GPUs of the catalogue, configs that beat the first choice by machine code are below
it. fp32 slices, 3 % faster, are the exception (benchmarks/results/machine_code.csv)."""

TimedConfig = tuple[Time, TileConfig, Footprint]


@one_at_a_time
def propose(task: KernelTask, *, top: int = 10, describable: bool = True) -> list[Candidate]:
    """Return up to `top` candidates, best first, all predicted to fit. Raises Unsupported.

    A dtype that the device's tensor cores do not support is ranked by its multiply-adds, with one
    warning. A config ranks by its time plus the traffic of its predicted spills. Configs that
    surely spill too much are returned only if no other config fits. Tensor descriptors are proposed
    for tiles that would otherwise spill, if tensors are `describable`.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise Unsupported(f"top must be an int of at least 1, got {top!r}")
    if not isinstance(task.device, GpuSpec):
        return on_cpu.candidates(task)[:top]
    return _best(task, top, describable, spilling=True)


@one_at_a_time
def by_lower_bound(task: KernelTask, *, top: int = 10, describable: bool = True) -> list[Candidate]:
    """Return up to `top` candidates, ordered by their times without spilling, which are also their
    estimates. Raises Unsupported.

    These times are lower bounds, so compiling in this order can stop at the first result that beats
    the next bound.
    """
    return _best(task, top, describable, spilling=False)


def best_of(task: KernelTask) -> Candidate:
    """Return the first candidate of `propose`. Raises Unsupported."""
    key = "best", task.kernel, task.joined, task.device
    return task.memo.once(key, lambda: propose(task, top=1)[0])


@one_at_a_time
def invariant_config(task: KernelTask) -> TileConfig:
    """Return the config of a kernel for all batch-invariant problems that differ only in batch,
    lengths and pages. Kernels for whole and for paged keys sum in the same order. Raises
    Unsupported."""
    problem = replace(task.problem.rounded, page=0)
    return propose(
        KernelTask(task.spec.unpaged or task.spec, problem, task.gpu), top=1, describable=False
    )[0].config


def joining(task: KernelTask) -> KernelTask:
    """Give a task that joins splits the model's splits. Other tasks are returned unchanged. Raises
    Unsupported."""
    before = task.before
    if before is None or task.joined:
        return task
    return replace(task, joined=best_of(before).config)


def _best(task: KernelTask, top: int, describable: bool, *, spilling: bool) -> list[Candidate]:
    task, device = joining(task), task.gpu
    if task.problem.dtype == "bf16" and not on_tensor_cores("bf16", device.arch):
        say_once(
            f"{device.title} ({device.arch}) has no tensor cores for bf16: products run as fp32 "
            f"multiply-adds, at {device.vector_flops_32 / device.tensor_flops_16:.0%} of the speed "
            "of fp16; use fp16, or a GPU from sm_80 on"
        )
    configs = legal_configs(task, describable=describable)
    best = _fastest(task, configs, top, spilling=spilling) or _last_resort(task, configs, top)
    if not best:
        smallest = min(footprint(Tiled(task, config)).smem_bytes for config in configs)
        raise Unsupported(
            f"expected a {task.kernel} tile within {device.smem_per_block} bytes of shared memory "
            f"on {device.name}, found none for {task.problem.key}: the smallest needs {smallest}"
        )
    return [_candidate(Tiled(task, config), time, needs) for time, config, needs in best]


def _fastest(
    task: KernelTask, configs: Sequence[TileConfig], top: int, *, spilling: bool
) -> list[TimedConfig]:
    """Return the `top` fastest configs that fit and do not surely spill too much, timed with or
    without their predicted spills.

    A config is skipped, and its tiles are not counted, if the time of the SMs' units or of L2 alone
    exceeds the best time so far.
    """
    timed: list[TimedConfig] = []
    best: list[float] = []  # a heap of the `top` shortest times, negated
    by_code: dict[TileConfig, list[Tiled]] = {}
    for config in configs:
        tiled = Tiled(task, config)
        by_code.setdefault(_plain(tiled), []).append(tiled)
    launch, kept = launch_seconds(task, 1), kept_entries(task)
    bounds = [(_least_seconds(Tiled(task, plain), launch, kept), plain) for plain in by_code]
    for least, plain in sorted(bounds):
        if len(best) == top and least > -best[0]:
            break
        promising = [tiled for tiled in by_code[plain] if _is_promising(tiled)]
        full = len(best) == top
        if not promising or (full and _least_as_counted(Tiled(task, plain), launch) > -best[0]):
            continue
        for tiled in promising:
            needs = footprint(tiled)
            if not spilling and needs.spill_bytes:
                predicted = time(tiled, replace(needs, registers=needs.max_registers))
            else:
                predicted = time(tiled, needs)
            timed.append((predicted, tiled.config, needs))
            heapq.heappush(best, -predicted.cost)
            if len(best) > top:
                heapq.heappop(best)
    return _ranked(timed)[:top]


def _last_resort(task: KernelTask, configs: Sequence[TileConfig], top: int) -> list[TimedConfig]:
    """Return the `top` fastest configs that spill too much, or that by prediction just fail to
    fit."""
    needed = [(config, footprint(Tiled(task, config))) for config in configs]
    fitting = [pair for pair in needed if pair[1].fits(task.gpu)]
    if not fitting:
        fitting = [pair for pair in needed if pair[1].may_fit(task.gpu)]
    legal = [pair for pair in fitting if not pair[1].surely_spills]
    # If every config spills too much, the configs that spill least.
    least = sorted(fitting, key=lambda pair: (pair[1].registers, pair[0]))[: max(top, 20)]
    return _ranked(
        [(time(Tiled(task, config), needs), config, needs) for config, needs in legal or least]
    )[:top]


def _ranked(times: list[TimedConfig]) -> list[TimedConfig]:
    # Configs of equal tile and time are ordered by their probability to spill.
    return sorted(
        times,
        key=lambda timed: (
            timed[0].cost,
            timed[0].busy_seconds,
            not timed[1].descriptors,
            timed[1],
        ),
    )


def _is_promising(tiled: Tiled) -> bool:
    """Return True if a config is worth timing: it fits, is unlikely to spill, and uses tensor
    descriptors only if it would spill without them. Descriptors save registers, and little else
    (templates/README.md)."""

    def compute() -> bool:
        needs, config = footprint(tiled), tiled.config
        if needs.surely_spills or not needs.fits(tiled.gpu):
            return False
        plain = Tiled(tiled.task, without(config))
        return not config.descriptors or footprint(plain).spill_bytes > 0

    return tiled.by_config("promising", compute)


def _plain(tiled: Tiled) -> TileConfig:
    """Return the config without pipeline and descriptors, which several configs share."""
    config = tiled.config
    return tiled.by_config("plain", lambda: replace(config, num_stages=1, descriptors=False))


def _least_seconds(plain: Tiled, launch: float, kept: int) -> float:
    """Return a lower bound on the time [s] of all configs with this tile and these warps, for any
    number of stages and any loads. The number of steps is what `kept` scores would fill."""
    steps = kept / (plain.config.rows * plain.config.block_n)
    return launch + least_seconds(plain.gpu, step_clocks(plain), steps)


def _least_as_counted(plain: Tiled, launch: float) -> float:
    """Return a lower bound on the time [s] from the visited tiles, which takes longer to
    compute."""
    run, device = launches(plain), plain.gpu
    on_sms = least_seconds(device, step_clocks(plain), float(run.steps), masked=run.masked)
    return launch + max(on_sms, l2_seconds(device, traffic(plain)))


def _candidate(tiled: Tiled, time: Time, needs: Footprint) -> Candidate:
    cost = _cost(tiled, time, needs)
    return Candidate(
        kernel=cost.kernel, config=cost.config, estimate=cost, reason=reason_of(tiled, cost)
    )


def _cost(tiled: Tiled, time: Time, needs: Footprint) -> CostEstimate:
    moved = traffic(tiled)
    return CostEstimate(
        kernel=tiled.spec.name,
        config=tiled.config,
        read_bytes=moved.read_bytes,
        write_bytes=moved.write_bytes,
        dram_bytes=time.dram_bytes,
        lower_bound_bytes=lower_bound_bytes(tiled.task),
        smem_bytes=needs.smem_bytes,
        registers=needs.registers,
        flops=time.flops,
        seconds=time.seconds,
        limit=time.limit,
        terms=time.terms,
        waves=time.waves,
        cost=time.cost,
    )


def _with_splits(tiled: Tiled) -> Tiled:
    return Tiled(joining(tiled.task), tiled.config)


@one_at_a_time
def estimate(tiled: Tiled) -> CostEstimate:
    """Predict the cost of a config, legal or not. A kernel that joins splits is predicted for the
    task's splits, or else for the model's."""
    if not isinstance(tiled.device, GpuSpec):
        return on_cpu.estimate(tiled)
    tiled = _with_splits(tiled)
    needs = footprint(tiled)
    return _cost(tiled, time(tiled, needs), needs)


@one_at_a_time
def candidate_of(tiled: Tiled) -> Candidate:
    """Return a config as a candidate of `propose`, whatever its rank."""
    if not isinstance(tiled.device, GpuSpec):
        return on_cpu.candidate_of(tiled)
    tiled = _with_splits(tiled)
    needs = footprint(tiled)
    return _candidate(tiled, time(tiled, needs), needs)


@one_at_a_time
def time_as_compiled(tiled: Tiled, built: Resources, *, stages: int | None = None) -> Time:
    """Predict the time of a config from the resources that the compiler reports, and from the
    instructions of a step if its machine code was read.

    The code may have been compiled with another number of `stages`. Then shared memory, which alone
    depends on stages, is predicted.
    """
    tiled = _with_splits(tiled)
    needs = footprint(tiled)
    used = needs.as_compiled(built)
    if stages not in (None, tiled.config.num_stages):
        used = replace(used, smem_bytes=needs.smem_bytes)
    code = built.step_code
    return time(tiled, used, clocks_as_compiled(code, tiled.gpu) if code else None)


def search_space(task: KernelTask) -> list[TileConfig]:
    """Return the configs that a tuner may try: all that are predicted to fit, and all that may fit
    once compiled."""
    if not isinstance(task.device, GpuSpec):
        return on_cpu.tuned_space(task)
    needs = {config: footprint(Tiled(task, config)) for config in legal_configs(task)}
    return [
        config
        for config, need in needs.items()
        if need.may_fit(task.gpu) and need.registers <= REGISTER_DOUBT * need.max_registers
    ]


def ranked_space(
    task: KernelTask, space: Sequence[TileConfig] | None = None
) -> tuple[list[TileConfig], list[Candidate]]:
    """Return the configs that a tuner tries, in the model's order, and the model's candidates among
    them.

    `space` defaults to all configs that fit, or to the model's proposals if nothing fits well.
    """
    if not isinstance(task.device, GpuSpec):
        proposed = on_cpu.candidates(task, space or on_cpu.tuned_space(task))
        return [candidate.config for candidate in proposed], proposed
    candidates = propose(task, top=2**16)
    if space is None:
        space = search_space(task)
    else:
        legal = set(space)
        candidates = [candidate for candidate in candidates if candidate.config in legal]
    return list(dict.fromkeys([*(each.config for each in candidates), *space])), candidates
