"""Facts of the cost of a kernel: the bytes that move, the bytes that must move, and the time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import sympy as sp

from tilegen.cpus.spec import CpuSpec
from tilegen.explaining.explained import ExplainedKernel, moved
from tilegen.explaining.facts import Cell, Fact, line
from tilegen.explaining.formulas import (
    dram_formulas,
    kernel_values,
    level_values,
    named,
    read,
    value_of,
)
from tilegen.gpus.spec import GpuSpec
from tilegen.model import cpu_time, dram
from tilegen.model.bounds import (
    bound_values,
    bounds_of,
    each_bound,
    lower_bound_bytes,
    lower_bound_with,
    what_of,
)
from tilegen.model.cpu_levels import bytes_from
from tilegen.model.footprint import footprint
from tilegen.model.launches import launches
from tilegen.model.mask_tables import tree_bytes
from tilegen.model.rates import rates_of
from tilegen.model.subgrids import closed_form, subgrids
from tilegen.model.symbols import H_kv
from tilegen.model.terms import KERNEL, MEMORY, PROCESSOR, PROGRAM, QUEUED, UNITS
from tilegen.model.time import OVERLAP_NORM, launch_seconds, time
from tilegen.model.traffic import state_bytes, table_bytes, terms_of
from tilegen.task import KernelTask, PassTask, Tiled
from tilegen.theory.regimes import complexity, critical_head_dim

RATES = {"products": "flop/s", "exponentials": "/s"}
"""Units of the rates of a core; all others are bandwidths."""


# --------------------------------------------------------------------------------------------------
# Traffic


def traffic_facts(of: ExplainedKernel) -> Iterator[Fact]:
    """Count the bytes that tiles move, at each level of memory."""
    fact, tiled, task, cost = partial(Fact, "traffic"), of.tiled, of.tiled.task, of.cost
    terms = terms_of(task.kernel, values_in_keys=task.values_in_keys, pairs=tiled.problem.pair_lse)
    values = kernel_values(tiled)
    used: dict[str, sp.Expr] = {}
    for term in terms:
        label = f"{term.direction} {term.tensor}"
        used[label] = used.get(label, 0) + H_kv * term.bytes
    for label, size in used.items():
        yield fact(label, value_of(size, values), "B", size)
    tables = {
        "seeds": (state_bytes(tiled), "B for dropout"),
        "tables": (table_bytes(tiled), "B that tell where requests and pages lie"),
        "trees": (tree_bytes(tiled), "B of the tables of trees"),
    }
    for name, (size, unit) in tables.items():
        if size:
            yield fact(f"read {name}", int(size), unit)
    where = "between SMs and L2" if isinstance(task.device, GpuSpec) else "to and from L2"
    yield fact("read", cost.read_bytes, f"B in all, {where}")
    yield fact("written", cost.write_bytes, f"B in all, {where}")
    if isinstance(task.device, GpuSpec):
        levels = None if task.spec.sliced else dram.levels(tiled)
        moving = dram_formulas(task)
        yield fact("DRAM", cost.dram_bytes, "B between L2 and DRAM", moving.get("DRAM"))
        if levels is None:
            yield fact("of it", "inputs and outputs once; panels again, unless L2 holds them")
        elif "rho" in moving:
            values |= level_values(tiled, levels)
            yield fact("rho", levels.sweeps, "times DRAM delivers what streams", moving["rho"])
            yield fact("wave", levels.in_flight, "programs in flight")
            yield fact("of heads", levels.live_heads, "key-value heads at most, which a wave reads")
            held = levels.heads_in_l2
            held = held if math.isfinite(held) else "all"
            yield fact("L2 holds", held, "key-value heads")
        # Panels stay in L2 between kernels, so a bound that reads them from DRAM does not apply.
        if not task.spec.panel:
            least, unit = dram.dram_bound_bytes(task), "B with L2 and all SMs as fast memory"
            yield fact("at least", least, unit)
            if least:
                yield fact("ratio", cost.dram_bytes / least, "times that")
        used |= moving
    yield fact("with", named(values, used.values()))
    if isinstance(task.device, CpuSpec):
        yield from _levels(tiled, task.device)


def _levels(tiled: Tiled, spec: CpuSpec) -> Iterator[Fact]:
    """Count the bytes at each level of a processor's memory, beside the least with the next faster
    level as fast memory."""
    levels = cpu_time.levels_of(spec)
    source = levels[int(cpu_time.source_of(tiled, spec))].name
    streamed = int(cpu_time.stream_bytes(tiled))
    yield Fact("traffic", "streamed", streamed, f"B for a head, which {source} holds")
    for level, size in zip(levels, bytes_from(tiled, spec), strict=True):
        least = lower_bound_with(tiled.task, level.fast_bytes)
        cells: dict[str, Cell] = {
            "these tiles": (size, "B"),
            "at least": (least, "B"),
            "times": (size / least if least else None, "times"),
            "faster level": (level.fast_bytes / 1024, "KiB"),
            "rate of a core": (level.bandwidth, "B/s"),
        }
        yield line("traffic", "from", level.name, cells)


# --------------------------------------------------------------------------------------------------
# Bounds


def bound_facts(of: ExplainedKernel) -> Iterator[Fact]:
    """List the theorem and the lower bounds of a kernel."""
    task = of.tiled.task
    yield from bounds("bound", task, moved(of.cost))
    if isinstance(task.device, GpuSpec):
        size = task.problem.element_bytes
        head_dim = critical_head_dim(task.device, task.direction, element_bytes=size)
        unit = f"of the {theorems_of(task)}: beyond it the small-cache algorithms move less"
        yield Fact("bound", "crossover", round(head_dim), f"as head dim {unit}")


def bounds(section: str, task: KernelTask | PassTask, moved_bytes: int) -> Iterator[Fact]:
    """List the theorem and the lower bounds of a kernel or a pass whose tiles move some bytes."""
    fact, problem = partial(Fact, section), task.problem
    formulas = bounds_of(what_of(task), values_in_keys=problem.latent)
    sizes, least = each_bound(task), lower_bound_bytes(task)
    optimum = sp.Function("Theta")(complexity(task.direction))
    yield fact("optimum", None, f"of the {theorems_of(task)}", optimum)
    for name, size in sizes.items():
        yield fact(name, size, "B", formulas[name])
    largest = sp.Max(*map(sp.Symbol, sizes)) if len(sizes) > 1 else None
    applies = max(sizes, key=sizes.__getitem__)
    yield fact("bound", least, f"B at least, by {applies}", largest)
    if least:  # 0: no pair is kept, and all results are intermediates
        yield fact("ratio", moved_bytes / least, "times the bound, by these tiles")
    yield fact("memory", task.device.on_chip_bytes / 1024, "KiB of fast memory on chip")
    if "LB1G" in sizes:
        lengths = problem.seqlen_q, problem.seqlen_kv
        densest = subgrids(problem.mask, *lengths, problem.group_size)
        unit = "scores for each row and column of a sub-grid of the mask, at most"
        family = densest.family
        yield fact("u", densest.per_row, unit, closed_form(family) if family else None)
        yield fact("w_b", densest.width, "differences of rows that the mask keeps")
    yield fact("with", named(bound_values(task), formulas.values()))


def theorems_of(task: KernelTask | PassTask) -> str:
    """Name the problem whose optimum and crossovers the theorems state; bounds follow the mask."""
    return "problem" if task.problem.mask.is_full else "unmasked problem"


# --------------------------------------------------------------------------------------------------
# Time


def time_facts(of: ExplainedKernel) -> Iterator[Fact]:
    """List the parts of the predicted time, the largest first."""
    if isinstance(device := of.tiled.device, CpuSpec):
        yield from _time_on_cpu(of, device)
    else:
        yield from _time_on_gpu(of)


def _time_on_gpu(of: ExplainedKernel) -> Iterator[Fact]:
    fact, tiled, cost, run = partial(Fact, "time"), of.tiled, of.cost, launches(of.tiled)
    timed = time(tiled, footprint(tiled))
    yield fact("time", cost.seconds, "s predicted", read(KERNEL["seconds"]))
    yield fact("limit", cost.limit)
    yield fact("on_sms", float(timed.on_sms), "s of programs, in waves")
    units = UNITS | MEMORY
    for name, seconds in cost.terms:
        clocks = {
            sp.Symbol(name): sp.Symbol(f"{name}_clk")
        }  # names of units are those of their clocks
        yield fact(name, seconds, "s", read(units[name]).subs(clocks))
    launching = launch_seconds(tiled.task, run.count)
    yield fact("launching", launching, "s")
    yield fact("launches", int(run.count), "one after the other")
    exposed = rates_of(tiled.gpu.arch).exposed
    yield fact("step", None, "clocks", read((PROGRAM if exposed else QUEUED)["step"]))
    yield fact("norm", OVERLAP_NORM, "is its exponent: a little more than the busiest unit")
    equal = run.longest * run.programs == run.steps  # as in `terms.KERNEL`
    order = "in waves, those of the last among themselves" if equal else "the longest first"
    tail = ", half of one as tail" if cost.waves > 1 and not equal else ""
    yield fact("order", f"programs run {order}{tail}")
    yield fact("waves", cost.waves, "times the programs that run at once")
    yield fact("products", cost.flops, "flop in whole tiles")


def _time_on_cpu(of: ExplainedKernel, spec: CpuSpec) -> Iterator[Fact]:
    fact, tiled, cost, run = partial(Fact, "time"), of.tiled, of.cost, launches(of.tiled)
    yield fact("time", cost.seconds, "s predicted on one thread")
    yield fact("limit", cost.limit)
    yield fact("products", cost.flops, "flop in whole tiles")
    yield fact("programs", int(run.programs), "which leave threads idle if equally long")
    yield fact("source", spec.source if spec.measured else f"estimates: {spec.source}")
    terms = [(seconds, name, *PROCESSOR[name]) for name, seconds in cost.terms]
    launch = cpu_time.LAUNCH_SECONDS, "launch", "", "a launch from Python"
    weights = cpu_time.weights_of(tiled)
    for seconds, name, text, words in [*sorted(terms, reverse=True), launch]:
        cells: dict[str, Cell] = {"time": (seconds, "s")}
        cells["part"] = 100 * seconds / cost.seconds, "%"
        cells["weight"] = weights.get(name), ""
        cells["in words"] = words, ""
        formula = sp.Symbol("weight") * read(text) if text else None
        yield line("time", "term", name, cells, formula)
    rates = {"products": spec.product_flops(tiled.problem.dtype), "exponentials": spec.exp2_rate}
    rates |= {level.name: level.bandwidth for level in cpu_time.levels_of(spec)}
    for name, rate in rates.items():
        yield line("time", "a core", name, {"rate": (rate, RATES.get(name, "B/s"))})
    for threads in cpu_time.THREADS:
        idle = 1 - 1 / cpu_time.rounds_over_work(run.programs, threads)
        yield line("time", "threads", str(threads), {"idle": (100 * float(idle), "%")})
