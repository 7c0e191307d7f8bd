"""The rule for kernels that may be used: one for tuner, pipeline, bundles and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilegen.errors import BuildFailed
from tilegen.model.on_chip import MOST_SPILLED

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec
    from tilegen.model.resources import Resources, StepCode

MOST_LOCAL = 0.1
"""Part of a step's time that loads and stores of local memory may take, at most."""
FEWEST_REGISTERS = 16
"""Registers that a thread of any kernel for NVIDIA has at least: real ones have 22 and more. The
assembler makes a trap with 4 of a kernel that asks for more tensor memory than there is, and says
nothing."""


def acceptable(built: Resources | BuildFailed, gpu: GpuSpec) -> bool:
    """True for a compiled kernel that may be used on a GPU."""
    return not objection(built, gpu)


def objection(built: Resources | BuildFailed, gpu: GpuSpec) -> str:
    """Return why a compiled kernel may not be used on a GPU, an empty text where it may.

    A kernel has to fit into shared memory and tensor memory, must not wait for each of its matrix
    products, and may spend little of its inner loop's time on what it lacks registers for: see
    MOST_LOCAL. A kernel whose inner loop cannot be told from its machine code may spill a little
    (see MOST_SPILLED).
    """
    if isinstance(built, BuildFailed):
        return str(built)
    if built.shared_bytes > gpu.smem_per_block:
        sizes = (f"{size / 1024:.4g} KiB" for size in (built.shared_bytes, gpu.smem_per_block))
        return " > ".join(sizes)
    if _is_trap(built, gpu):
        return "more tensor memory than there is: the assembler made a trap of the kernel"
    code = built.step_code
    if code is None:
        return spill_objection(built.spill_bytes)
    if code.serialized:
        return f"{built.spill_bytes} bytes spilled, and each matrix product is waited for"
    return _waits_for_local_memory(code, gpu) if code.local else ""


def _is_trap(built: Resources, gpu: GpuSpec) -> bool:
    return built.registers < FEWEST_REGISTERS and gpu.arch.startswith("sm_")


def _waits_for_local_memory(code: StepCode, gpu: GpuSpec) -> str:
    from tilegen.model.as_compiled import clocks_as_compiled

    clocks = clocks_as_compiled(code, gpu)
    if clocks.local <= MOST_LOCAL * clocks.bound:
        return ""
    return (
        f"local memory takes {clocks.local:.0f} clocks of a step, at most {MOST_LOCAL:.0%} of its "
        f"{clocks.bound:.0f} are taken"
    )


def first_that_fits(built: Sequence[Resources | BuildFailed], gpu: GpuSpec) -> int:
    """Return the index of the first kernel that is acceptable on this GPU.

    Where all kernels spill much, the kernel that spills least is returned. Raises BuildFailed where
    no kernel compiled and fits.
    """
    fitting = [
        (0 if acceptable(result, gpu) else result.spill_bytes, i)
        for i, result in enumerate(built)
        if not isinstance(result, BuildFailed)
        and result.shared_bytes <= gpu.smem_per_block
        and not _is_trap(result, gpu)
    ]
    if not fitting:
        raise BuildFailed(
            f"expected one of {len(built)} configs to compile for {gpu.name} within "
            f"{gpu.smem_per_block} bytes of shared memory, none did; the first: {built[0]}"
        )
    return min(fitting)[1]


def spill_objection(spill_bytes: int) -> str:
    """Return the objection to what a thread spills, an empty text where there is none."""
    if spill_bytes <= MOST_SPILLED:
        return ""
    return f"{spill_bytes} bytes of registers spilled a thread, at most {MOST_SPILLED} are taken"
