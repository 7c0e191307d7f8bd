"""Parts of an explanation that GPUs and processors share: traffic, bounds, splits, records."""

from __future__ import annotations

from dataclasses import fields

from tilegen.choose.choice import Choice
from tilegen.choose.records import Records
from tilegen.errors import BuildFailed
from tilegen.explaining.formulas import formula, kernel_values, named
from tilegen.explaining.pass_choice import bound_of
from tilegen.explaining.records import (
    BoundFacts,
    KernelBound,
    Measured,
    TrafficFacts,
    TrafficTerm,
)
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel
from tilegen.kernels.registry import tile_heads
from tilegen.model.bounds import complexity, lower_bound
from tilegen.model.estimate import CostEstimate
from tilegen.model.splits import splits_of
from tilegen.model.symbols import H_kv
from tilegen.model.traffic import state_bytes, table_bytes, terms_of, total_bytes
from tilegen.task import KernelTask, Tiled
from tilegen.theory.regimes import critical_head_dim

BY_MODEL = "the model's ranking alone; without --model, what a call would launch"


def traffic_facts(tiled: Tiled, cost: CostEstimate) -> TrafficFacts:
    """Return the words and bytes that tiles move, with the formula of each tensor."""
    task, problem = tiled.task, tiled.problem
    moved = terms_of(task.kernel, values_in_keys=task.values_in_keys, pairs=problem.pair_lse)
    both_ways = H_kv * total_bytes(moved)
    return TrafficFacts(
        formula=tuple(
            TrafficTerm(
                tensor=term.tensor,
                direction=term.direction,
                words=str(term.words),
                latex=formula(term.tensor, term.words).latex,
                size=term.size,
            )
            for term in moved
        ),
        bytes=formula("bytes", both_ways),
        values=named(kernel_values(tiled), [both_ways]),
        seed_bytes=state_bytes(tiled),
        table_bytes=table_bytes(tiled),
        read_bytes=cost.read_bytes,
        write_bytes=cost.write_bytes,
        dram_bytes=cost.dram_bytes,
    )


def bound_facts(task: KernelTask, *, moved: int) -> KernelBound:
    """Return the bounds of a kernel whose tiles move a number of bytes, and the theorems."""
    bound, problem, way = bound_of(task, moved=moved), task.problem, task.direction
    optimum, device = formula("optimum", complexity(way)), task.device
    return KernelBound(
        **{field.name: getattr(bound, field.name) for field in fields(BoundFacts)},
        complexity=optimum.text,
        complexity_latex=optimum.latex,
        formula=str(lower_bound(task.kernel, values_in_keys=problem.latent)),
        critical_head_dim=critical_head_dim(device, way, element_bytes=problem.element_bytes)
        if isinstance(device, GpuSpec)
        else None,
    )


def choice_line(choice: Choice | None, *, asked: bool) -> str:
    """Return the source of a config in a line; empty if the user gave the config."""
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


def splits_in_words(tiled: Tiled) -> str:
    """Describe how streamed rows are split over programs; empty for kernels without splits."""
    problem, config, device = tiled.problem, tiled.config, tiled.device
    if not tiled.spec.splits:
        return ""
    splits = splits_of(tiled)
    tiles = tiled.task.heads_kv * splits.tiles_of_group
    heads = tile_heads(config, problem.group_size)
    held = f"{heads} heads" if heads > 1 else "1 head"
    queries = "query" if config.block_m == 1 else "queries"
    split, whose = "keys", f"in tiles of {config.block_m} {queries} of {held}"
    if tiled.spec.stationary == "columns":
        split, whose = "queries", f"for tiles of {config.block_n} keys"
    each = f"{config.split_kv} {split}"
    if tiled.task.divided:
        each = f"at most {each}, over which the keys of each request are divided"
    where = f", for {device.num_sms} SMs" if isinstance(device, GpuSpec) else ""
    return (
        f"{splits.count} of {each}, {whose}: {int(tiles * splits.programs)} "
        f"programs that find {split} to visit{where}"
    )


def measured_by(records: Records, kernel: Kernel) -> Measured | None:
    """Return the time in the device's own record of a kernel; None without a measured record."""
    if (own := records.own(kernel)) is None:
        return None
    record, timing = own.record, own.record.measurement
    if timing.median_us is None or timing.p20_us is None or timing.p80_us is None:
        return None
    return Measured(
        config=record.config.key,
        problem=record.problem.key,
        seconds=1e-6 * timing.median_us,
        p20_seconds=1e-6 * timing.p20_us,
        p80_seconds=1e-6 * timing.p80_us,
        repeats=timing.repeats,
        policy=record.policy,
        trials=record.trials,
        date=record.date,
        file=own.file,
        predicted_seconds=record.estimate and record.estimate.seconds,
    )
