"""Records of a compiled kernel: resources by the compiler, and instructions of a step by the
machine code."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tilegen.kernels.config import Kernel


@dataclass(frozen=True, kw_only=True)
class StepCode:
    """Instructions of a step of a program, over all its warps, and bytes that it moves."""

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
    """Bytes to and from shared memory, including operands of matrix instructions."""
    local: int
    """Spill loads and stores in the loop [4-byte words per thread]."""
    exposed: int
    """Instructions issued while no matrix product of the warp is in flight."""
    exposed_exponentials: int
    asynchronous: bool
    """True if a warp continues while its matrix products run, so `exposed` counts."""
    serialized: bool
    """True if each matrix instruction is waited for before the next is issued."""
    partial_instructions: int = 0
    """Instructions of a step on a partial tile; 0 if there is no separate loop."""
    local_once: int = 0
    """Spill loads and stores outside of loops, once per program [4-byte words per thread]."""
    kernel: Kernel = ""
    """The kernel whose fitted numbers replace those that the code does not show; empty: the
    forward."""


NUMBERS = tuple(x.name for x in fields(StepCode) if x.type == "int" and x.name != "rows")
"""Fields that are summed over steps."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of a compiled kernel, as its compiler reports them."""

    registers: int
    """32-bit registers of a thread."""
    spill_bytes: int
    """Local memory of a thread [bytes]; 0 if nothing spills."""
    shared_bytes: int
    """Shared memory of a program [bytes]."""
    step_code: StepCode | None = None
    """Instructions of a step of the inner loop. None if the loop has no matrix instructions or
    machine code cannot be read, and on AMD GPUs, whose units have no rates here."""
