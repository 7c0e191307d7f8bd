"""Explain the tile of a kernel on a GPU: formulas, numbers, bounds, and the next best configs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilegen.choose.choice import Choice
from tilegen.choose.ranker import candidate_of, estimate, joining, propose
from tilegen.choose.reason import limit_in_words
from tilegen.emit.identity import rows_are_aligned
from tilegen.errors import Unsupported
from tilegen.explaining.alternatives import compared
from tilegen.explaining.common import bound_facts, choice_line, splits_in_words, traffic_facts
from tilegen.explaining.formulas import (
    dram_bytes,
    dram_formulas,
    kernel_values,
    level_values,
    named,
    sweeps_of_heads,
)
from tilegen.explaining.gpu_records import (
    Composition,
    DramFacts,
    FootprintFacts,
    KernelExplanation,
    NextBest,
    TimeFacts,
    Wave,
)
from tilegen.explaining.mask_effect import explain_mask
from tilegen.kernels.config import TileConfig
from tilegen.kernels.descriptors import why_not_described
from tilegen.kernels.registry import check_config
from tilegen.model import dram, time
from tilegen.model.estimate import Candidate, CostEstimate
from tilegen.model.footprint import footprint
from tilegen.model.launches import launches
from tilegen.model.on_chip import TENSOR_MEMORY_COLUMNS, residents
from tilegen.model.traffic import Traffic
from tilegen.model.visits import visits
from tilegen.task import KernelTask, Tiled
from tilegen.units import ratio_text


def explain(
    task: KernelTask, config: TileConfig | None = None, choice: Choice | None = None
) -> KernelExplanation:
    """Explain a config of a kernel: `config`, the config of a choice, or by default the model's
    first. Raises Unsupported."""
    asked = config is not None
    if config is not None:
        check_config(config, task.kernel)
    elif choice is not None:
        config = choice.config
    task = joining(task)
    ranked = propose(task, top=4)
    device = task.gpu
    chosen = ranked[0] if config is None else _candidate(task.tiled(config), ranked, choice)
    tiled = task.tiled(chosen.config)
    others = [candidate for candidate in ranked if candidate.config != chosen.config][:3]
    cost = chosen.estimate
    return KernelExplanation(
        problem=task.problem.key,
        gpu=device.name,
        fast_memory=device.smem_per_block,
        kernel=task.kernel,
        config=chosen.config,
        tile=tiled.spec.loop.tile(chosen.config),
        choice=choice_line(choice, asked=asked),
        model_config=ranked[0].config.key,
        reason=chosen.reason,
        splits=splits_in_words(tiled),
        loads=_loads(tiled),
        mask=explain_mask(task, chosen),
        tiles=visits(tiled),
        traffic=traffic_facts(tiled, cost),
        dram=_dram(tiled, cost),
        bound=bound_facts(task, moved=cost.read_bytes + cost.write_bytes),
        footprint=FootprintFacts(
            smem_bytes=cost.smem_bytes,
            registers=cost.registers,
            programs_per_sm=_residents(tiled),
        ),
        time=_time(tiled, cost),
        waits_for=limit_in_words(tiled, cost),
        next_best=tuple(_next_best(task, chosen, other) for other in others),
    )


def _loads(tiled: Tiled) -> str:
    """Describe how streamed tiles are loaded, and why not through tensor descriptors; empty for
    kernels that never use descriptors."""
    spec, config = tiled.spec, tiled.config
    if not spec.described:
        return ""
    names = " and ".join(spec.described)
    if config.descriptors:
        return f"{names} through tensor descriptors"
    aligned = rows_are_aligned(tiled.problem)
    arch = tiled.gpu.arch
    reason = why_not_described(spec, tiled.problem.dtype, aligned=aligned, arch=arch)
    return f"{names} by addresses" + (f": {reason}" if reason else f"; by TMA with {config.key}t")


def _candidate(tiled: Tiled, ranked: Sequence[Candidate], choice: Choice | None) -> Candidate:
    for candidate in ranked:
        if candidate.config == tiled.config:
            return candidate
    _check_fits(tiled)
    if choice is not None:
        return candidate_of(tiled)
    cost = estimate(tiled)
    ratio = ratio_text(cost.seconds / ranked[0].estimate.seconds)
    reason = f"asked for; predicted to take {ratio} times as long as the model's choice"
    return Candidate(kernel=cost.kernel, config=tiled.config, estimate=cost, reason=reason)


def _check_fits(tiled: Tiled) -> None:
    """Raise Unsupported for a config that does not fit, whose time cannot be predicted."""
    needs, device = footprint(tiled), tiled.gpu
    if needs.may_fit(device):
        return
    columns = f" and {needs.columns} columns of tensor memory" if needs.columns else ""
    limits = f" and {TENSOR_MEMORY_COLUMNS}" if needs.columns else ""
    raise Unsupported(
        f"expected a config that fits on {device.name}, got {tiled.config.key}: "
        f"{tiled.spec.name} would need {needs.smem_bytes} bytes of shared memory{columns}, of "
        f"{device.smem_per_block}{limits}; choose smaller tiles or fewer stages"
    )


def _dram(tiled: Tiled, cost: CostEstimate) -> DramFacts:
    """Explain the bytes between L2 and DRAM; for sliced kernels there is no formula."""
    task, kernel, pairs = tiled.task, tiled.spec.name, tiled.problem.pair_lse
    order, in_keys = dram.order_of(task), task.values_in_keys
    # Panels stay in L2 between kernels, so a bound that reads them from DRAM does not apply.
    bound = None if tiled.spec.panel else dram.dram_bound_bytes(task)
    formulas = dram_formulas(kernel, order, in_keys, pairs)
    values: dict[str, float] = {}
    wave = None
    if formulas:
        levels = dram.levels(tiled)
        known = kernel_values(tiled) | level_values(tiled, levels)
        used = [dram_bytes(kernel, in_keys, pairs), sweeps_of_heads(order)]
        values = named(known, used[: len(formulas)])
        wave = Wave(
            programs=levels.in_flight,
            heads=levels.live_heads,
            heads_in_l2=levels.heads_in_l2 if math.isfinite(levels.heads_in_l2) else None,
            part_of_head=levels.part_of_head,
            sweeps=levels.sweeps,
        )
    return DramFacts(
        bytes=cost.dram_bytes,
        bound_bytes=bound,
        ratio=cost.dram_bytes / bound if bound else None,
        formulas=formulas,
        values=values,
        wave=wave,
    )


def _time(tiled: Tiled, cost: CostEstimate) -> TimeFacts:
    """Explain the parts of the predicted time; see `time.time`."""
    run = launches(tiled)
    moved = Traffic(read_bytes=cost.read_bytes, write_bytes=cost.write_bytes)
    shares = {
        "l2": time.l2_seconds(tiled.gpu, moved, run.programs / run.count),
        "dram": dict(cost.terms)["dram"],
    }
    launch = time.launch_seconds(tiled.task, run.count)
    running = cost.seconds - launch
    largest = max(shares, key=lambda name: shares[name])
    # Programs bound the time unless the traffic of L2 or of DRAM takes longer.
    by_programs = running > shares[largest] * (1 + 1e-9)
    return TimeFacts(
        seconds=cost.seconds,
        limit=cost.limit,
        flops=cost.flops,
        waves=cost.waves,
        terms=dict(cost.terms),
        composition=Composition(
            largest="programs" if by_programs else largest,
            programs=running if by_programs else None,
            l2=shares["l2"],
            dram=shares["dram"],
            launch=launch,
            launches=run.count,
            # As in `time.time`: unequal programs fill the last wave, except for a tail.
            equal_programs=run.longest * run.programs == run.steps,
            overlap_norm=time.OVERLAP_NORM,
        ),
    )


def _next_best(task: KernelTask, chosen: Candidate, other: Candidate) -> NextBest:
    """Compare a candidate with the chosen candidate."""
    both = task.tiled(chosen.config), task.tiled(other.config)
    together = _residents(both[0]), _residents(both[1])
    steps = round(visits(both[0]).tiles), round(visits(both[1]).tiles)
    own: list[str] = []
    if steps[0] != steps[1]:
        own.append(f"{steps[1]} steps a head, not {steps[0]}")
    if together[0] != together[1]:
        own.append(f"{together[1]} program{'s' * (together[1] > 1)} per SM, not {together[0]}")
    waves = [f"{candidate.estimate.waves:.1f}" for candidate in (other, chosen)]
    if waves[0] != waves[1]:
        own.append(f"{waves[0]} waves, not {waves[1]}")
    return NextBest(
        **compared(chosen, other, own),
        steps=steps[1],
        programs_per_sm=together[1],
        waves=other.estimate.waves,
    )


def _residents(tiled: Tiled) -> int:
    return residents(footprint(tiled), tiled.gpu, tiled.config)
