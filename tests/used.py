"""Resources of compiled kernels, for tests without a compiler."""

from __future__ import annotations

from tilegen.model.resources import Resources, StepCode

STEP = StepCode(
    instructions=3456,
    exponentials=256,
    fp32=896,
    integer=648,
    multiply_adds=2**22,
    rows=64,
    shared_bytes=271360,
    local=136,
    exposed=40,
    exposed_exponentials=0,
    asynchronous=True,
    serialized=False,
)
"""A step of dK/dV at head dim 128 with tiles of 64 x 128, as compiled for sm_90."""


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
