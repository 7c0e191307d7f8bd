"""Explain tiles as plain values: formulas, numbers, bounds, the next best configs, and what would
change the choice. text.py formats the values, plot.py draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

from tilegen.choose.choice import Choice
from tilegen.choose.families import families_used
from tilegen.choose.ranker import candidate_of, estimate, joining, propose
from tilegen.choose.records import Records
from tilegen.emit.identity import rows_are_aligned
from tilegen.errors import BuildFailed, Unsupported
from tilegen.explaining.alternatives import short, with_alternatives
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
from tilegen.explaining.pass_choice import bound_of, explain_pass
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.descriptors import why_not_described
from tilegen.kernels.registry import check_config, tile_heads
from tilegen.kernels.spec import Direction, FamilySpec
from tilegen.model import dram, time
from tilegen.model.bounds import complexity, lower_bound
from tilegen.model.estimate import Candidate, CostEstimate
from tilegen.model.footprint import footprint
from tilegen.model.launches import launches
from tilegen.model.on_chip import TENSOR_MEMORY_COLUMNS, residents
from tilegen.model.splits import splits_of
from tilegen.model.symbols import H_kv
from tilegen.model.traffic import Traffic, state_bytes, table_bytes, terms_of, total_bytes
from tilegen.model.visits import visits
from tilegen.pipeline import choose_kernel, joined_to
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled
from tilegen.theory.regimes import critical_head_dim
from tilegen.units import seconds_text

BY_MODEL = "the model's ranking alone; without --model, what a call would launch"


def explain_all(
    problem: AttentionProblem,
    device: GpuSpec,
    kernels: Sequence[Kernel],
    config: TileConfig | None = None,
    *,
    by_model: bool = False,
    alternatives: bool = True,
) -> list[dict[str, Any]]:
    """Explain kernels, each with the explanation of its pass under `pass`.

    A problem is explained in its normal form; `rewriting` describes the change in a line. The
    config explained is the choice of a call, for which several are compiled. With `by_model` it is
    the model's first, and `config` replaces both. With `alternatives` choices for other memories
    and masks are added. Raises Unsupported.
    """
    rewriting, problem = problem.rewriting, problem.normal()
    tasks = [KernelTask.of(kernel, problem, device) for kernel in kernels]
    ways: set[Direction] = {task.direction for task in tasks}
    used: dict[Direction, FamilySpec] = {}
    if config is None and not by_model:
        records = Records(problem, device)
        used = {way: families_used(records, way)[0] for way in ways}
    passes = {way: explain_pass(problem, device, way, used.get(way)) for way in ways}
    chosen: dict[Kernel, Choice] = {}
    explained: list[dict[str, Any]] = []
    for task in tasks:
        task = joined_to(task, chosen)
        if config is None and not by_model:
            choice = choose_kernel(task, may_compile=True)
            chosen[task.kernel] = replace(choice, library=used[task.direction].library)
            task = chosen[task.kernel].ranked.task
        explained.append(
            explain(task, config, chosen.get(task.kernel))
            | {"rewriting": rewriting, "pass": passes[task.direction]}
        )
    return with_alternatives(explained, problem, device) if alternatives else explained


def explain(
    task: KernelTask, config: TileConfig | None = None, choice: Choice | None = None
) -> dict[str, Any]:
    """Explain a config of a kernel as plain values: `config`, the config of a choice, or by default
    the model's first. Raises Unsupported."""
    if config is not None:
        check_config(config, task.kernel)
    elif choice is not None:
        config = choice.config
    task = joining(task)
    ranked = propose(task, top=4)
    problem, device, kernel = task.problem, task.gpu, task.kernel
    chosen = ranked[0] if config is None else _candidate(task.tiled(config), ranked, choice)
    tiled = task.tiled(chosen.config)
    others = [candidate for candidate in ranked if candidate.config != chosen.config][:3]
    cost = chosen.estimate
    least = cost.lower_bound_bytes  # 0 if no pair is kept and all results are intermediates
    counts = visits(tiled)
    direction = task.direction
    values = kernel_values(tiled)
    moved = terms_of(kernel, values_in_keys=task.values_in_keys, pairs=problem.pair_lse)
    both_ways = H_kv * total_bytes(moved)
    bound = bound_of(task)
    return {
        "problem": problem.key,
        "gpu": device.name,
        "fast_memory": device.smem_per_block,
        "kernel": kernel,
        "config": asdict(chosen.config),
        "choice": _choice_line(choice, asked=config is not None),
        "reason": chosen.reason,
        "splits": _splits(tiled),
        "loads": _loads(tiled),
        "mask": explain_mask(task, chosen),
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
            "seed_bytes": state_bytes(tiled),
            "table_bytes": table_bytes(tiled),
            "read_bytes": cost.read_bytes,
            "write_bytes": cost.write_bytes,
            "dram_bytes": cost.dram_bytes,
        },
        "dram": _dram(tiled, cost, values),
        "bound": bound
        | {
            "complexity": str(complexity(direction)),
            "complexity_latex": formula("optimum", complexity(direction))["latex"],
            "formula": str(lower_bound(kernel, values_in_keys=problem.latent)),
            "ratio": (cost.read_bytes + cost.write_bytes) / least if least else None,
            "critical_head_dim": critical_head_dim(
                device, direction, element_bytes=problem.element_bytes
            ),
        },
        "footprint": {
            "smem_bytes": cost.smem_bytes,
            "registers": cost.registers,
            "programs_per_sm": _residents(tiled),
        },
        "time": _time(tiled, cost),
        "next_best": [short(other) | _versus(task, chosen, other) for other in others],
    }


def _choice_line(choice: Choice | None, *, asked: bool) -> str:
    """Describe in a line where the config comes from; empty for a config that was asked for."""
    if choice is None:
        return "" if asked else BY_MODEL
    line = choice.source
    if choice.ranked.origin == "model":
        compiled = sum(not isinstance(built, BuildFailed) for built in choice.tried.values())
        best = f", the fastest by machine code of {compiled} compiled"
        line += best if compiled else "; nothing was compiled"
    if choice.library:
        line += f"; but calls go to library: {choice.library}, measured to be faster for the pass"
    return line


def _splits(tiled: Tiled) -> str:
    """Describe how streamed rows are split over programs; empty for kernels without splits."""
    problem, config = tiled.problem, tiled.config
    if not tiled.spec.splits:
        return ""
    splits = splits_of(tiled)
    tiles = tiled.task.heads_kv * splits.tiles_of_group
    heads = tile_heads(config, problem.group_size)
    held = f"{heads} heads" if heads > 1 else "1 head"
    split, whose = "keys", f"in tiles of {config.block_m} queries of {held}"
    if tiled.spec.stays == "columns":
        split, whose = "queries", f"for tiles of {config.block_n} keys"
    each = f"{config.split_kv} {split}"
    if tiled.task.divided:
        each = f"at most {each}, over which the keys of each request are divided"
    return (
        f"{splits.count} of {each}, {whose}: {int(tiles * splits.programs)} "
        f"programs that find {split} to visit, for {tiled.gpu.num_sms} SMs"
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
    ratio = cost.seconds / ranked[0].estimate.seconds
    reason = f"asked for; predicted to take {ratio:.2f} times as long as the model's choice"
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


# --------------------------------------------------------------------------------------------------
# The second level, and time


def _dram(tiled: Tiled, cost: CostEstimate, values: Values) -> dict[str, Any]:
    """Explain the bytes between L2 and DRAM; for sliced kernels there is no formula."""
    task, kernel, pairs = tiled.task, tiled.spec.name, tiled.problem.pair_lse
    order, in_keys = dram.order_of(task), task.values_in_keys
    # Panels stay in L2 between kernels, so a bound that reads them from DRAM does not apply.
    bound = None if tiled.spec.panel else dram.dram_bound_bytes(task)
    facts: dict[str, Any] = {
        "bytes": cost.dram_bytes,
        "bound_bytes": bound,
        "ratio": cost.dram_bytes / bound if bound else None,
        "formulas": dram_formulas(kernel, order, in_keys, pairs),
        "values": {},
        "wave": None,
    }
    if facts["formulas"]:
        levels = dram.levels(tiled)
        values = values | level_values(tiled, levels)
        used = [dram_bytes(kernel, in_keys, pairs), sweeps_of_heads(order)]
        facts["values"] = named(values, used[: len(facts["formulas"])])
        facts["wave"] = {
            "programs": levels.in_flight,
            "heads": levels.live_heads,
            "heads_in_l2": levels.heads_in_l2 if math.isfinite(levels.heads_in_l2) else None,
            "part_of_head": levels.part_of_head,
            "sweeps": levels.sweeps,
        }
    return facts


def _time(tiled: Tiled, cost: CostEstimate) -> dict[str, Any]:
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
            # As in `time.time`: unequal programs fill the last wave, except for a tail.
            "equal_programs": run.longest * run.programs == run.steps,
            "overlap_norm": time.OVERLAP_NORM,
        },
    }


# --------------------------------------------------------------------------------------------------
# Other configs


def _versus(task: KernelTask, chosen: Candidate, other: Candidate) -> dict[str, Any]:
    """Compare a candidate with the chosen candidate, with a line of text."""
    mine, theirs = chosen.estimate, other.estimate
    own = dict(mine.terms)
    grown = {name: seconds - own[name] for name, seconds in theirs.terms}
    slower = theirs.seconds >= mine.seconds
    term = (max if slower else min)(grown, key=lambda name: grown[name])
    moved, others = (cost.read_bytes + cost.write_bytes for cost in (mine, theirs))
    traffic = others / moved if moved else None
    both = task.tiled(chosen.config), task.tiled(other.config)
    together = _residents(both[0]), _residents(both[1])
    steps = round(visits(both[0]).tiles), round(visits(both[1]).tiles)
    times = "traffic where this has none" if traffic is None else f"{traffic:.2f} times the traffic"
    differences = ["the same traffic" if moved == others else times]
    if steps[0] != steps[1]:
        differences.append(f"{steps[1]} steps a head, not {steps[0]}")
    if together[0] != together[1]:
        differences.append(
            f"{together[1]} program{'s' * (together[1] > 1)} per SM, not {together[0]}"
        )
    waves = [f"{cost.waves:.1f}" for cost in (theirs, mine)]
    if waves[0] != waves[1]:
        differences.append(f"{waves[0]} waves, not {waves[1]}")
    if abs(grown[term]) >= 0.001 * mine.seconds:
        differences.append(f"{term} {'+' * (grown[term] > 0)}{seconds_text(grown[term])}")
    if theirs.limit != mine.limit:
        differences.append(f"limited by {theirs.limit}")
    return {
        "slowdown": theirs.seconds / mine.seconds,
        "traffic_ratio": traffic,
        "steps": steps[1],
        "programs_per_sm": together[1],
        "waves": theirs.waves,
        "term": term,
        "term_seconds": grown[term],
        "differs": ", ".join(differences),
    }


def _residents(tiled: Tiled) -> int:
    return residents(footprint(tiled), tiled.gpu, tiled.config)
