"""The whole compiler on one screen: from a problem and a device to the kernels that compute it.

    AttentionProblem -> normal form -> families -> KernelTask -> ranked configs
    -> Choice: agreed, or recorded, or tuned, or the fastest that compiles to a usable kernel
    -> emitted kernels

Calls, bundles, ranks and every command take this path, and differ in where they stop. Bundles
compile in a pool of processes, all others in this process. On a processor, choices do not depend on
machine code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from subprocess import SubprocessError
from typing import TYPE_CHECKING

from tilegen.check import in_child
from tilegen.choose.choice import Choice, Origin, Shortlist
from tilegen.choose.families import families_used
from tilegen.choose.records import Records
from tilegen.disk import log, say_once
from tilegen.emit.identity import RenderedKernel, rows_are_aligned
from tilegen.emit.kernel_files import emitted
from tilegen.errors import BuildFailed, TilegenError
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.descriptors import why_not_described, without
from tilegen.kernels.spec import Direction, FamilySpec
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

if TYPE_CHECKING:
    from tilegen.device import Device
    from tilegen.model.resources import Resources

MAX_COMPILES = 20
"""Maximum number of candidates to compile while none is usable."""
ENOUGH = 6
"""Maximum number of candidates to compile once one of them is usable."""
MIN_GAIN = 0.02
"""Skip a config that can be at most this fraction faster than the best so far."""

Compile = Callable[[Tiled], "Resources | BuildFailed"]
"""Compiles a config; returns its resources, or the error that stopped the compiler."""


def choose(
    problem: AttentionProblem,
    device: Device,
    direction: Direction | None = None,
    *,
    aligned: bool = True,
    describable: bool = True,
    may_tune: bool = False,
    may_compile: bool = False,
    deterministic: bool | None = None,
) -> dict[Kernel, Choice]:
    """Choose the kernels that compute a problem, or one of its passes, and a config for each.

    With `may_compile`, the model's configs are compiled in this process until one is usable, for
    tensors that are `aligned` or not. Tensors that are not `describable` are not loaded through
    tensor descriptors. With `may_tune`, a kernel without a record is tuned first if TILEGEN_TUNE=1
    is set. See `Records` for `deterministic`. Raises Unsupported.
    """
    # AttentionProblem -> Records: the problem in normal form, with its records
    roles = aligned and describable
    records = Records(problem, device, deterministic=deterministic, roles=roles)
    # Records -> [FamilySpec]: fixed before anything compiles, one for each pass
    families: tuple[FamilySpec, ...] = families_used(records, direction)
    compile = compiler_here(aligned=aligned) if may_compile else None
    chosen: dict[Kernel, Choice] = {}
    for family in families:
        for kernel in family.names:
            # Kernel -> KernelTask: a kernel that joins splits is chosen after the kernel that makes
            # them
            task: KernelTask = joined_to(records.task(kernel), chosen)
            # KernelTask -> Ranked
            ranked: Shortlist = rank(
                records,
                task,
                describable=aligned and describable,
                may_tune=may_tune,
                may_compile=may_compile,
            )
            # Ranked -> Choice
            chosen[kernel] = replace(settle(ranked, compile), library=family.library)
    return chosen


def joined_to(task: KernelTask, chosen: Mapping[Kernel, Choice]) -> KernelTask:
    """Add the config of the splits, if it is among `chosen`, to a task that joins them. Other tasks
    are returned unchanged."""
    before = task.before
    if before is None or before.kernel not in chosen:
        return task
    return replace(task, joined=chosen[before.kernel].config)


def choose_kernel(
    task: KernelTask,
    *,
    may_tune: bool = False,
    may_compile: bool = False,
    deterministic: bool | None = None,
) -> Choice:
    """Choose the config of one kernel, as `choose` does for the kernels of a pass."""
    records = Records(task.problem, task.device, deterministic=deterministic)
    compile = compiler_here(aligned=True) if may_compile else None

    def chosen(task: KernelTask) -> Choice:
        if task.before and task.joined is None:
            task = replace(task, joined=chosen(task.before).config)
        return settle(rank(records, task, may_tune=may_tune, may_compile=may_compile), compile)

    return chosen(task)


def rank(
    records: Records,
    task: KernelTask,
    *,
    describable: bool = True,
    may_tune: bool = False,
    may_compile: bool = False,
) -> Shortlist:
    """Return the configs to use, best first: a known config, or else the model's best.

    With `may_compile`, the model's first MAX_COMPILES configs are returned, in the order in which
    to compile them. If device, problem or tensors (`describable=False`) rule out tensor
    descriptors, a known config is used without them. Raises Unsupported.
    """
    kernel, problem = task.kernel, task.problem
    why_not = why_not_described(
        task.spec,
        problem.dtype,
        aligned=describable and rows_are_aligned(problem),
        arch=task.device.arch,
    )

    def known(config: TileConfig, origin: Origin, source: str) -> Shortlist:
        if config.descriptors and why_not:
            source += f"; tiles are loaded by addresses: {why_not}"
            config = without(config)
        return Shortlist(task, (config,), origin, source)

    if task.in_order and not isinstance(task.device, GpuSpec):
        from tilegen.choose.on_cpu import usual_config

        return known(usual_config(task), "model", "rules, for any batch, lengths and pages")
    if task.in_order:
        from tilegen.choose.ranker import invariant_config

        # Records are ignored: problems that must give the same bits may have different records.
        return known(invariant_config(task), "model", "the model, for any batch, lengths and pages")
    if config := records.agreed(kernel):
        return known(config, "agreement", "all ranks agreed")
    entry = records.own(kernel)
    if entry is None and may_tune and (config := records.tuned(kernel)):
        return known(config, "tuning", "tuned now")
    if entry := entry or records.borrowed(kernel):
        return known(entry.record.config, "record", str(entry))
    return _by_model(task, describable=describable, may_compile=may_compile)


def _by_model(task: KernelTask, *, describable: bool, may_compile: bool) -> Shortlist:
    if not isinstance(task.device, GpuSpec):
        from tilegen.choose.on_cpu import chosen_config

        return Shortlist(task, (chosen_config(task),), "model", "the model")
    from tilegen.choose.ranker import by_lower_bound, propose

    ask, top = (by_lower_bound, MAX_COMPILES) if may_compile else (propose, 1)
    candidates = ask(task, top=top, describable=describable)
    if task.spec.specialised and (checked := in_child.passed(task)):
        candidates = [one for one in candidates if one.config in checked]
        if not candidates:
            return Shortlist(task, tuple(checked), "model", "the configs that passed their check")
    configs = tuple(candidate.config for candidate in candidates)
    return Shortlist(task, configs, "model", "the model", tuple(candidates))


def settle(ranked: Shortlist, compile: Compile | None) -> Choice:
    """Compile the model's configs for a GPU and choose the best usable one. With `compile=None`,
    for a known config, or on a processor, the first config is chosen and nothing is compiled."""
    by_code = ranked.origin == "model" and isinstance(ranked.task.device, GpuSpec)
    if compile is not None and by_code:
        try:
            return best_acceptable(ranked, compile)
        except (TilegenError, OSError, SubprocessError) as error:  # the launch raises it again
            say_once(f"no kernel could be compiled ahead of the launch: {error}")
    return Choice(config=ranked.configs[0], ranked=ranked)


def choose_by_model(task: KernelTask) -> Choice:
    """Choose the model's best config that compiles here to a usable kernel, for dense tensors and
    without records. Raises Unsupported and BuildFailed."""
    if task.before and task.joined is None:
        task = replace(task, joined=choose_by_model(task.before).config)
    ranked = _by_model(task, describable=True, may_compile=True)
    return best_acceptable(ranked, compiler_here(aligned=rows_are_aligned(task.problem)))


def compiler_here(*, aligned: bool) -> Compile:
    """Return a function that compiles a config in this process, for aligned tensors or not."""
    from tilegen.compiling.verdicts import verdict

    return partial(verdict, aligned=aligned)


def best_acceptable(ranked: Shortlist, compile: Compile) -> Choice:
    """Choose the usable config that is fastest by its machine code, or else by the resources that
    the compiler reports.

    Each tile is compiled once before any tile is compiled again with other stages or loads. A
    config is skipped if it can be at most MIN_GAIN faster than the best so far. Its lower bound is
    the predicted time without spilling, or the time of the same tile's code compiled with other
    stages. If no config is usable, the config that spills least is chosen. Raises BuildFailed if no
    config compiles and fits.
    """
    from tilegen.compiling.acceptable import acceptable, first_that_fits

    task = ranked.task
    at_best = {candidate.config: candidate.estimate.cost for candidate in ranked.candidates}
    tried: dict[TileConfig, Resources | BuildFailed] = {}
    seconds: dict[TileConfig, float] = {}
    for config in _by_tile(ranked.configs):
        if seconds and len(tried) >= ENOUGH:
            break
        if seconds and min(seconds.values()) <= (1 + MIN_GAIN) * at_best[config]:
            continue
        tried[config] = built = compile(task.tiled(config))
        if isinstance(built, BuildFailed) or not acceptable(built, task.gpu):
            continue
        if not at_best:  # known, so there is no prediction
            return Choice(config=config, ranked=ranked, tried=tried)
        from tilegen.choose.ranker import time_as_compiled

        seconds[config] = time_as_compiled(task.tiled(config), built).cost
        for other in ranked.configs:  # same code, except for the depth of its pipeline
            if other not in tried and replace(other, num_stages=config.num_stages) == config:
                shared = time_as_compiled(task.tiled(other), built, stages=config.num_stages)
                # Without a pipeline, the compiler emits different code.
                is_read = built.step_code and min(other.num_stages, config.num_stages) > 1
                at_best[other] = shared.cost if is_read else min(at_best[other], shared.cost)
    if seconds:
        best = min(seconds, key=lambda config: seconds[config])
        return Choice(config=best, ranked=ranked, tried=tried, seconds=seconds)
    config = list(tried)[first_that_fits(list(tried.values()), task.gpu)]
    return Choice(config=config, ranked=ranked, tried=tried)


def _by_tile(configs: Sequence[TileConfig]) -> list[TileConfig]:
    """Order configs so that the first config of every tile comes before the second of any."""
    seen: Counter[tuple[int, ...]] = Counter()
    order: list[tuple[int, TileConfig]] = []
    for config in configs:
        tile = *config.tile, config.num_warps
        order.append((seen[tile], config))
        seen[tile] += 1
    return [config for _, config in sorted(order, key=lambda pair: pair[0])]


def emit(chosen: Mapping[Kernel, Choice], *, aligned: bool) -> dict[Kernel, RenderedKernel]:
    """Return the text of each kernel, from its file or rendered."""
    kernels: dict[Kernel, RenderedKernel] = {}
    for kernel, choice in chosen.items():
        problem, config = choice.tiled.problem, choice.config
        log.debug("%s for '%s': %s, from %s", kernel, problem, config, choice.source)
        kernels[kernel] = emitted(problem, config, kernel, aligned=aligned)
    return kernels
