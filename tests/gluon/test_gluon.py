"""The Gluon forward, compiled for sm_90: ptxas accepts the text that the memory model ran, and
spills next to nothing."""

from __future__ import annotations

import re

import pytest

from tests.gluon.forward import HopperForward
from tilegen.compiling.compiler import binary_of

KERNELS = [
    HopperForward(),
    HopperForward(causal=False, group_size=4, dtype="fp16"),
    HopperForward(head_dim=64, stages=3),
    HopperForward(head_dim=64, block_n=64, causal=False, stages=4),
    HopperForward(block_n=64, stages=4),
]


@pytest.mark.slow
@pytest.mark.any_triton
@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_no_register_is_spilled(kernel: HopperForward) -> None:
    """Triton 3.6.0 puts up to 8 bytes of a consumer aside, 3.9.0 up to 16."""
    import triton

    compiled = kernel.compile()
    _, used = binary_of(compiled, "sm_90")
    version = tuple(int(one) for one in triton.__version__.split(".")[:2])
    assert used.spill_bytes <= (0 if (3, 7) <= version < (3, 9) else 16)
    # Registers are those of the launch; partitions change theirs.
    assert used.registers <= 168
    text = compiled.asm["ptx"]
    assert re.search(r"setmaxnreg\.inc\.sync\.aligned\.u32\s+240", text)
    assert "wgmma.mma_async" in text
    assert "cp.async.bulk.tensor.3d" in text
