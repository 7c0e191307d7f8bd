"""Kernels for Hopper, compiled for sm_90: ptxas accepts the text that the memory model ran, no
register of the loop over full tiles is spilled, and exponentials stay beside the products."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

from tilegen.compiling.compiler import CompiledKernel, compile_for
from tilegen.compiling.machine_code.counts import LoopCode
from tilegen.emit.render import render
from tilegen.kernels.config import TileConfig
from tilegen.model.resources import StepCode
from tilegen.problem import AttentionProblem

FORMS = {
    "fwd_hopper hq8 hkv2 q1024 d128 bf16 causal m128n128w8s2t": (8, 2048, 210),
    "fwd_hopper hq8 hkv2 q1024 d128 fp16 full m128n128w8s2tp132u": (8, 2048, 210),
    "fwd_hopper hq8 hkv2 q1024 d128 bf16 dilated(3) m192n64w12s3tp132": (12, 1536, 310),
    "fwd_hopper hq8 hkv8 q1024 d192/128 bf16 causal m128n128w8s2t": (8, 2560, 210),
    "fwd_hopper hq8 hkv2 q1024 d64 bf16 window(128,0) m128n128w8s2t": (8, 1024, 140),
    "fwd_hopper hq8 hkv2 q1024 d256 bf16 causal m128n64w8s2t": (8, 2048, 340),
    "bwd_dq_hopper hq8 hkv2 q1024 d128 bf16 causal m128n128w8s2t": (8, 3072, 400),
    "bwd_dq_hopper hq8 hkv2 q1024 d128 fp16 full m192n64w12s2t": (12, 2304, 375),
    "bwd_dq_hopper hq8 hkv2 q1024 d64 bf16 window(128,0) m128n128w8s2t": (8, 1536, 400),
    "bwd_dkdv_hopper hq8 hkv2 q1024 d128 bf16 causal m64n128w8s2t": (8, 2048, 90),
    "bwd_dkdv_hopper hq8 hkv8 q1024 d128 fp16 full m64n128w8s3t": (8, 2048, 90),
    "bwd_dkdv_hopper hq8 hkv2 q1024 d128 bf16 dilated(3) m64n128w8s2t": (8, 2048, 90),
    "bwd_dkdv_hopper hq8 hkv2 q1024 d128 bf16 window(128,0) m64n128w8s2t": (8, 2048, 90),
    "bwd_dkdv_hopper hq8 hkv2 q1024 d64 bf16 causal m64n128w8s2t": (8, 1024, 70),
}
"""Kernels with their computing warps, the clocks of tensor cores in a step, and the most clocks in
which a step issues instructions beside no product, by the Triton that development pins."""


def compiled(text: str) -> CompiledKernel:
    kernel, _, rest = text.partition(" ")
    problem, _, config = rest.rpartition(" ")
    parsed = AttentionProblem.parse(problem)
    return compile_for(render(parsed, TileConfig.parse(config), kernel), "sm_90")


def loops_of_steps(built: CompiledKernel, step: StepCode) -> list[LoopCode]:
    """Return the loops whose passes are steps on full tiles, one for each computing warpgroup."""
    warps = built.rendered.config.num_warps
    same = [one for one in built.code.loops if one.instructions * warps == step.instructions]
    return [one for one in same if one.products]


@pytest.mark.slow
@pytest.mark.parametrize("text", FORMS)
def test_full_tiles_spill_nothing_and_hide_exponentials(text: str) -> None:
    warps, tensor, exposed = FORMS[text]
    built = compiled(text)
    step = built.resources.step_code
    assert step is not None
    assert (built.rendered.config.num_warps, step.local) == (warps, 0)
    assert step.exposed_exponentials == 0
    # Four schedulers. The ptxas of another Triton orders some instructions otherwise, 1 % of the
    # tensor cores' clocks; a product without a softmax beside it exposes many times as many.
    others = 0 if version("triton") == "3.7.1" else tensor / 50
    assert step.exposed / 4 <= exposed + others
    assert step.multiply_adds / 2048 == tensor  # multiply-adds of an SM's tensor cores in a clock
    assert not step.serialized
    for loop in loops_of_steps(built, step):
        assert loop.waits == ((1, 0) if text.startswith("fwd") else (1, 0, 0))
        assert not loop.local_words


@pytest.mark.slow
@pytest.mark.any_triton
@pytest.mark.parametrize("text", FORMS)
def test_what_ptxas_makes_of_it(text: str) -> None:
    """Some bytes of the code outside of loops are spilled."""
    built = compiled(text)
    consumers = built.rendered.config.consumers
    assert built.reported.spill_bytes <= 64
    # Registers are those of the launch; partitions change theirs.
    assert built.reported.registers <= 65536 // (128 * (1 + consumers))
    assert {one.opcode for one in instructions(built)} >= {"UTMALDG.4D", "UTMASTG.4D"}
    allocated = {one.operands for one in instructions(built) if one.opcode.startswith("USETMAXREG")}
    assert any(re.search(r"0xf0|0xa0", one) for one in allocated)


def instructions(built: CompiledKernel) -> list:
    from tilegen.compiling.machine_code.instructions import read_sass
    from tilegen.compiling.machine_code.reading import disassembled

    return max(read_sass(disassembled(built.binary)).values(), key=len)
