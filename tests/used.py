"""Resources of compiled kernels, for tests without a compiler."""

from __future__ import annotations

from tilegen.model.resources import Resources, StepCode


def used(
    *,
    registers: int = 255,
    spill_bytes: int = 0,
    shared_bytes: int = 1024,
    step_code: StepCode | None = None,
) -> Resources:
    """Return resources as a compiler would report them."""
    return Resources(
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=shared_bytes,
        step_code=step_code,
    )
