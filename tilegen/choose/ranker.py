"""The model's ranking: the configs of a task, the fastest first, with the reason for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilegen.choose import on_cpu
from tilegen.choose.reason import reason_of
from tilegen.choose.search_space import legal_columns
from tilegen.disk import say_once
from tilegen.errors import Unsupported
from tilegen.gpus.nearest import on_tensor_cores
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import OPTIONS, TileConfig
from tilegen.model.as_compiled import clocks_as_compiled
from tilegen.model.bounds import lower_bound_bytes
from tilegen.model.columns import Columns, Tiles, picked, tiles_of
from tilegen.model.estimate import Candidate, CostEstimate
from tilegen.model.footprint import footprint
from tilegen.model.on_chip import Footprint
from tilegen.model.time import Time, time
from tilegen.model.traffic import Traffic, traffic
from tilegen.sympy_lock import one_at_a_time
from tilegen.task import KernelTask, Tiled

if TYPE_CHECKING:
    from tilegen.model.resources import Resources

REGISTER_DOUBT = 1.8
"""Predicted registers per thread, as a multiple of the limit, up to which a tuner compiles a
config. On four GPUs of the catalogue, configs that beat the first choice by machine code are below
it. fp32 slices, 3 % faster, are the exception (benchmarks/results/machine_code.csv)."""


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


@lru_cache(maxsize=256)
def best_of(task: KernelTask) -> Candidate:
    """Return the first candidate of `propose`. Raises Unsupported."""
    return propose(task, top=1)[0]


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
    tiles = Tiles(task, legal_columns(task, describable=describable))
    needs = footprint(tiles)
    places = _promising(tiles, needs)
    if not len(places):
        places, spilling = _last_resort(tiles, needs, top), True
    if not len(places):
        raise Unsupported(
            f"expected a {task.kernel} tile within {device.smem_per_block} bytes of shared memory "
            f"on {device.name}, found none for {task.problem.key}: the smallest needs "
            f"{needs.smem_bytes.min()}"
        )
    tiles, needs = tiles[places], picked(needs, places)
    used = needs
    if not spilling:
        used = replace(needs, registers=np.minimum(needs.registers, needs.max_registers))
    times, moved, least = time(tiles, used), traffic(tiles), lower_bound_bytes(task)
    best: list[Candidate] = []
    for at in _ranked(times, tiles.config)[:top].tolist():
        tiled = Tiled(task, tiles.config.config(at))
        predicted, held, bytes_moved = (picked(record, at) for record in (times, needs, moved))
        cost = _cost(tiled, predicted, held, bytes_moved, least)
        reason = reason_of(tiled, cost, held)
        best.append(
            Candidate(kernel=task.kernel, config=tiled.config, estimate=cost, reason=reason)
        )
    return best


def _promising(tiles: Tiles, needs: Footprint) -> NDArray[np.int64]:
    """Return the places of the configs worth timing.

    They fit, are unlikely to spill, and use tensor descriptors only if they would spill without
    them. Descriptors save registers, and little else (templates/README.md). Kernels whose
    warpgroups have roles use them always.
    """
    described, useful = tiles.config.descriptors, np.True_
    if not described.all():
        plain = np.arange(len(described)) % (len(described) - described.sum())
        useful = ~described | (needs.spill_bytes[plain] > 0)
    return np.flatnonzero(useful & needs.fits(tiles.gpu) & ~np.asarray(needs.surely_spills))


def _last_resort(tiles: Tiles, needs: Footprint, top: int) -> NDArray[np.int64]:
    """Return the places of configs that spill too much, or that by prediction just fail to fit."""
    fitting = np.flatnonzero(needs.fits(tiles.gpu))
    if not len(fitting):
        fitting = np.flatnonzero(needs.may_fit(tiles.gpu))
    legal = fitting[~np.asarray(needs.surely_spills)[fitting]]
    if len(legal):
        return legal
    # If every config spills too much, the configs that spill least.
    order = np.lexsort([*_columns_of(tiles.config[fitting]), needs.registers[fitting]])
    return fitting[order][: max(top, 20)]


def _ranked(times: Time, configs: Columns) -> NDArray[np.int64]:
    # Configs of equal tile and time are ordered by their probability to spill.
    busy = np.broadcast_to(times.busy_seconds, times.cost.shape)
    return np.lexsort([*_columns_of(configs), ~configs.descriptors, busy, times.cost])


def _columns_of(configs: Columns) -> list[NDArray[Any]]:
    """Return the knobs by which configs are sorted, the last first, as `lexsort` takes them."""
    return [getattr(configs, name) for name in reversed(OPTIONS)]


def _cost(tiled: Tiled, time: Time, needs: Footprint, moved: Traffic, least: int) -> CostEstimate:
    return CostEstimate(
        kernel=tiled.spec.name,
        config=tiled.config,
        read_bytes=moved.read_bytes,
        write_bytes=moved.write_bytes,
        dram_bytes=int(time.dram_bytes),
        lower_bound_bytes=least,
        smem_bytes=needs.smem_bytes,
        registers=needs.registers,
        flops=int(time.flops),
        seconds=time.seconds,
        limit=time.limit,
        terms=time.terms,
        waves=time.waves,
        cost=time.cost,
    )


def _with_splits(tiled: Tiled) -> Tiles:
    return tiles_of(joining(tiled.task), [tiled.config])


@one_at_a_time
def estimate(tiled: Tiled) -> CostEstimate:
    """Predict the cost of a config, legal or not. A kernel that joins splits is predicted for the
    task's splits, or else for the model's."""
    if not isinstance(tiled.device, GpuSpec):
        return on_cpu.estimate(tiled)
    tiles = _with_splits(tiled)
    needs = footprint(tiles)
    timed, moved = picked(time(tiles, needs), 0), picked(traffic(tiles), 0)
    return _cost(tiled, timed, picked(needs, 0), moved, lower_bound_bytes(tiles.task))


@one_at_a_time
def candidate_of(tiled: Tiled) -> Candidate:
    """Return a config as a candidate of `propose`, whatever its rank."""
    if not isinstance(tiled.device, GpuSpec):
        return on_cpu.candidate_of(tiled)
    cost = estimate(tiled)
    reason = reason_of(tiled, cost, footprint(tiled))
    return Candidate(kernel=cost.kernel, config=cost.config, estimate=cost, reason=reason)


@one_at_a_time
def time_as_compiled(tiled: Tiled, built: Resources, *, stages: int | None = None) -> Time:
    """Predict the time of a config from the resources that the compiler reports, and from the
    instructions of a step if its machine code was read.

    The code may have been compiled with another number of `stages`. Then shared memory, which alone
    depends on stages, is predicted.
    """
    tiles = _with_splits(tiled)
    needs = footprint(tiles)
    used = needs.as_compiled(built)
    if stages not in (None, tiled.config.num_stages):
        used = replace(used, smem_bytes=needs.smem_bytes)
    code = built.step_code
    return picked(time(tiles, used, clocks_as_compiled(code, tiled.gpu) if code else None), 0)


def search_space(task: KernelTask) -> list[TileConfig]:
    """Return the configs that a tuner may try: all that are predicted to fit, and all that may fit
    once compiled."""
    if not isinstance(task.device, GpuSpec):
        return on_cpu.tuned_space(task)
    tiles = Tiles(task, legal_columns(task))
    needs = footprint(tiles)
    few = needs.registers <= REGISTER_DOUBT * needs.max_registers
    return tiles.config[needs.may_fit(task.gpu) & few].configs


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
