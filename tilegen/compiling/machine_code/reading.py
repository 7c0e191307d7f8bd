"""Machine code of a kernel as a whole: its loops, and what a step of its inner loop issues."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilegen.compiling.machine_code.counts import LoopCode, count
from tilegen.compiling.machine_code.instructions import Instruction, read_gcn, read_sass
from tilegen.compiling.machine_code.loops import loops_of
from tilegen.compiling.tools import nvidia_tool
from tilegen.model.resources import NUMBERS, StepCode


@dataclass(frozen=True, kw_only=True)
class MachineCode:
    """The machine code of one kernel."""

    warps: int
    body: LoopCode
    """The whole kernel, every instruction counted once."""
    loops: tuple[LoopCode, ...]
    """Loops in the order of their first instructions."""

    def step(self, multiply_adds: int, *, roles: bool = False) -> StepCode | None:
        """Count the instructions of a step of the inner loop, which has this many multiply-adds of
        matrix units. Returns None if no loop has such steps, or if these units form no products.

        A loop may be unrolled, in part or fully, and a step may contain a loop over slices of a
        head dim. Partial tiles have a separate loop, with more instructions. With `roles`, each
        computing warpgroup has loops of its own for its part of a step, inside of a loop over row
        tiles.
        """
        each = self._steps_of_roles if roles else self._steps
        steps = sorted(each(multiply_adds), key=lambda step: step.instructions)
        if not steps:
            return None
        return replace(
            steps[0],
            partial_instructions=steps[-1].instructions,
            local_once=self.warps * self._local_once,
        )

    @property
    def _local_once(self) -> int:
        """Words of local memory that each warp moves outside of loops."""
        in_loops = sum(loop.local_words for loop in self.loops)
        return 0 if self._is_step else self.body.local_words - in_loops

    @property
    def _is_step(self) -> bool:
        """True if all matrix products are outside of loops: then the kernel itself is a step."""
        return not any(loop.products for loop in self.loops)

    def _steps(self, multiply_adds: int) -> Iterator[StepCode]:
        outer = [loop for loop in self.loops if not loop.depth]
        for i, loop in enumerate(self.loops):
            if loop.depth:
                continue
            end = outer[outer.index(loop) + 1].first if loop is not outer[-1] else 2**62
            inner = [each for each in self.loops[i + 1 :] if each.first < end and each.products]
            yield from self._nest(loop, inner, multiply_adds)
        if self._is_step:
            yield from self._nest(self.body, [], multiply_adds)

    def _steps_of_roles(self, multiply_adds: int) -> Iterator[StepCode]:
        loops = [loop for loop in self.loops if loop.products]
        for loop, after in zip(loops, [*loops[1:], None], strict=True):
            if after is None or after.depth <= loop.depth:  # no loop inside has products
                yield from self._nest(loop, [], multiply_adds)

    def _nest(
        self, loop: LoopCode, inner: list[LoopCode], multiply_adds: int
    ) -> Iterator[StepCode]:
        """Return the step of a loop with at most one loop in it."""
        own = loop.multiply_adds(self.warps)
        if not inner:
            passes, rest = divmod(own, multiply_adds)
            if passes and not rest:
                yield _divided(_step_code(loop, self.warps), passes)
        elif len(inner) == 1:
            passes, rest = divmod(multiply_adds - own, inner[0].multiply_adds(self.warps))
            if passes > 0 and not rest:
                yield _sum(_step_code(loop, self.warps), _step_code(inner[0], self.warps), passes)


def read(disassembly: str, warps: int, *, gcn: bool = False) -> MachineCode:
    """Return the machine code of the only kernel in a text of a disassembler, or of AMD's compiler
    if `gcn`. Raises ValueError if there is none."""
    functions = (read_gcn if gcn else read_sass)(disassembly)
    if not functions:
        raise ValueError(f"expected a disassembled kernel, got {disassembly[:80]!r}")
    code: list[Instruction] = max(functions.values(), key=len)
    return MachineCode(
        warps=warps,
        body=count(0, 0, code),
        loops=tuple(count(loop.first, loop.depth, loop.instructions) for loop in loops_of(code)),
    )


def disassembled(cubin: bytes) -> str:
    """Return the text of a kernel for NVIDIA, by the disassembler that Triton's wheel brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # `-ndf` leaves out the analysis of registers' lives, which takes longer.
        command = [nvidia_tool("nvdisasm"), "-c", "-ndf", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _step_code(loop: LoopCode, warps: int) -> StepCode:
    words = sum(
        number * one.shared_words * (warps // one.warps if one.warps else 1)
        for one, number in loop.products.items()
    )
    integer = loop.units["alu"] + loop.units["half"]
    return StepCode(
        instructions=loop.instructions * warps,
        exponentials=loop.units["exp"] * warps,
        fp32=loop.fp32_slots * warps,
        integer=integer * warps,
        multiply_adds=loop.multiply_adds(warps),
        rows=min((one.rows for one in loop.products), default=0),
        shared_bytes=loop.shared_bytes * warps + 2 * words,
        local=loop.local_words * warps,
        exposed=loop.exposed.total() * warps,
        exposed_exponentials=loop.exposed["exp"] * warps,
        asynchronous=loop.asynchronous,
        serialized=loop.serialized,
    )


def _divided(code: StepCode, passes: int) -> StepCode:
    return replace(code, **{name: round(getattr(code, name) / passes) for name in NUMBERS})


def _sum(outer: StepCode, inner: StepCode, passes: int) -> StepCode:
    added = {name: getattr(outer, name) + passes * getattr(inner, name) for name in NUMBERS}
    serialized = outer.serialized or inner.serialized
    rows = min(outer.rows or inner.rows, inner.rows)
    return replace(outer, **added, rows=rows, serialized=serialized)
