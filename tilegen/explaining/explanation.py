"""Reasons for tiles: the formulas, the numbers, the bound, the runner-up, and what would change the
choice, as plain values, which text.py writes and plot.py draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

from tilegen.choose.fastest import SMEM_DOUBT
from tilegen.choose.ranking import best_of, estimate, joined_splits, propose
from tilegen.emit.identity import rows_are_aligned
from tilegen.errors import Unsupported
from tilegen.explaining.formulas import (
    Values,
    dram_bytes,
    dram_formulas,
    formula,
    kernel_values,
    level_values,
    named,
    sweeps_of_heads,
)
from tilegen.explaining.mask_effect import explain_mask
from tilegen.explaining.pass_choice import (
    OTHER_FAST_MEMORY,
    bound_of,
    explain_pass,
    other_masks,
)
from tilegen.gpus.spec import GpuSpec, with_fast_memory
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.descriptors import why_not_described
from tilegen.kernels.registry import KERNELS, check_config, direction_of, tile_heads
from tilegen.kernels.spec import Direction
from tilegen.kernels.split_kv import is_divided
from tilegen.model import dram, time
from tilegen.model.bounds import complexity, lower_bound
from tilegen.model.estimate import Candidate, CostEstimate
from tilegen.model.footprint import footprint
from tilegen.model.launches import launches
from tilegen.model.on_chip import TENSOR_MEMORY_COLUMNS, residents
from tilegen.model.symbols import H_kv
from tilegen.model.traffic import (
    Traffic,
    Visits,
    splits_of,
    state_bytes,
    table_bytes,
    terms_of,
    total_bytes,
    visits,
)
from tilegen.problem import AttentionProblem
from tilegen.theory.regimes import critical_head_dim

MODELS_FIRST = (
    "the model's first; a call takes a record where there is one, and otherwise compiles a few and "
    "may settle on another: tilegen propose --compile"
)


def explain_all(
    problem: AttentionProblem,
    gpu: GpuSpec,
    kernels: Sequence[Kernel],
    config: TileConfig | None = None,
) -> list[dict[str, Any]]:
    """Return the explanation of each kernel, with that of its pass under `pass`.

    A problem is explained in its normal form; `rewriting` says so in a line.

    Raises Unsupported.
    """
    rewriting, problem = problem.rewriting, problem.normal()
    ways: set[Direction] = {direction_of(kernel) for kernel in kernels}
    passes = {way: explain_pass(problem, gpu, way) for way in ways}
    return [
        explain(problem, gpu, kernel, config)
        | {"rewriting": rewriting, "pass": passes[direction_of(kernel)]}
        for kernel in kernels
    ]


def explain(
    problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel, config: TileConfig | None = None
) -> dict[str, Any]:
    """Return the explanation of one kernel as plain values. Raises Unsupported.

    `config` defaults to the model's choice.
    """
    if config is not None:
        check_config(config, kernel)
    problem = problem.normal()
    ranked = propose(problem, gpu, kernel=kernel, top=4)
    chosen = ranked[0] if config is None else _candidate(problem, gpu, kernel, config, ranked)
    others = [c for c in ranked if c.config != chosen.config][:3]
    cost = chosen.estimate
    least = cost.lower_bound_bytes  # 0 where no pair is kept and all results are intermediates
    counts = visits(problem, chosen.config.block_m, chosen.config.block_n, kernel)
    direction = direction_of(kernel)
    joined = joined_splits(problem, gpu, kernel)
    values = kernel_values(problem, gpu, kernel, chosen.config, counts, joined)
    in_keys = KERNELS[kernel].values_in_keys(problem)
    moved = terms_of(kernel, values_in_keys=in_keys, pairs=problem.pair_lse)
    both_ways = H_kv * total_bytes(moved)
    bound = bound_of(problem, gpu, kernel)
    return {
        "problem": problem.key,
        "gpu": gpu.name,
        "fast_memory": gpu.smem_per_block,
        "kernel": kernel,
        "config": asdict(chosen.config),
        "choice": MODELS_FIRST if config is None else "",
        "reason": chosen.reason,
        "splits": _splits(problem, gpu, kernel, chosen.config),
        "loads": _loads(problem, gpu, kernel, chosen.config),
        "mask": explain_mask(problem, gpu, kernel, chosen),
        "tiles": {
            name: float(n) if isinstance(n, Fraction) else n for name, n in asdict(counts).items()
        },
        "traffic": {
            "formula": [
                {
                    "tensor": term.tensor,
                    "direction": term.direction,
                    "words": str(term.words),
                    "latex": formula(term.tensor, term.words)["latex"],
                    "size": term.size,
                }
                for term in moved
            ],
            "bytes": formula("bytes", both_ways),
            "values": named(values, [both_ways]),
            "seed_bytes": state_bytes(problem, chosen.config, kernel, counts),
            "table_bytes": table_bytes(problem, chosen.config, kernel, counts),
            "read_bytes": cost.read_bytes,
            "write_bytes": cost.write_bytes,
            "dram_bytes": cost.dram_bytes,
        },
        "dram": _dram(problem, gpu, chosen, counts, values),
        "bound": bound
        | {
            "complexity": str(complexity(direction)),
            "complexity_latex": formula("optimum", complexity(direction))["latex"],
            "formula": str(lower_bound(kernel, values_in_keys=problem.latent)),
            "ratio": (cost.read_bytes + cost.write_bytes) / least if least else None,
            "critical_head_dim": critical_head_dim(
                gpu, direction, element_bytes=problem.element_bytes
            ),
        },
        "footprint": {
            "smem_bytes": cost.smem_bytes,
            "registers": cost.registers,
            "programs_per_sm": _residents(problem, gpu, chosen),
        },
        "time": _time(problem, gpu, cost, counts),
        "next_best": [_short(other) | _versus(problem, gpu, chosen, other) for other in others],
        "other_fast_memory": [
            {"fast_memory": size} | _other(problem, with_fast_memory(gpu, size), kernel)
            for size in OTHER_FAST_MEMORY
        ],
        "other_masks": [
            {"mask": mask.notation} | _other(replace(problem, mask=mask), gpu, kernel)
            for mask in other_masks(problem)
        ],
    }


def _splits(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel, config: TileConfig) -> str:
    """Return how what streams is split over programs; empty for kernels that split nothing."""
    if not KERNELS[kernel].splits:
        return ""
    found = splits_of(problem, config, kernel)
    tiles = problem.batch * problem.num_heads_kv * found.tiles_of_group
    heads = tile_heads(config, problem.group_size)
    held = f"{heads} heads" if heads > 1 else "1 head"
    split, whose = "keys", f"in tiles of {config.block_m} queries of {held}"
    if KERNELS[kernel].stays == "columns":
        split, whose = "queries", f"for tiles of {config.block_n} keys"
    each = f"{config.split_kv} {split}"
    if is_divided(problem):
        each = f"at most {each}, over which the keys of each request are divided"
    return (
        f"{found.count} of {each}, {whose}: {int(tiles * found.programs)} "
        f"programs that find {split} to visit, for {gpu.num_sms} SMs"
    )


def _loads(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel, config: TileConfig) -> str:
    """Return how tiles that pass are loaded, and why not through tensor descriptors; empty for
    kernels that have none."""
    spec = KERNELS[kernel]
    if not spec.described:
        return ""
    names = " and ".join(spec.described)
    if config.descriptors:
        return f"{names} through tensor descriptors"
    aligned = rows_are_aligned(problem)
    reason = why_not_described(spec, problem.dtype, aligned=aligned, arch=gpu.arch)
    return f"{names} by addresses" + (f": {reason}" if reason else f"; by TMA with {config.key}t")


def _candidate(
    problem: AttentionProblem,
    gpu: GpuSpec,
    kernel: Kernel,
    config: TileConfig,
    ranked: Sequence[Candidate],
) -> Candidate:
    for candidate in ranked:
        if candidate.config == config:
            return candidate
    _check_fits(problem, gpu, kernel, config)
    cost = estimate(problem, gpu, config, kernel)
    ratio = cost.seconds / ranked[0].estimate.seconds
    reason = f"asked for; predicted to take {ratio:.2f} times as long as the model's choice"
    return Candidate(kernel=kernel, config=config, estimate=cost, reason=reason)


def _check_fits(
    problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel, config: TileConfig
) -> None:
    """Raise Unsupported for a config that no tuner would try: there is no time to predict."""
    needs = footprint(problem, config, kernel, gpu.arch)
    if needs.fits(gpu, doubt=SMEM_DOUBT):
        return
    columns = f" and {needs.columns} columns of tensor memory" if needs.columns else ""
    limits = f" and {TENSOR_MEMORY_COLUMNS}" if needs.columns else ""
    raise Unsupported(
        f"expected a config that fits on {gpu.name}, got {config.key}: {kernel} would need "
        f"{needs.smem_bytes} bytes of shared memory{columns}, of {gpu.smem_per_block}{limits}; "
        "choose smaller tiles or fewer stages"
    )


# --------------------------------------------------------------------------------------------------
# The second level, and time


def _dram(
    problem: AttentionProblem, gpu: GpuSpec, chosen: Candidate, counts: Visits, values: Values
) -> dict[str, Any]:
    """Return what moves between L2 and DRAM and why; sliced kernels have a number only."""
    kernel, cost = chosen.kernel, chosen.estimate
    order, in_keys = dram.order_of(problem, kernel), KERNELS[kernel].values_in_keys(problem)
    # Panels stay in L2 between kernels, so a bound that reads them from DRAM says nothing.
    bound = None if KERNELS[kernel].panel else dram.dram_bound_bytes(problem, gpu, kernel)
    told: dict[str, Any] = {
        "bytes": cost.dram_bytes,
        "bound_bytes": bound,
        "ratio": cost.dram_bytes / bound if bound else None,
        "formulas": dram_formulas(kernel, order, in_keys, problem.pair_lse),
        "values": {},
        "wave": None,
    }
    if not KERNELS[kernel].sliced:
        found = dram.levels(problem, gpu, chosen.config, kernel)
        values = values | level_values(problem, kernel, counts, found)
        used = [dram_bytes(kernel, in_keys, problem.pair_lse), sweeps_of_heads(order)]
        told["values"] = named(values, used[: len(told["formulas"])])
        told["wave"] = {
            "programs": found.in_flight,
            "heads": found.live_heads,
            "heads_in_l2": found.heads_in_l2 if math.isfinite(found.heads_in_l2) else None,
            "part_of_head": found.part_of_head,
            "sweeps": found.sweeps,
        }
    return told


def _time(
    problem: AttentionProblem, gpu: GpuSpec, cost: CostEstimate, counts: Visits
) -> dict[str, Any]:
    """Return the predicted time and what it is composed of: see `time.time`."""
    run = launches(problem, gpu, cost.config, cost.kernel, counts)
    moved = Traffic(read_bytes=cost.read_bytes, write_bytes=cost.write_bytes)
    shares = {
        "l2": time.l2_seconds(gpu, moved, run.programs / run.count),
        "dram": dict(cost.terms)["dram"],
    }
    launch = time.launch_seconds(gpu, cost.kernel, run.count)
    running = cost.seconds - launch
    largest = max(shares, key=lambda name: shares[name])
    # Programs take as long as the launch does, or less where all of L2's or DRAM's traffic is more.
    by_programs = running > shares[largest] * (1 + 1e-9)
    return {
        "seconds": cost.seconds,
        "limit": cost.limit,
        "flops": cost.flops,
        "waves": cost.waves,
        "terms": dict(cost.terms),
        "composition": {
            "largest": "programs" if by_programs else largest,
            "programs": running if by_programs else None,
            **shares,
            "launch": launch,
            "launches": run.count,
            # What `time.time` assumes: unequal programs fill the last wave, but for a tail.
            "equal_programs": run.longest * run.programs == run.steps,
            "overlap_norm": time.OVERLAP_NORM,
        },
    }


# --------------------------------------------------------------------------------------------------
# Other configs


def _short(candidate: Candidate) -> dict[str, Any]:
    cost = candidate.estimate
    return {
        "config": candidate.config.key,
        "seconds": cost.seconds,
        "limit": cost.limit,
        "reason": candidate.reason,
    }


def _versus(
    problem: AttentionProblem, gpu: GpuSpec, chosen: Candidate, other: Candidate
) -> dict[str, Any]:
    """Return in what a candidate differs from the chosen one, and a line that says it."""
    mine, its = chosen.estimate, other.estimate
    own = dict(mine.terms)
    grown = {name: seconds - own[name] for name, seconds in its.terms}
    slower = its.seconds >= mine.seconds
    term = (max if slower else min)(grown, key=lambda name: grown[name])
    moved, others = (one.read_bytes + one.write_bytes for one in (mine, its))
    traffic = others / moved if moved else None
    together = _residents(problem, gpu, chosen), _residents(problem, gpu, other)
    steps = _steps(problem, chosen), _steps(problem, other)
    times = "traffic where this has none" if traffic is None else f"{traffic:.2f} times the traffic"
    said = ["the same traffic" if moved == others else times]
    if steps[0] != steps[1]:
        said.append(f"{steps[1]} steps a head, not {steps[0]}")
    if together[0] != together[1]:
        said.append(f"{together[1]} program{'s' * (together[1] > 1)} per SM, not {together[0]}")
    waves = [f"{one.waves:.1f}" for one in (its, mine)]
    if waves[0] != waves[1]:
        said.append(f"{waves[0]} waves, not {waves[1]}")
    if abs(grown[term]) >= 0.001 * mine.seconds:
        said.append(f"{term} {1e6 * grown[term]:+.1f} us")
    if its.limit != mine.limit:
        said.append(f"limited by {its.limit}")
    return {
        "slowdown": its.seconds / mine.seconds,
        "traffic_ratio": traffic,
        "steps": steps[1],
        "programs_per_sm": together[1],
        "waves": its.waves,
        "term": term,
        "term_seconds": grown[term],
        "differs": ", ".join(said),
    }


def _residents(problem: AttentionProblem, gpu: GpuSpec, candidate: Candidate) -> int:
    needs = footprint(problem, candidate.config, candidate.kernel, gpu.arch)
    return residents(needs, gpu, candidate.config)


def _steps(problem: AttentionProblem, candidate: Candidate) -> int:
    config = candidate.config
    return round(visits(problem, config.block_m, config.block_n, candidate.kernel).tiles)


def _other(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> dict[str, Any]:
    try:
        return _short(best_of(problem, gpu, kernel))
    except Unsupported as error:
        return {"config": None, "seconds": None, "limit": None, "reason": str(error)}
