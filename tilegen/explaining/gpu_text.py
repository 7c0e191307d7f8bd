"""Sections of the explanation of a kernel on a GPU, and of a pass, as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from tilegen.explaining.common import BY_MODEL
from tilegen.explaining.gpu_records import (
    DramFacts,
    FamilyFacts,
    FamilyPick,
    KernelExplanation,
    PassExplanation,
)
from tilegen.explaining.mask_effect import mask_lines
from tilegen.explaining.records import (
    BoundFacts,
    KernelBound,
    Measured,
    Pick,
    SubgridFacts,
    TrafficFacts,
)
from tilegen.model.visits import Visits
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
        f"times the lower bound of the pass: {_bound(bound)}",
        f"  regime     {regime.regime}: M = {bytes_text(regime.m_bytes)} = "
        f"{number_text(regime.m_words)} words of {regime.dtype}, {regime.m_over_d2:.2f} d^2",
        f"             the theorems divide at d^2 = {regime.theorem_words} words "
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
    yield f"  tile       {facts.config!r}"
    if facts.choice:
        yield f"  choice     {facts.choice}"
    yield f"  because    {facts.reason}"
    if facts.splits:
        yield f"  splits     {facts.splits}"
    if facts.loads:
        yield f"  loads      {facts.loads}"


def _mask(facts: KernelExplanation) -> Iterator[str]:
    yield from mask_lines(facts.mask)
    yield visited(facts.tiles)


def visited(tiles: Visits) -> str:
    """Format the number of tiles that a kernel visits."""
    return (
        f"  tiles      {tiles.tiles} visited per head by {tiles.programs} "
        f"program{'s' * (tiles.programs > 1)}, {tiles.partial_tiles} of them with mask code"
    )


def _traffic(facts: KernelExplanation) -> Iterator[str]:
    yield from traffic_lines(facts.traffic, "between SMs and L2")
    yield from _dram_lines(facts.dram)


def traffic_lines(traffic: TrafficFacts, where: str) -> Iterator[str]:
    """Format the words of each tensor, and the bytes in all."""
    yield f"  {where}, words per key-value head:"
    for term in traffic.formula:
        size = " (fp32)" if term.size == "fp32" else ""
        yield f"    {term.direction:5} {term.tensor:6} {term.words}{size}"
    values = ", ".join(f"{name}={number_text(x)}" for name, x in traffic.values.items())
    read, written = bytes_text(traffic.read_bytes), bytes_text(traffic.write_bytes)
    yield f"    in all {read} read, {written} written, with {values}"
    if traffic.seed_bytes:
        yield f"    {bytes_text(traffic.seed_bytes)} of it are seeds, for dropout"
    if traffic.table_bytes:
        yield f"    {bytes_text(traffic.table_bytes)} of it tell where requests and pages lie"


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
        yield f"  crossover  head dim {head_dim:.0f}: {beyond}"


def bound_lines(bound: KernelBound) -> Iterator[str]:
    """Format the theorem and the bounds of a kernel."""
    yield f"  optimum    Theta({bound.complexity})"
    ratio = "" if bound.ratio is None else ratio_text(bound.ratio)
    tiles = f": these tiles move {ratio} times that" if ratio else ""
    yield f"  bound      {_bound(bound)} with {memory_text(bound.on_chip_bytes)} on chip{tiles}"
    for formula in bound.formulas:
        if formula.name == bound.applies:
            yield f"    {formula.name:5} {formula.text}"
    yield from _subgrid_lines(bound.subgrids)


def _bound(bound: BoundFacts) -> str:
    others = [
        f"{name} {bytes_text(max(0, size))}"
        for name, size in bound.each.items()
        if name != bound.applies
    ]
    each = f"; {', '.join(others)}" if others else ""
    return f"{bytes_text(bound.bytes)} ({bound.applies}{each})"


def _subgrid_lines(subgrids: SubgridFacts | None) -> Iterator[str]:
    if subgrids:
        form = subgrids.formula.text if subgrids.formula else "counted"
        yield (
            f"    LB1G  u = {number_text(subgrids.per_row)} scores for each row and column of a "
            f"sub-grid of the mask, at most: {form}; w_b = {subgrids.width}"
        )


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
    for other in facts.next_best:
        slowdown = ratio_text(other.slowdown)
        yield f"  {pick_line(other)}, {slowdown} times: {other.differs}"


def pick_line(other: Pick) -> str:
    """Format a config with its predicted time."""
    if other.config is None or other.seconds is None:
        return "nothing fits"
    return f"{other.config:16} {seconds_text(other.seconds):>8}"


def _others(facts: KernelExplanation) -> Iterator[str]:
    for memory in facts.other_fast_memory or ():
        yield f"  {memory_text(memory.fast_memory):14} {pick_line(memory)}"
    for mask in facts.other_masks or ():
        yield f"  {mask.mask:14} {pick_line(mask)}"


def _measured(facts: KernelExplanation) -> Iterator[str]:
    return measured_lines(facts.measured, facts.problem, facts.gpu, facts.choice)


def measured_lines(
    measured: Measured | None, problem: str, device: str, choice: str
) -> Iterator[str]:
    """Format the time in a record, or how to measure where there is none."""
    if measured is None:
        if choice == BY_MODEL:
            yield "  the model's ranking alone reads no records"
            return
        yield f"  no record of {device}; to measure there: tilegen tune '{problem}'"
        return
    p20, p80 = seconds_text(measured.p20_seconds), seconds_text(measured.p80_seconds)
    yield f"  {measured.config} for '{measured.problem}'"
    yield (
        f"    {seconds_text(measured.seconds)} measured, 20 % below {p20} and 20 % above {p80}; "
        f"{measured.repeats} launches ({measured.policy})"
    )
    if measured.predicted_seconds is not None:
        predicted = seconds_text(measured.predicted_seconds)
        yield f"    {predicted} predicted when the record was made"
    yield f"    {measured.trials} configs tried, {measured.date}: {measured.file}"


SECTIONS: Mapping[str, Callable[[KernelExplanation], Iterator[str]]] = {
    "tile": _tile,
    "mask": _mask,
    "traffic": _traffic,
    "bound": _bounds,
    "time": _time,
    "next": _next,
    "others": _others,
    "measured": _measured,
}
"""The sections of a kernel, by the names in text.py."""


def _table(name: str, rows: Iterable[str]) -> Iterator[str]:
    for i, row in enumerate(rows):
        yield f"  {'' if i else name:10} {row}"
