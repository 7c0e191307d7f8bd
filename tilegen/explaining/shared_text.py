"""Sections of the explanation of a kernel that GPUs and processors share, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from tilegen.explaining.common import BY_MODEL
from tilegen.explaining.mask_effect import mask_lines
from tilegen.explaining.records import (
    BoundFacts,
    KernelBound,
    NextPick,
    Pick,
    SubgridFacts,
    TileExplanation,
    TrafficFacts,
)
from tilegen.units import bytes_text, memory_text, number_text, ratio_text, seconds_text


def tile_lines(facts: TileExplanation) -> Iterator[str]:
    """Format the tile, the source of the choice, and the reason."""
    yield f"  tile       {facts.config!r}"
    if facts.choice:
        yield f"  choice     {facts.choice}"
    yield f"  because    {facts.reason}"
    if facts.splits:
        yield f"  splits     {facts.splits}"


def visited_lines(facts: TileExplanation) -> Iterator[str]:
    """Format the tiles that the mask leaves."""
    yield from mask_lines(facts.mask)
    tiles = facts.tiles
    yield (
        f"  tiles      {tiles.tiles} visited per head by {tiles.programs} "
        f"program{'s' * (tiles.programs > 1)}, {tiles.partial_tiles} of them with mask code"
    )


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


def bound_lines(bound: KernelBound) -> Iterator[str]:
    """Format the theorem and the bounds of a kernel."""
    yield f"  optimum    Theta({bound.complexity}) of the {bound.theorems_of}"
    ratio = "" if bound.ratio is None else ratio_text(bound.ratio)
    tiles = f": these tiles move {ratio} times that" if ratio else ""
    memory = memory_text(bound.on_chip_bytes)
    yield f"  bound      {bound_in_words(bound)} with {memory} on chip{tiles}"
    for formula in bound.formulas:
        if formula.name == bound.applies:
            yield f"    {formula.name:5} {formula.text}"
    yield from _subgrid_lines(bound.subgrids)


def bound_in_words(bound: BoundFacts) -> str:
    """Format a bound with its name, and the smaller bounds."""
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


def pick_line(other: Pick) -> str:
    """Format a config with its predicted time."""
    if other.config is None or other.seconds is None:
        return "nothing fits"
    return f"{other.config:16} {seconds_text(other.seconds):>8}"


def next_line(other: NextPick) -> str:
    """Format another tile with its slowdown and the differences."""
    return f"  {pick_line(other)}, {ratio_text(other.slowdown)} times: {other.differs}"


def measured_lines(facts: TileExplanation) -> Iterator[str]:
    """Format the time in a record, or how to measure where there is none."""
    measured = facts.measured
    if measured is None:
        if facts.choice == BY_MODEL:
            yield "  the model's ranking alone reads no records"
            return
        yield f"  no record of {facts.gpu}; to measure there: tilegen tune '{facts.problem}'"
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
