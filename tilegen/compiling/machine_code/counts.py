"""Counts of one pass through a loop: instructions by unit, matrix products, bytes, and what runs
while matrix products are in flight."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from tilegen.compiling.machine_code.instructions import Instruction, Unit, unit_of
from tilegen.model.as_compiled import LANES

WARPS_OF_GROUP = 4
HOMES = {"g": "S", "t": "T"}
"""Homes of operands by the first letter of their names: gdesc is shared memory, tmem tensor
memory."""
WIDTHS = (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1))
"""Bytes that a thread moves, by a modifier of the instruction; 4 without one."""


@dataclass(frozen=True)
class CountedProduct:
    """One matrix instruction: rows x columns x depth, for all threads that issue it together."""

    rows: int
    columns: int
    depth: int
    operands: str
    """Homes of both operands: S is shared memory, R registers, T tensor memory."""
    warps: int
    """Warps that issue the instruction together; 0: one thread issues it for the whole program."""

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}.{self.operands}"

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of the instruction."""
        return self.rows * self.columns * self.depth

    @property
    def shared_words(self) -> int:
        """16-bit words that the instruction reads from shared memory by itself."""
        first, second = (home == "S" for home in self.operands)
        return first * self.rows * self.depth + second * self.columns * self.depth


@dataclass(frozen=True, kw_only=True)
class LoopCode:
    """One pass through a loop, of each warp."""

    first: int
    depth: int
    units: Counter[Unit]
    """Instructions by the unit that executes them."""
    products: Counter[CountedProduct]
    shared_bytes: int
    """Bytes that loads and stores of shared memory move."""
    local_words: int
    """Words of 4 bytes that loads and stores of local memory move for a thread."""
    fp32_slots: int
    """Issue slots of the fp32 lanes: an instruction that works on pairs takes two."""
    waits: tuple[int, ...]
    """Groups of matrix products that each wait leaves in flight."""
    exposed: Counter[Unit]
    """Instructions that are issued while no matrix product of the warp is in flight; all, where
    matrix instructions are not asynchronous."""
    timeline: str
    """The events of a pass: M matrix instruction, wN wait until N groups are left, X or x
    exponential outside or inside of a product's time, B barrier, S wait for a transfer or another
    warp."""

    @property
    def instructions(self) -> int:
        """Number of all instructions."""
        return self.units.total()

    @property
    def asynchronous(self) -> bool:
        """True if a warpgroup goes on while its matrix products run, and waits where it says so."""
        return any(instruction.warps == WARPS_OF_GROUP for instruction in self.products)

    @property
    def serialized(self) -> bool:
        """True if there are as many waits as matrix instructions, so that nothing overlaps."""
        return self.asynchronous and len(self.waits) >= self.products.total()

    @property
    def local_share(self) -> float:
        """Part of the instructions that load or store what registers lack room for."""
        return self.units["local"] / self.instructions

    def multiply_adds(self, warps: int) -> int:
        """Return the multiply-adds of a program's matrix instructions."""
        return sum(
            count
            * instruction.multiply_adds
            * (warps // instruction.warps if instruction.warps else 1)
            for instruction, count in self.products.items()
        )


def count(first: int, depth: int, body: Sequence[Instruction]) -> LoopCode:
    """Add up the instructions of one pass through a loop."""
    units: Counter[Unit] = Counter(unit_of(instruction.opcode) for instruction in body)
    exposed, waits, timeline = _in_flight(body)
    return LoopCode(
        first=first,
        depth=depth,
        units=units,
        products=Counter(
            product
            for i, instruction in enumerate(body)
            if (product := _product(body, i, instruction))
        ),
        shared_bytes=sum(_shared_bytes(instruction.opcode) for instruction in body),
        local_words=sum(
            _width(instruction.opcode) // 4 or 1
            for instruction in body
            if unit_of(instruction.opcode) == "local"
        ),
        fp32_slots=units["fp32"]
        + sum(instruction.opcode[4:5] == "2" for instruction in body if _pairs(instruction)),
        waits=waits,
        exposed=exposed,
        timeline=timeline,
    )


def _pairs(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(("FFMA2", "FADD2", "FMUL2"))


def _product(
    body: Sequence[Instruction], at: int, instruction: Instruction
) -> CountedProduct | None:
    """Return the shape of a matrix instruction; None for any other."""
    if match := re.match(r"[HQI]GMMA\.(?:SP\.)?(\d+)x(\d+)x(\d+)", instruction.opcode):
        first = instruction.operands.split(",")[1].strip()
        homes = "SS" if first.startswith("gdesc") else "RS"
        return CountedProduct(int(match[1]), int(match[2]), int(match[3]), homes, WARPS_OF_GROUP)
    if match := re.match(r"[HQI]MMA\.(\d{4,5})\b", instruction.opcode):  # 16816: 16 x 8 x 16
        rows, columns, depth = int(match[1][:2]), int(match[1][2]), int(match[1][3:])
        return CountedProduct(rows, columns, depth, "RR", 1)
    if instruction.opcode.startswith("UTC") and "MMA" in instruction.opcode:
        rows, columns = _described(body, at)
        first, second = (name.strip()[0] for name in instruction.operands.split(",")[:2])
        depth = 16 if instruction.opcode.startswith("UTCH") else 32
        return CountedProduct(
            rows, columns, depth, HOMES.get(first, "?") + HOMES.get(second, "?"), 0
        )
    if match := re.match(r"v_mfma_f32_(\d+)x(\d+)x(\d+)_", instruction.opcode):
        return CountedProduct(int(match[1]), int(match[2]), int(match[3]), "RR", 1)
    return None


def _described(body: Sequence[Instruction], at: int) -> tuple[int, int]:
    """Return the rows and columns of a tcgen05 product, from the last constant in the register of
    its instruction descriptor:  bits 24 to 28 are rows / 16, 17 to 22 columns / 8 (PTX ISA,
    tcgen05.mma, instruction descriptor)."""
    register = re.search(r"idesc\[(UR\d+)\]", body[at].operands)
    if register is None:
        return 0, 0
    for instruction in [*reversed(body[:at]), *reversed(body[at:])]:
        if instruction.opcode == "UMOV" and instruction.operands.startswith(f"{register[1]}, 0x"):
            bits = int(instruction.operands.split("0x")[1], 16)
            return (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8
    return 0, 0


def _shared_bytes(opcode: str) -> int:
    """Return the bytes of shared memory that a warp's instruction reads or writes."""
    if unit_of(opcode) != "shared" or opcode[:1].islower():
        return 0
    if opcode.startswith(("LDSM", "STSM")):  # 8 x 8 matrices of 16 bits
        return 128 * int(match[1] if (match := re.search(r"M\w*\.(\d)$", opcode)) else 1)
    return LANES * _width(opcode)


def _width(opcode: str) -> int:
    """Return the bytes that a load or a store moves for a thread."""
    parts = opcode.split(".")
    return next((size for name, size in WIDTHS if name in parts), 4)


def _in_flight(body: Sequence[Instruction]) -> tuple[Counter[Unit], tuple[int, ...], str]:
    """Return the cycles issued outside of matrix products, the waits, and the timeline.

    The loop is followed twice, so that what one pass leaves in flight meets the next.
    """
    exposed: Counter[Unit] = Counter()
    waits: list[int] = []
    events: list[str] = []
    groups, issuing = 0, False
    for _ in range(2):
        exposed.clear()
        waits.clear()
        events.clear()
        for instruction in body:
            unit = unit_of(instruction.opcode)
            if unit == "tensor":
                closes = "gsb0" in instruction.operands
                groups, issuing = groups + closes, "GMMA" in instruction.opcode and not closes
                events.append("M")
            elif instruction.opcode.startswith("WARPGROUP.DEPBAR"):
                left = (
                    int(match[1], 16)
                    if (match := re.search(r",\s*0x(\w+)", instruction.operands))
                    else 0
                )
                groups = min(groups, left)
                waits.append(left)
                events.append(f"w{left}")
            else:
                inside = groups > 0 or issuing
                if not inside:
                    exposed[unit] += 1
                if unit == "exp":
                    events.append("x" if inside else "X")
                elif instruction.opcode.startswith(("BAR", "s_barrier")):
                    events.append("B")
                elif unit == "wait":
                    events.append("S")
    return exposed, tuple(waits), _shortened(events)


def _shortened(events: Iterable[str]) -> str:
    """Return a timeline in which an event that happens n times in a row is written once."""
    runs = ((event, len(list(run))) for event, run in groupby(events))
    return " ".join(f"{event}{f'*{n}' if n > 1 else ''}" for event, n in runs)
