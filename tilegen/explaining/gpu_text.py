"""Sections of the explanation of a kernel on a GPU, and of a pass, as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from tilegen.explaining.gpu_records import (
    DramFacts,
    FamilyFacts,
    FamilyPick,
    KernelExplanation,
    PassExplanation,
)
from tilegen.explaining.shared_text import (
    bound_in_words,
    bound_lines,
    measured_lines,
    next_line,
    pick_line,
    tile_lines,
    traffic_lines,
    visited_lines,
)
from tilegen.units import bytes_text, memory_text, number_text, ratio_text, seconds_text


def pass_lines(way: PassExplanation) -> list[str]:
    """Format the explanation of a pass."""
    bound, regime = way.bound, way.regime
    ratio = ratio_text(bound.ratio or 0.0)
    lines = [
        f"  family     {way.family}",
        f"  because    {way.because}",
        *_table("families", map(_family, way.families)),
    ]
    lines += [f"             {name:12} left out: {why}" for name, why in way.left_out.items()]
    lines += [
        f"  traffic    {bytes_text(way.read_bytes + way.write_bytes)} between SMs and L2, {ratio} "
        f"times the lower bound of the pass: {bound_in_words(bound)}",
        f"  regime     {regime.regime}: M = {bytes_text(regime.m_bytes)} = "
        f"{number_text(regime.m_words)} words of {regime.dtype}, {regime.m_over_d2:.2f} d^2",
        f"             for the {bound.theorems_of} the theorems divide at "
        f"d^2 = {regime.theorem_words} words "
        f"({bytes_text(regime.theorem_bytes)}), these schedules at "
        f"{regime.dividing_words:.0f} words ({bytes_text(regime.dividing_bytes)}); "
        f"with this M at head dim {regime.critical_head_dim:.0f}",
    ]
    if panel := way.panel:
        lines.append(
            f"  panel      {panel.rows} query rows, {bytes_text(panel.bytes)} of scores in "
            f"{bytes_text(panel.l2_bytes)} of L2; {panel.panels} of them"
        )
    choices = [
        f"{memory_text(x.fast_memory):>10} {_family_pick(x)}" for x in way.other_fast_memory or ()
    ]
    choices += [f"{x.mask:>10} {_family_pick(x)}" for x in way.other_masks or ()]
    return [*lines, *_table("would be", choices)]


def _family(family: FamilyFacts) -> str:
    kernels = ", ".join(f"{kernel.kernel} {kernel.key}" for kernel in family.kernels)
    moved = bytes_text(family.read_bytes + family.write_bytes)
    spills = "; spills much" if family.spills else ""
    return f"{family.family:12} {seconds_text(family.seconds):>9} {moved:>8}  {kernels}{spills}"


def _family_pick(family: FamilyPick) -> str:
    if family.family is None or family.seconds is None:
        return "nothing fits"
    return f"{family.family:12} {seconds_text(family.seconds):>9}"


def _tile(facts: KernelExplanation) -> Iterator[str]:
    yield from tile_lines(facts)
    if facts.loads:
        yield f"  loads      {facts.loads}"


def _traffic(facts: KernelExplanation) -> Iterator[str]:
    yield from traffic_lines(facts.traffic, "between SMs and L2")
    yield from _dram_lines(facts.dram)


def _dram_lines(dram: DramFacts) -> Iterator[str]:
    bound = ""
    if dram.ratio is not None:
        ratio = ratio_text(dram.ratio)
        bound = f", {ratio} times the lower bound with L2 and all SMs as fast memory"
    yield f"  between L2 and DRAM: {bytes_text(dram.bytes)}{bound}"
    if dram.formulas:
        yield f"    {dram.formulas[0].text}"
    else:
        yield "    inputs and outputs once; what streams again with each panel, unless L2 holds it"
    if (wave := dram.wave) and len(dram.formulas) > 1:
        held = "all" if wave.heads_in_l2 is None else number_text(round(wave.heads_in_l2, 1))
        yield (
            f"    rho = {ratio_text(wave.sweeps)}: {wave.programs} programs in flight read at most "
            f"{wave.heads} key-value heads, and L2 holds {held}"
        )


def _bounds(facts: KernelExplanation) -> Iterator[str]:
    yield from bound_lines(facts.bound)
    if (head_dim := facts.bound.critical_head_dim) is not None:
        beyond = "beyond it the small-cache algorithms move less"
        yield f"  crossover  head dim {head_dim:.0f} of the {facts.bound.theorems_of}: {beyond}"


def _time(facts: KernelExplanation) -> Iterator[str]:
    time, parts = facts.time, facts.time.composition
    programs, waves = parts.programs, f"{time.waves:.1f} waves"
    yield f"  time       {seconds_text(time.seconds)} predicted, limited by {time.limit}; {waves}"
    took = "less" if programs is None else seconds_text(programs)
    equal = parts.equal_programs
    order = "in waves, those of the last among themselves" if equal else "the longest first"
    if time.waves > 1 and not equal:
        order += ", half of one as tail"
    named = {"programs": "programs", "l2": "L2", "dram": "DRAM"}[parts.largest]
    yield (
        f"    = max(programs {took}, L2 {seconds_text(parts.l2)}, "
        f"DRAM {seconds_text(parts.dram)}), here {named}, "
        f"+ {seconds_text(parts.launch)} for {parts.launches} "
        f"launch{'es' * (parts.launches > 1)}"
    )
    yield (
        f"    programs run {order}; a step takes the {parts.overlap_norm}-norm of its units, a "
        "little more than the busiest"
    )
    for name, seconds in time.terms.items():
        yield f"    {name:8} {seconds_text(seconds):>10}"


def _next(facts: KernelExplanation) -> Iterator[str]:
    return map(next_line, facts.next_best)


def _others(facts: KernelExplanation) -> Iterator[str]:
    for memory in facts.other_fast_memory or ():
        yield f"  {memory_text(memory.fast_memory):14} {pick_line(memory)}"
    for mask in facts.other_masks or ():
        yield f"  {mask.mask:14} {pick_line(mask)}"


SECTIONS: Mapping[str, Callable[[KernelExplanation], Iterator[str]]] = {
    "tile": _tile,
    "mask": visited_lines,
    "traffic": _traffic,
    "bound": _bounds,
    "time": _time,
    "next": _next,
    "others": _others,
    "measured": measured_lines,
}
"""The sections of a kernel, by the names in text.py."""


def _table(name: str, rows: Iterable[str]) -> Iterator[str]:
    for i, row in enumerate(rows):
        yield f"  {'' if i else name:10} {row}"
