"""The whole compiler on one screen: from a problem and a GPU to the kernels that compute it.

    AttentionProblem -> normal form -> families -> ranked configs
    -> agreed, or recorded, or tuned, or the best that compiles to what may be used -> modules

Calls, bundles, ranks and every command go this way; they differ in where they stop, and bundles in
how they compile: not in this process, but in a pool of others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from subprocess import SubprocessError
from types import ModuleType
from typing import TYPE_CHECKING

from tilegen.choose.chosen import Chosen, Origin, Ranked
from tilegen.choose.families import kernels_used
from tilegen.choose.known import Known
from tilegen.cpu import executable, runs_compiled
from tilegen.disk import log, say_once
from tilegen.emit.identity import rows_are_aligned
from tilegen.emit.kernel_files import load_kernel
from tilegen.errors import BuildFailed, TilegenError
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.descriptors import why_not_described, without
from tilegen.kernels.registry import KERNELS
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from tilegen.gpus.spec import GpuSpec
    from tilegen.model.resources import Resources

ASKED = 20
"""Number of the model's candidates that the compiler may be asked about until one may be used."""
TRIED = 6
"""Number of candidates that are compiled, at most, where one of them may be used."""
CLOSE = 0.02
"""Part of its time that a config may win over the one in hand and not be worth compiling."""


def choose(
    problem: AttentionProblem,
    gpu: GpuSpec,
    direction: Direction | None = None,
    *,
    aligned: bool = True,
    describable: bool = True,
    may_tune: bool = False,
    may_compile: bool = False,
    deterministic: bool | None = None,
) -> dict[Kernel, Chosen]:
    """Return the kernels that compute a problem, or one of its passes, and a config for each.

    With `may_compile` the model's configs are compiled in this process, for tensors that are
    `aligned` or not, until one may be used. Tensors that are not `describable` are not loaded
    through tensor descriptors. With `may_tune` a kernel without a record is tuned
    first if TILEGEN_TUNE=1 is set. See `Known` for `deterministic`. Raises Unsupported.
    """
    # AttentionProblem -> Known: the problem in normal form, with its records
    known = Known(problem, gpu, deterministic=deterministic)
    # Known -> [Kernel]
    kernels: tuple[Kernel, ...] = kernels_used(known, direction)
    # [Kernel] -> {Kernel: Ranked}
    ranked: dict[Kernel, Ranked] = {
        kernel: rank(
            known,
            kernel,
            describable=aligned and describable,
            may_tune=may_tune,
            may_compile=may_compile,
        )
        for kernel in kernels
    }
    # {Kernel: Ranked} -> {Kernel: Chosen}
    chosen: dict[Kernel, Chosen] = {
        kernel: settle(known, one, aligned=aligned, may_compile=may_compile)
        for kernel, one in ranked.items()
    }
    return chosen


def choose_kernel(
    problem: AttentionProblem,
    gpu: GpuSpec,
    kernel: Kernel,
    *,
    may_tune: bool = False,
    may_compile: bool = False,
    deterministic: bool | None = None,
) -> Chosen:
    """Return the config to use for one kernel, as `choose` does for those of a pass."""
    known = Known(problem, gpu, deterministic=deterministic)
    ranked = rank(known, kernel, may_tune=may_tune, may_compile=may_compile)
    return settle(known, ranked, aligned=True, may_compile=may_compile)


def rank(
    known: Known,
    kernel: Kernel,
    *,
    describable: bool = True,
    may_tune: bool = False,
    may_compile: bool = False,
) -> Ranked:
    """Return the configs to use, best first: one that is known, else the model's best, or with
    `may_compile` the ASKED that a compiler should be asked about, in that order.

    Where GPU, problem or tensors (`describable=False`) forbid tensor descriptors, a config that is
    known with them is used without. Raises Unsupported.
    """
    why_not = why_not_described(
        KERNELS[kernel],
        known.problem.dtype,
        aligned=describable and rows_are_aligned(known.problem),
        arch=known.gpu.arch,
    )

    def one(config: TileConfig, origin: Origin, source: str) -> Ranked:
        if config.descriptors and why_not:
            source += f"; tiles are loaded by addresses: {why_not}"
            config = without(config)
        return Ranked(kernel, (config,), origin, source)

    if known.problem.invariant and KERNELS[kernel].in_order:
        from tilegen.choose.ranking import invariant_config  # loads SymPy

        # Records have no say: those of other problems, whose rows are to give the same, may differ.
        config = invariant_config(known.problem, known.gpu, kernel)
        return one(config, "model", "the model, for any batch, lengths and pages")
    if config := known.agreed(kernel):
        return one(config, "agreement", "all ranks agreed")
    found = known.own(kernel)
    if found is None and may_tune and (config := known.tuned(kernel)):
        return one(config, "tuning", "tuned now")
    if found := found or known.borrowed(kernel):
        return one(found.record.config, "record", str(found))
    return _by_model(known.problem, known.gpu, kernel, describable, may_compile)


def _by_model(
    problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel, describable: bool, may_compile: bool
) -> Ranked:
    from tilegen.choose.ranking import hopefuls, propose  # load SymPy

    ask, top = (hopefuls, ASKED) if may_compile else (propose, 1)
    candidates = ask(problem, gpu, kernel=kernel, top=top, describable=describable)
    configs = tuple(one.config for one in candidates)
    return Ranked(kernel, configs, "model", "the model", tuple(candidates))


def settle(known: Known, ranked: Ranked, *, aligned: bool, may_compile: bool) -> Chosen:
    """Return the best of the model's configs that compile here to what may be used, if anything may
    be compiled; what is known is taken as it is."""
    if may_compile and ranked.origin == "model":
        try:
            return _best_compiled_here(known.problem, known.gpu, ranked, aligned)
        except (TilegenError, OSError, SubprocessError) as error:  # the launch says what is wrong
            say_once(f"compiled nothing ahead: {error}")
    return Chosen(config=ranked.configs[0], ranked=ranked)


def choose_by_model(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> Chosen:
    """Return what a call with dense tensors settles on where nothing is recorded: the best of the
    model's configs that compile here to what may be used. Raises Unsupported and BuildFailed."""
    problem = problem.normal()
    ranked = _by_model(problem, gpu, kernel, describable=True, may_compile=True)
    return _best_compiled_here(problem, gpu, ranked, rows_are_aligned(problem))


def _best_compiled_here(
    problem: AttentionProblem, gpu: GpuSpec, ranked: Ranked, aligned: bool
) -> Chosen:
    from tilegen.compiling.verdicts import verdict

    def compile(config: TileConfig) -> Resources | BuildFailed:
        return verdict(problem, config, ranked.kernel, gpu.arch, aligned=aligned)

    return best_acceptable(problem, gpu, ranked, compile)


def best_acceptable(
    problem: AttentionProblem,
    gpu: GpuSpec,
    ranked: Ranked,
    compile: Callable[[TileConfig], Resources | BuildFailed],
) -> Chosen:
    """Return the config that is fastest by its machine code, or with what the compiler says that it
    uses, among those that may be used on a GPU.

    Another tile is compiled before the same one with other stages or loads, and none that cannot be
    faster by more than CLOSE: a config takes at best as long as predicted without spilling, or as
    the code of its tile with other stages would, where that was compiled. Where none may be used,
    it is the one that spills least. Raises BuildFailed where none compiles and fits.
    """
    from tilegen.compiling.acceptable import acceptable, first_that_fits

    at_best = {one.config: one.estimate.cost for one in ranked.candidates}
    tried: dict[TileConfig, Resources | BuildFailed] = {}
    seconds: dict[TileConfig, float] = {}
    for config in _by_tile(ranked.configs):
        if seconds and len(tried) >= TRIED:
            break
        if seconds and min(seconds.values()) <= (1 + CLOSE) * at_best[config]:
            continue
        tried[config] = built = compile(config)
        if isinstance(built, BuildFailed) or not acceptable(built, gpu):
            continue
        if not at_best:  # known, not predicted
            return Chosen(config=config, ranked=ranked, tried=tried)
        from tilegen.choose.ranking import time_as_compiled  # loads SymPy

        seconds[config] = time_as_compiled(problem, gpu, config, ranked.kernel, built).cost
        for other in ranked.configs:  # the same code but for the depth of its pipeline
            if other not in tried and replace(other, num_stages=config.num_stages) == config:
                of = problem, gpu, other, ranked.kernel, built
                as_this = time_as_compiled(*of, stages=config.num_stages).cost
                # Without a pipeline the code is another.
                is_read = built.step_code and min(other.num_stages, config.num_stages) > 1
                at_best[other] = as_this if is_read else min(at_best[other], as_this)
    if seconds:
        best = min(seconds, key=lambda config: seconds[config])
        return Chosen(config=best, ranked=ranked, tried=tried, seconds=seconds)
    config = list(tried)[first_that_fits(list(tried.values()), gpu)]
    return Chosen(config=config, ranked=ranked, tried=tried)


def _by_tile(configs: Sequence[TileConfig]) -> list[TileConfig]:
    """Return configs in their order, but the second of each tile after the first of all."""
    seen: Counter[tuple[int, ...]] = Counter()
    order: list[tuple[int, TileConfig]] = []
    for one in configs:
        tile = one.block_m, one.block_n, one.block_d, one.split_kv, one.num_warps
        order.append((seen[tile], one))
        seen[tile] += 1
    return [config for _, config in sorted(order, key=lambda pair: pair[0])]


def load(
    problem: AttentionProblem,
    chosen: Mapping[Kernel, Chosen],
    *,
    aligned: bool,
    device: torch.device,
) -> dict[Kernel, ModuleType]:
    """Return the module of each kernel for a device: as it is emitted, or compiled for the CPU."""
    modules: dict[Kernel, ModuleType] = {}
    for kernel, one in chosen.items():
        log.debug("%s for '%s': %s, from %s", kernel, problem, one.config, one.source)
        if runs_compiled(device):
            from tilegen.emit.render import render  # loads Jinja and SymPy

            rendered = render(problem.normal(), one.config, kernel, aligned=aligned)
            modules[kernel] = executable(rendered, device)
        else:
            modules[kernel] = load_kernel(problem.normal(), one.config, kernel, aligned=aligned)
    return modules
