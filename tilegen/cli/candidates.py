"""Format candidates as the table of `tilegen propose`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilegen.model.estimate import Candidate
from tilegen.units import bytes_text, memory_text, seconds_text

HEADER = (
    "tile               predicted  by its code  limit    SMs-L2  x bound   on chip"
    "  registers  spilled"
)


def table(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Format configs as a table, at most 100 columns wide, best first, with notes below.

    `by its code` is the time by the machine code of a compiled config; its registers and spills are
    the compiler's, marked by `*`. All other numbers are predictions.
    """
    yield HEADER
    notes: dict[str, str] = {}
    for candidate in candidates:
        yield _row(candidate)
        if code := candidate.compiled:
            if code.resources is not None:
                notes.setdefault("", f"* as compiled by Triton {code.triton}")
            if code.objection:
                notes[candidate.config.key] = f"{candidate.config.key} is refused: {code.objection}"
    yield from notes.values()
    if candidates:
        yield f"{candidates[0].config.key}: {candidates[0].reason}"


def _row(candidate: Candidate) -> str:
    cost, code = candidate.estimate, candidate.compiled
    by_code, registers, spilled = "", f"{cost.registers or '-'} ", ""
    on_chip = memory_text(cost.smem_bytes) if cost.registers else "-"  # a processor has neither
    if code is not None:
        by_code = "refused"
        if code.seconds is not None and not code.objection:
            by_code = seconds_text(code.seconds)
        if (used := code.resources) is not None:
            registers, spilled = f"{used.registers}*", f"{used.spill_bytes}*"
    moved = cost.read_bytes + cost.write_bytes
    # The bound is 0 where a kernel only hands intermediates on and the mask keeps no pair.
    over_bound = f"{moved / least:.1f}" if (least := cost.lower_bound_bytes) else "-"
    return (
        f"{candidate.config.key:19} {seconds_text(cost.seconds):>8}  {by_code:>11}  {cost.limit:7} "
        f"{bytes_text(moved):>7}  {over_bound:>7}  {on_chip:>8}  {registers:>9}  {spilled:>7}"
    ).rstrip()
