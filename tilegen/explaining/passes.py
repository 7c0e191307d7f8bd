"""Facts of a pass: its families, its lower bound and its regime."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tilegen.explaining.costs import bounds, theorems_of
from tilegen.explaining.explained import ExplainedPass, moved
from tilegen.explaining.facts import Cell, Fact, line
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Family
from tilegen.kernels.panels import panels, panels_at_once, rows_for
from tilegen.kernels.registry import FAMILIES
from tilegen.theory import regimes
from tilegen.units import seconds_text


def pass_facts(of: ExplainedPass) -> Iterator[Fact]:
    """Describe the family of a pass, the other families, and the theorems about the pass."""
    fact, device = partial(Fact, "pass"), of.device
    yield fact("family", of.chosen)
    yield fact("because", of.because)
    yield fact("kernels", ", ".join(FAMILIES[of.direction][of.chosen].names))
    for name in of.families:
        yield line("pass", "families", name, _cells(of, name))
    for name, reason in of.left_out.items():
        yield line("pass", "left out", name, {"because": (reason, "")})
    if not isinstance(device, GpuSpec):
        return
    size = sum(moved(best.estimate) for best in of.families[of.chosen])
    yield fact("traffic", size, "B between SMs and L2")
    yield from bounds("pass", of.task, size)
    yield from _regime(of, device)
    if of.chosen == "small_cache":
        yield from _panel(of, device)
    for name, other in of.elsewhere.items():
        family, seconds = (other, None) if isinstance(other, str) else other
        yield line("pass", "given", name, {"time": (seconds, "s"), "family": (family, "")})


def _cells(of: ExplainedPass, name: Family) -> dict[str, Cell]:
    costs = [best.estimate for best in of.families[name]]
    each = (f"{x.kernel} {x.config.key} {seconds_text(x.seconds)}" for x in costs)
    spills = "; spills much" if of.spills(name) else ""
    return {
        "time": (sum(cost.seconds for cost in costs), "s"),
        "traffic": (sum(map(moved, costs)), "B"),
        "written": (sum(cost.write_bytes for cost in costs), "B"),
        "DRAM": (sum(cost.dram_bytes for cost in costs), "B"),
        "kernels": (f"{', '.join(each)}{spills}", ""),
    }


def _regime(of: ExplainedPass, gpu: GpuSpec) -> Iterator[Fact]:
    """Compare M with d^2, in words and in bytes: theorems count words."""
    fact, problem, size = partial(Fact, "pass"), of.problem, of.problem.element_bytes
    names = regimes.LARGE_CACHE[of.direction], regimes.SMALL_CACHE[of.direction]
    dividing = regimes.dividing_bytes(*names, head_dim=of.head_dim, element_bytes=size)
    critical = regimes.critical_head_dim(gpu, of.direction, element_bytes=size)
    square = of.head_dim**2
    yield fact("regime", "large cache" if gpu.on_chip_bytes >= dividing else "small cache")
    yield fact("M", of.words, f"words of {problem.dtype} of fast memory")
    yield fact("M in bytes", gpu.on_chip_bytes, "B")
    yield fact("M / d^2", of.words / square, "times the square of the head dim")
    yield fact("d^2", square, f"words, where the theorems divide, of the {theorems_of(of.task)}")
    yield fact("d^2 in bytes", square * size, "B")
    expression = regimes.dividing_memory(*names)
    yield fact(
        "dividing", round(dividing / size), "words, where these schedules divide", expression
    )
    yield fact("dividing bytes", round(dividing), "B")
    yield fact("head dim", round(critical), "where they divide with this M")
    yield fact("where", {"d": of.head_dim, "alpha": regimes.ACCUMULATOR_BYTES / size})


def _panel(of: ExplainedPass, gpu: GpuSpec) -> Iterator[Fact]:
    """Describe the panels that the kernels of a small-cache pass exchange through L2."""
    fact, problem = partial(Fact, "pass"), of.problem
    heads = problem.batch * problem.num_heads_q
    limit = rows_for(problem, gpu, of.direction)
    parts = list(panels(heads, problem.group_size, problem.seqlen_q, limit))
    rows = max(part.num_heads * part.num_rows for part in parts)
    size = rows * problem.seqlen_kv * problem.element_bytes * panels_at_once(of.direction)
    yield fact("panels", len(parts), "of scores, one after the other")
    yield fact("panel rows", rows, "query rows")
    yield fact("panel bytes", size, "B of scores")
    yield fact("L2", gpu.l2_bytes, "B hold a panel")
