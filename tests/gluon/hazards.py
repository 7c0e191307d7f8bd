"""Registers that an asynchronous product of sm_90 still uses: who touches them too early.

A wgmma reads its first operand's registers, and writes its accumulator's, until a wait retires its
group (PTX, wgmma.mma_async and wgmma.wait_group). The compiler has to see that; where it is not
told (`deps` of Gluon's waits), it may use them again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilegen.compiling.machine_code.instructions import Instruction

OPERAND_REGISTERS = 4
"""Registers of a thread that hold 64 x 16 elements of 16 bits."""
MOST_GROUPS = 8
"""Groups in flight that are told apart; older ones count as one."""
_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x16")
_NO_RESULT = ("ST", "RED", "BAR", "SYNCS", "BRA", "EXIT", "WARP", "UTMA", "R2UR", "NANOSLEEP")
_NO_REGISTER = ("ISETP", "FSETP", "DSETP", "HSETP2", "PLOP3", "UISETP", "VOTEU", "R2P")

Group = tuple[frozenset[int], frozenset[int]]
"""Registers that a group of products reads, and those that it writes."""


@dataclass(frozen=True)
class Hazard:
    """An instruction that touches a register which a product in flight uses."""

    at: int
    """The instruction, counted from 0."""
    text: str
    register: int
    what: str
    """The hazard: `writes an operand`, `writes a result` or `reads a result`."""


def hazards(code: Sequence[Instruction]) -> list[Hazard]:
    """Return the hazards of a function, along every path through it."""
    found: dict[tuple[int, int, str], Hazard] = {}
    seen: set[tuple[int, tuple[Group, ...]]] = set()
    # Jumps through registers go where no other jump does: to the parts that partitions run.
    reached = {0} | {one.target for one in code if one.target is not None}
    reached |= {i + 1 for i, one in enumerate(code) if one.falls_through}
    todo: list[tuple[int, tuple[Group, ...]]] = [
        (at, ()) for at in range(len(code)) if at == 0 or at not in reached
    ]
    while todo:
        at, groups = todo.pop()
        while at < len(code) and (at, groups) not in seen:
            seen.add((at, groups))
            one = code[at]
            for hazard in _of(at, one, groups):
                found[at, hazard.register, hazard.what] = hazard
            groups = _after(one, groups)
            if one.target is not None:
                todo.append((one.target, groups))
            if not one.falls_through:
                break
            at += 1
    return sorted(found.values(), key=lambda one: (one.at, one.register))


def _of(at: int, one: Instruction, groups: tuple[Group, ...]) -> Iterator[Hazard]:
    if not groups or _PRODUCT.match(one.opcode):
        return
    read = frozenset[int]().union(*(reads for reads, _ in groups))
    written = frozenset[int]().union(*(writes for _, writes in groups))
    results, operands = _registers(one)
    for register in results:
        for what, busy in (("writes an operand", read), ("writes a result", written)):
            if register in busy:
                yield Hazard(at, f"{one.opcode} {one.operands}", register, what)
    for register in operands:
        if register in written:
            yield Hazard(at, f"{one.opcode} {one.operands}", register, "reads a result")


def _after(one: Instruction, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Return the groups in flight after an instruction; the last is open while it is issued."""
    if found := _PRODUCT.match(one.opcode):
        names = re.findall(r"(?<![\w.])R(\d+|Z)\b", one.operands)
        writes = _range(names[0], int(found[1]) // 2)
        first = one.operands.split(",")[1].strip()
        reads = _range(first[1:], OPERAND_REGISTERS) if re.match(r"R\d+$", first) else frozenset()
        *others, (open_reads, open_writes) = groups or ((frozenset(), frozenset()),)
        now = open_reads | reads, open_writes | writes
        if len(others) >= MOST_GROUPS:  # of a loop that never waits
            (a, b), (c, d), *rest = others
            others = [(a | c, b | d), *rest]
        done = (*others, now)
        return (*done, (frozenset(), frozenset())) if "gsb0" in one.operands else done
    if one.opcode.startswith("WARPGROUP.DEPBAR"):
        left = int(re.findall(r"0x([0-9a-f]+)", one.operands)[-1], 16)
        closed = groups[:-1]
        return (*closed[max(0, len(closed) - left) :], groups[-1]) if groups else ()
    return groups


def _range(first: str, count: int) -> frozenset[int]:
    return frozenset() if first == "Z" else frozenset(range(int(first), int(first) + count))


def _registers(one: Instruction) -> tuple[frozenset[int], frozenset[int]]:
    """Return the registers that an instruction writes, and those that it reads."""
    parts = [part.strip() for part in one.operands.split(",")]
    named = [re.findall(r"(?<![\w.])R(\d+)\b", part) for part in parts]
    place = next((i for i, part in enumerate(parts) if not re.match(r"!?U?P", part)), 0)
    if one.opcode.startswith(_NO_RESULT) or one.opcode.startswith(_NO_REGISTER):
        results: frozenset[int] = frozenset()
        place = -1
    else:
        match = re.match(r"R(\d+)$", parts[place]) if parts else None
        results = _range(match[1], _width(one.opcode)) if match else frozenset()
    operands = {int(name) for i, names in enumerate(named) if i != place for name in names}
    return results, frozenset(operands)


def _width(opcode: str) -> int:
    """Return the registers of a result."""
    if opcode.startswith(("LD", "ATOM")) and ".128" in opcode:
        return 4
    if opcode.startswith("LDSM") and opcode.endswith(".4"):
        return 4
    wide = ".64" in opcode or ".WIDE" in opcode or opcode in ("CS2R", "DMUL", "DADD", "DFMA")
    return 2 if wide or (opcode.startswith("LDSM") and opcode.endswith(".2")) else 1
