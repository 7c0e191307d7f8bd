"""Facts of a tile: its source and resources, the mask, other tiles, and the time in a record."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from tilegen.choose.ranker import best_of, estimate
from tilegen.emit.identity import rows_are_aligned
from tilegen.explaining.explained import BY_MODEL, ExplainedKernel, moved
from tilegen.explaining.facts import Cell, Fact, line
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.descriptors import why_not_described
from tilegen.kernels.registry import tile_heads
from tilegen.masks.mask import full
from tilegen.masks.tiles.spans import Interval, visit
from tilegen.model.estimate import Candidate
from tilegen.model.footprint import footprint
from tilegen.model.mask_size import size_of
from tilegen.model.on_chip import residents
from tilegen.model.splits import splits_of
from tilegen.model.visits import visits
from tilegen.task import Tiled


def tile_facts(of: ExplainedKernel) -> Iterator[Fact]:
    """Describe the tile, the source of the choice, the reason, and the resources of a program."""
    fact, tiled, cost = partial(Fact, "tile"), of.tiled, of.cost
    yield fact("tile", repr(of.config))
    yield fact("loop", tiled.spec.loop.tile(of.config))
    if of.choice:
        yield fact("choice", of.choice)
    yield fact("because", of.candidate.reason)
    first = of.ranked[0]
    if first.config != of.config:
        ratio, unit = cost.seconds / first.estimate.seconds, "times as long as the model's choice"
        yield fact("takes", ratio, f"{unit}, {first.config.key}")
    if splits := _splits(tiled):
        yield fact("splits", splits)
    if tiled.spec.described and isinstance(tiled.device, GpuSpec):
        yield fact("loads", _loads(tiled))
    if isinstance(tiled.device, GpuSpec):
        yield fact("memory", cost.smem_bytes / 1024, "KiB of shared memory for a program")
        yield fact("at most", tiled.gpu.smem_per_block / 1024, "KiB")
        yield fact("registers", cost.registers, "for a thread")
        yield fact("programs", _together(tiled), "on an SM")


def _splits(tiled: Tiled) -> str:
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


def _loads(tiled: Tiled) -> str:
    """Describe how streamed tiles are loaded, and why not through tensor descriptors."""
    spec, config = tiled.spec, tiled.config
    names = " and ".join(spec.described)
    if config.descriptors:
        return f"{names} through tensor descriptors"
    aligned = rows_are_aligned(tiled.problem)
    reason = why_not_described(spec, tiled.problem.dtype, aligned=aligned, arch=tiled.gpu.arch)
    return f"{names} by addresses" + (f": {reason}" if reason else f"; by TMA with {config.key}t")


def _together(tiled: Tiled) -> int:
    return residents(footprint(tiled), tiled.gpu, tiled.config)


# --------------------------------------------------------------------------------------------------
# The mask


def mask_facts(of: ExplainedKernel) -> Iterator[Fact]:
    """Describe the tiles that a kernel visits under the mask, and the gain of choosing for it."""
    fact, tiled, problem = partial(Fact, "mask"), of.tiled, of.tiled.problem
    stays, streams = tiled.spec.loop.sides("queries", "keys")
    yield fact("mask", f"{problem.mask.notation}; the tile [first, last] of {stays}")
    sets = visit(problem.mask, tiled.spec.stationary).sets
    if sets is None:
        yield fact("finds", f"its tiles of {streams} in lists, built once")
    elif not sets.live:
        yield fact("needs", f"no {streams}")
    else:
        yield fact("needs", f"{streams} in {' or '.join(map(_range, sets.live))}")
        if sets.full is not None:
            yield fact("all of", f"those in {_range(sets.full)}")
        else:
            dropped = " or ".join(map(_range, sets.dropped))
            yield fact("not all of", f"those in {dropped}; merged when the kernel runs")
    counts, kept = visits(tiled), size_of(tiled.task).entries
    if tiled.spec.masked and kept:
        yield fact("waste", _scores(tiled) / kept, "scores computed for each that is kept")
    yield fact("programs", counts.programs, "for a head")
    yield fact("tiles", float(counts.tiles), "visited for a head")
    yield fact("partial", float(counts.partial_tiles), "of them with mask code")
    yield fact("longest", float(counts.longest), "of them for a program, at most")
    if not tiled.spec.masked or problem.mask.is_full or not (moved(of.cost) and _scores(tiled)):
        return
    unmasked = replace(tiled.task, problem=replace(problem, mask=full()))
    dense = tiled.task.tiled(best_of(unmasked).config)
    if dense.config != of.config:
        other = estimate(dense)
        cells: dict[str, Cell] = {
            "time": (other.seconds / of.cost.seconds, "times"),
            "bytes": (moved(other) / moved(of.cost), "times"),
            "scores": (_scores(dense) / _scores(tiled), "times"),
        }
        yield line("mask", "best without a mask", dense.config.key, cells)


def _range(interval: Interval) -> str:
    """Format a half-open interval in terms of the tile [first, last]."""
    edges = ("0" if interval.lo is None else str(interval.lo), str(interval.hi))
    lo, hi = (re.sub(r"(?<=[\w)])([-+])", r" \1 ", edge).replace(",", ", ") for edge in edges)
    return f"[{lo}, {hi})"


def _scores(tiled: Tiled) -> float:
    return float(visits(tiled).tiles) * tiled.config.block_m * tiled.config.block_n


# --------------------------------------------------------------------------------------------------
# Other tiles


def next_facts(of: ExplainedKernel) -> Iterator[Fact]:
    """Compare the next best tiles with the tile explained, which is the first line."""
    fact, problem = partial(Fact, "next"), of.tiled.problem
    if of.space == 1:
        yield fact("none", "rules leave this tile alone")
        return
    if of.space:
        unit = f"tiles, by time and idle threads for '{problem.bucket.key}'"
        yield fact("ranked", of.space, unit)
    for other in (of.candidate, *of.others):
        yield line("next", "tile", other.config.key, _compared(of, other))


def _compared(of: ExplainedKernel, other: Candidate) -> dict[str, Cell]:
    """Return the cells that compare another config with the config explained: `by` is the largest
    change of a term in the direction of the time."""
    mine, theirs, tiled = of.cost, other.estimate, of.tiled.task.tiled(other.config)
    terms = dict(mine.terms)
    grown = {name: seconds - terms[name] for name, seconds in theirs.terms}
    term = (max if theirs.seconds >= mine.seconds else min)(grown, key=grown.__getitem__)
    cells: dict[str, Cell] = {
        "time": (theirs.seconds, "s"),
        "times": (theirs.seconds / mine.seconds, "times"),
        "traffic": (moved(theirs) / moved(mine) if moved(mine) else None, "times"),
    }
    if isinstance(tiled.device, GpuSpec):
        cells["steps"] = round(visits(tiled).tiles), ""
        cells["resident"] = _together(tiled), ""
        cells["waves"] = theirs.waves, ""
    else:
        cells["cost"] = theirs.cost / mine.cost, "times"
        cells["programs"] = round(theirs.waves), ""
    other_terms: dict[str, Cell] = {"term": (term, ""), "by": (grown[term], "s")}
    if other is of.candidate:
        other_terms = {"term": (None, ""), "by": (None, "s")}
    return cells | {"limit": (theirs.limit, "")} | other_terms


def other_facts(of: ExplainedKernel) -> Iterator[Fact]:
    """List the tiles for other fast memory or processors, and under other masks."""
    for name, best in (of.on_other_devices | of.under_other_masks).items():
        cells: dict[str, Cell] = {"time": (None, "s"), "limit": (None, ""), "tile": (str(best), "")}
        if isinstance(best, Candidate):
            cost = best.estimate
            cells = {"time": (cost.seconds, "s"), "limit": (cost.limit, "")}
            cells["tile"] = best.config.key, ""
        yield line("others", "given", name, cells)


# --------------------------------------------------------------------------------------------------
# Measured


def measured_facts(of: ExplainedKernel) -> Iterator[Fact]:
    """Describe the time in the device's record, or how to measure one."""
    fact, device = partial(Fact, "measured"), of.tiled.device.name
    if of.measured is None:
        problem = of.tiled.problem.key
        reason = f"no record of {device}; to measure there: tilegen tune '{problem}'"
        if of.space == 1:
            reason = "no record; rules leave this tile alone, so tuning would change nothing"
        elif of.choice == BY_MODEL:
            reason = "the model's ranking alone reads no records"
        yield fact("none", reason)
        return
    record, timing = of.measured.record, of.measured.record.measurement
    yield fact("tile", record.config.key)
    yield fact("problem", record.problem.key)
    times = {"median": timing.median_us, "20 % below": timing.p20_us, "80 % below": timing.p80_us}
    for label, us in times.items():
        yield fact(label, us and 1e-6 * us, "s measured")
    if record.estimate:
        yield fact("predicted", record.estimate.seconds, "s when the record was made")
    yield fact("repeats", timing.repeats, f"launches ({record.policy})")
    yield fact("surroundings", str(timing.surroundings))
    yield fact("tried", record.trials, "configs")
    yield fact("date", record.date)
    yield fact("file", of.measured.file)
