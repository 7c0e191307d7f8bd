"""Format candidates as the table of `tilegen propose`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from tilegen.cli.options import WIDTH
from tilegen.model.estimate import Candidate
from tilegen.units import bytes_text, memory_text, ratio_text, seconds_text

HEADER = (
    "tile",
    "predicted",
    "by its code",
    "limit",
    "moved",
    "x bound",
    "on chip",
    "registers",
    "spilled",
)
TO_THE_LEFT = ("tile", "limit")
"""Columns of words, which are aligned to the left."""


def table(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Format configs as a table, at most WIDTH columns wide, best first, with notes below.

    `by its code` is the time by the machine code of a compiled config; its registers and spills are
    the compiler's, marked by `*`. All other numbers are predictions. Columns without a value, such
    as the registers of a processor, are left out.
    """
    rows = [HEADER, *map(_row, candidates)]
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        cells = (
            f"{cell:{width}}" if column[0] in TO_THE_LEFT else f"{cell:>{width}}"
            for cell, width, column in zip(row, widths, columns, strict=True)
        )
        yield "  ".join(cells).rstrip()
    for note in _notes(candidates):
        yield from textwrap.wrap(note, WIDTH, break_on_hyphens=False, subsequent_indent="  ")


def _notes(candidates: Sequence[Candidate]) -> Iterator[str]:
    notes: dict[str, str] = {}
    for candidate in candidates:
        if code := candidate.compiled:
            if code.resources is not None:
                notes.setdefault("", f"* as compiled by Triton {code.triton}")
            if code.why_not_used:
                notes[candidate.config.key] = (
                    f"{candidate.config.key} is refused: {code.why_not_used}"
                )
    yield from notes.values()
    if candidates:
        yield f"{candidates[0].config.key}: {candidates[0].reason}"


def _row(candidate: Candidate) -> tuple[str, ...]:
    cost, code = candidate.estimate, candidate.compiled
    is_gpu = cost.registers > 0  # a processor has neither registers of a thread nor shared memory
    by_code, registers, spilled = "", f"{cost.registers} " if is_gpu else "", ""
    if code is not None:
        by_code = "refused"
        if code.seconds is not None and not code.why_not_used:
            by_code = seconds_text(code.seconds)
        if (used := code.resources) is not None:
            registers, spilled = f"{used.registers}*", f"{memory_text(used.spill_bytes)}*"
    moved = cost.read_bytes + cost.write_bytes
    # The bound is 0 where a kernel only hands intermediates on and the mask keeps no pair.
    over_bound = ratio_text(moved / least) if (least := cost.lower_bound_bytes) else "-"
    return (
        candidate.config.key,
        seconds_text(cost.seconds),
        by_code,
        cost.limit,
        bytes_text(moved),
        over_bound,
        memory_text(cost.smem_bytes) if is_gpu else "",
        registers,
        spilled,
    )
