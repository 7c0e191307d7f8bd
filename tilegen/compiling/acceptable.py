"""The rule for usable kernels, shared by tuner, pipeline, bundles and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilegen.errors import BuildFailed
from tilegen.model.on_chip import MOST_SPILLED

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec
    from tilegen.model.resources import Resources, StepCode

MOST_LOCAL = 0.1
"""Largest part of a step's time that loads and stores of local memory may take."""
FEWEST_REGISTERS = 16
"""Fewest registers per thread of a usable kernel for NVIDIA; real kernels have 22 or more. If a
kernel needs too much tensor memory, the assembler emits a trap with 4 registers and no error."""


def acceptable(built: Resources | BuildFailed, gpu: GpuSpec) -> bool:
    """Return True if a compiled kernel may be used on a GPU."""
    return not why_not_used(built, gpu)


def why_not_used(built: Resources | BuildFailed, gpu: GpuSpec) -> str:
    """Explain why a compiled kernel may not be used on a GPU; empty if it may.

    A kernel must run, as `why_not_run` checks. It must not wait for each of its matrix products,
    and may spend little of its inner loop's time on spills (see MOST_LOCAL). If the inner loop
    cannot be read from the machine code, the kernel may spill a little (see MOST_SPILLED).
    """
    if isinstance(built, BuildFailed):
        return str(built)
    if reason := why_not_run(built, gpu):
        return reason
    code = built.step_code
    if code is None:
        return why_not_spilled(built.spill_bytes)
    if code.serialized:
        return f"{built.spill_bytes} bytes spilled, and each matrix product is waited for"
    return _waits_for_local_memory(code, gpu) if code.local else ""


def why_not_run(built: Resources, gpu: GpuSpec) -> str:
    """Explain why a compiled kernel cannot run on a GPU; empty if it fits into shared memory and
    tensor memory."""
    if built.shared_bytes > gpu.smem_per_block:
        sizes = (f"{size / 1024:.4g} KiB" for size in (built.shared_bytes, gpu.smem_per_block))
        return " > ".join(sizes)
    if _is_trap(built, gpu):
        return (
            "needs more tensor memory than the GPU has: the assembler turned the kernel into a trap"
        )
    return ""


def _is_trap(built: Resources, gpu: GpuSpec) -> bool:
    return built.registers < FEWEST_REGISTERS and gpu.arch.startswith("sm_")


def _waits_for_local_memory(code: StepCode, gpu: GpuSpec) -> str:
    from tilegen.model.as_compiled import clocks_as_compiled

    clocks = clocks_as_compiled(code, gpu)
    if clocks.local <= MOST_LOCAL * clocks.bound:
        return ""
    return (
        f"local memory takes {clocks.local:.0f} clocks of a step; the limit is {MOST_LOCAL:.0%} of "
        f"its {clocks.bound:.0f}"
    )


def first_that_fits(built: Sequence[Resources | BuildFailed], gpu: GpuSpec) -> int:
    """Return the index of the first kernel that is acceptable on this GPU.

    If no kernel is acceptable, return the index of the kernel that spills least. Raises BuildFailed
    if no kernel compiled and fits.
    """
    fitting = [
        (0 if acceptable(result, gpu) else result.spill_bytes, i)
        for i, result in enumerate(built)
        if not isinstance(result, BuildFailed) and not why_not_run(result, gpu)
    ]
    if not fitting:
        raise BuildFailed(
            f"expected one of {len(built)} configs to compile for {gpu.name} within "
            f"{gpu.smem_per_block} bytes of shared memory, none did; the first: {built[0]}"
        )
    return min(fitting)[1]


def why_not_spilled(spill_bytes: int) -> str:
    """Explain why the spills of a thread are too large; empty if they are not."""
    if spill_bytes <= MOST_SPILLED:
        return ""
    return f"{spill_bytes} bytes of registers spilled per thread; the limit is {MOST_SPILLED}"
