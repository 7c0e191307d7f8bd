"""Records of a compiled kernel: the resources that its compiler reports, and the instructions of a
step by its machine code."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tilegen.kernels.config import Kernel


@dataclass(frozen=True, kw_only=True)
class StepCode:
    """Instructions of a step of a program, of all its warps together, and bytes that it moves."""

    instructions: int
    exponentials: int
    """Instructions of the special-function units."""
    fp32: int
    """Issue slots of the fp32 lanes."""
    integer: int
    """Instructions of the units for integers, comparisons and conversions."""
    multiply_adds: int
    """Multiply-adds of matrix instructions."""
    rows: int
    """Rows of the smallest matrix instruction."""
    shared_bytes: int
    """Bytes to and from shared memory, operands of matrix instructions included."""
    local: int
    """Spill loads and stores of the loop [4-byte words a thread]."""
    exposed: int
    """Instructions that are issued while no matrix product of the warp is in flight."""
    exposed_exponentials: int
    asynchronous: bool
    """True: a warp goes on while its matrix products run, so that `exposed` counts."""
    serialized: bool
    """True: each matrix instruction is waited for before the next."""
    partial_instructions: int = 0
    """Instructions of a step on a partial tile; 0 where the loop is the same."""
    local_once: int = 0
    """Spill loads and stores outside of loops, paid once a program [4-byte words a thread]."""
    kernel: Kernel = ""
    """The kernel to take numbers from that the code does not show; empty: the forward."""


NUMBERS = tuple(one.name for one in fields(StepCode) if one.type == "int" and one.name != "rows")
"""Names of the fields that add up over steps."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of a compiled kernel, as its compiler reports them."""

    registers: int
    """32-bit registers of one thread."""
    spill_bytes: int
    """Local memory of one thread [bytes]; 0 where nothing spills."""
    shared_bytes: int
    """Shared memory of one program [bytes]."""
    step_code: StepCode | None = None
    """Instructions of a step of the inner loop. None where the loop has no matrix instructions,
    where machine code cannot be read, and on AMD's GPUs, whose units have no rates here."""
