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
    by_name: dict[tuple[int, int, str], Hazard] = {}
    seen: set[tuple[int, tuple[Group, ...]]] = set()
    # Jumps through registers go where no other jump does: to the parts that partitions run.
    reached = {0} | {item.target for item in code if item.target is not None}
    reached |= {i + 1 for i, item in enumerate(code) if item.falls_through}
    todo: list[tuple[int, tuple[Group, ...]]] = [
        (at, ()) for at in range(len(code)) if at == 0 or at not in reached
    ]
    while todo:
        at, groups = todo.pop()
        while at < len(code) and (at, groups) not in seen:
            seen.add((at, groups))
            item = code[at]
            for hazard in _of(at, item, groups):
                by_name[at, hazard.register, hazard.what] = hazard
            groups = _after(item, groups)
            if item.target is not None:
                todo.append((item.target, groups))
            if not item.falls_through:
                break
            at += 1
    return sorted(by_name.values(), key=lambda item: (item.at, item.register))


def _of(at: int, instruction: Instruction, groups: tuple[Group, ...]) -> Iterator[Hazard]:
    if not groups or _PRODUCT.match(instruction.opcode):
        return
    read = frozenset[int]().union(*(reads for reads, _ in groups))
    written = frozenset[int]().union(*(writes for _, writes in groups))
    results, operands = _registers(instruction)
    for register in results:
        for what, busy in (("writes an operand", read), ("writes a result", written)):
            if register in busy:
                yield Hazard(at, f"{instruction.opcode} {instruction.operands}", register, what)
    for register in operands:
        if register in written:
            yield Hazard(
                at, f"{instruction.opcode} {instruction.operands}", register, "reads a result"
            )


def _after(instruction: Instruction, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Return the groups in flight after an instruction; the last is open while it is issued."""
    if matches := _PRODUCT.match(instruction.opcode):
        names = re.findall(r"(?<![\w.])R(\d+|Z)\b", instruction.operands)
        writes = _range(names[0], int(matches[1]) // 2)
        first = instruction.operands.split(",")[1].strip()
        reads = _range(first[1:], OPERAND_REGISTERS) if re.match(r"R\d+$", first) else frozenset()
        *others, (open_reads, open_writes) = groups or ((frozenset(), frozenset()),)
        now = open_reads | reads, open_writes | writes
        if len(others) >= MOST_GROUPS:  # of a loop that never waits
            (a, b), (c, d), *rest = others
            others = [(a | c, b | d), *rest]
        done = (*others, now)
        return (*done, (frozenset(), frozenset())) if "gsb0" in instruction.operands else done
    if instruction.opcode.startswith("WARPGROUP.DEPBAR"):
        left = int(re.findall(r"0x([0-9a-f]+)", instruction.operands)[-1], 16)
        closed = groups[:-1]
        return (*closed[max(0, len(closed) - left) :], groups[-1]) if groups else ()
    return groups


def _range(first: str, count: int) -> frozenset[int]:
    return frozenset() if first == "Z" else frozenset(range(int(first), int(first) + count))


def _registers(instruction: Instruction) -> tuple[frozenset[int], frozenset[int]]:
    """Return the registers that an instruction writes, and those that it reads."""
    parts = [part.strip() for part in instruction.operands.split(",")]
    named = [re.findall(r"(?<![\w.])R(\d+)\b", part) for part in parts]
    place = next((i for i, part in enumerate(parts) if not re.match(r"!?U?P", part)), 0)
    if instruction.opcode.startswith(_NO_RESULT) or instruction.opcode.startswith(_NO_REGISTER):
        results: frozenset[int] = frozenset()
        place = -1
    else:
        match = re.match(r"R(\d+)$", parts[place]) if parts else None
        results = _range(match[1], _width(instruction.opcode)) if match else frozenset()
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
