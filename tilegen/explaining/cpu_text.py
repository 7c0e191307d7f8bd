"""Sections of the explanation of a kernel on a processor, and of a pass, as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tilegen.explaining.cpu_records import CpuExplanation, CpuPassExplanation
from tilegen.explaining.shared_text import (
    bound_lines,
    measured_lines,
    next_line,
    pick_line,
    tile_lines,
    traffic_lines,
    visited_lines,
)
from tilegen.model.cpu_time import TERMS
from tilegen.units import bytes_text, percent_text, rate_text, ratio_text, seconds_text

RATES = {"products": "flop/s", "exponentials": "/s"}
"""Units of rates; all other rates are bandwidths."""


def pass_lines(way: CpuPassExplanation) -> list[str]:
    """Format the explanation of a pass."""
    lines = [f"  family     {way.family}, by rules: {', '.join(way.kernels)}"]
    return [*lines, *(f"             {name} left out: {x}" for name, x in way.left_out.items())]


def _traffic(facts: CpuExplanation) -> Iterator[str]:
    time = facts.time
    yield from traffic_lines(facts.traffic, "to and from L2")
    streams = bytes_text(time.stream_bytes)
    yield f"  a head streams {streams}, which {time.streams_from} holds"
    yield "  from    these tiles  at least  times  rate of a core"
    for level in facts.levels:
        moved, least = bytes_text(level.bytes), bytes_text(level.bound_bytes)
        times = ratio_text(level.bytes / level.bound_bytes) if level.bound_bytes else "-"
        rate = rate_text(level.bandwidth, "B/s")
        yield f"  {level.level:6}  {moved:>11}  {least:>8}  {times:>5}  {rate:>14}"


def _time(facts: CpuExplanation) -> Iterator[str]:
    time = facts.time
    yield f"  time       {seconds_text(time.seconds)} predicted on one thread"
    terms = sorted(time.terms.items(), key=lambda term: -term[1])
    for name, seconds in [*((name, x) for name, x in terms if x), ("launch", time.launch)]:
        share = percent_text(seconds / time.seconds)
        words = TERMS.get(name, "a launch from Python")
        yield f"    {name:9} {seconds_text(seconds):>8}  {share:>6}  {words}"
    rates = ", ".join(
        f"{name} {rate_text(rate, RATES.get(name, 'B/s'))}" for name, rate in time.rates.items()
    )
    kind = "" if time.rates_measured else "estimates: "
    yield f"  core       {rates}"
    yield f"             {kind}{time.rates_source}"
    idle = ", ".join(f"{percent_text(part)} of {n}" for n, part in time.idle.items() if n > 1)
    yield f"  threads    {time.programs} programs; equally long, they leave idle {idle} threads"


def _next(facts: CpuExplanation) -> Iterator[str]:
    if facts.tried == 1:
        yield "  none: rules leave this tile alone"
        return
    yield f"  {facts.tried} tiles, ranked by time and idle threads for '{facts.ranked_for}'"
    yield from map(next_line, facts.next_best)


def _bound(facts: CpuExplanation) -> Iterator[str]:
    return bound_lines(facts.bound)


def _others(facts: CpuExplanation) -> Iterator[str]:
    for other in facts.other_processors or ():
        yield f"  {other.processor:16} {pick_line(other)}"
    for mask in facts.other_masks or ():
        yield f"  {mask.mask:16} {pick_line(mask)}"


def _measured(facts: CpuExplanation) -> Iterator[str]:
    if facts.measured is None and facts.tried == 1:
        return iter(["  no record; rules leave this tile alone, so tuning would change nothing"])
    return measured_lines(facts)


SECTIONS: Mapping[str, Callable[[CpuExplanation], Iterator[str]]] = {
    "tile": tile_lines,
    "mask": visited_lines,
    "traffic": _traffic,
    "bound": _bound,
    "time": _time,
    "next": _next,
    "others": _others,
    "measured": _measured,
}
"""The sections of a kernel, by the names in text.py."""
