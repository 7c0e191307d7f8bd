"""Emitted kernels compile to binaries without a GPU, for every architecture; lengths never
recompile."""

from dataclasses import replace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from tilegen.compiling.acceptable import acceptable
from tilegen.compiling.compiler import CompiledKernel, compile_for
from tilegen.compiling.workers import compile_many
from tilegen.emit.kernel_files import load
from tilegen.emit.render import render
from tilegen.errors import BuildFailed, Unsupported
from tilegen.gpus.spec import gpu_for
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.problem import AttentionProblem

CONFIG = TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)
OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
"""As `compile_for` has them, so that Triton's cache has what it compiled."""
PROBLEM = AttentionProblem.parse("hq4 hkv1 q1024 d64 bf16 causal&window(255,0)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, kernel",
    [
        *(("sm_90", kernel) for kernel in LARGE_CACHE),
        *((arch, kernel) for arch in ("sm_120", "gfx950") for kernel in ("bwd_dkdv", "bwd_dq")),
        # Of which test_tuner compiles all, and test_footprint or test_bundle.
        *((arch, "fwd") for arch in ("sm_80", "sm_100", "gfx942")),
    ],
)
def test_every_kernel_on_every_architecture(kernel: Kernel, arch: str) -> None:
    compiled = compile_for(render(PROBLEM, CONFIG, kernel), arch)
    assert compiled.binary[:4] == b"\x7fELF"
    assert acceptable(compiled.resources, gpu_for(arch))
    assert 16 < compiled.reported.registers <= 512
    assert compiled.reported.shared_bytes <= 65536
    assert compiled.extension == ("hsaco" if arch.startswith("gfx") else "cubin")


SPLIT_OR_PADDED = ["d80 fp16 causal", "d192/128 bf16 full", "d72/60 fp32 window(9,9)"]


@pytest.mark.slow
@pytest.mark.parametrize("text", SPLIT_OR_PADDED)
def test_split_and_padded_head_dims(text: str) -> None:
    """Each kernel is aligned for one of the problems, and not for another."""
    problem, place = AttentionProblem.parse(f"hq2 hkv2 q100 {text}"), SPLIT_OR_PADDED.index(text)
    small = TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)
    rendered = [
        render(problem, small, kernel, aligned=(turn - place) % 3 == 0)
        for turn, kernel in enumerate(LARGE_CACHE)
        if (turn - place) % 3 < 2
    ]
    outcomes = dict(compile_many(rendered, "sm_90", workers=1))
    assert set(outcomes) == set(rendered)
    assert all(isinstance(outcome, CompiledKernel) for outcome in outcomes.values()), outcomes


@pytest.mark.slow
def test_aligned_kernels_load_16_bytes_at_once() -> None:
    """The stride unit is what lets the compiler see it; the unaligned kernel cannot."""
    widest = {}
    for aligned in (True, False):
        module = load(render(PROBLEM, CONFIG, "fwd", aligned=aligned))
        rendered = render(PROBLEM, CONFIG, "fwd", aligned=aligned)
        source = triton.compiler.ASTSource(
            fn=getattr(module, rendered.function),
            signature=dict(rendered.signature),
            constexprs={},
            attrs={(i,): [["tt.divisibility", 16]] for i in range(5)} if aligned else {},
        )
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS).asm["ptx"]
        widest[aligned] = "cp.async.cg.shared.global" in ptx and ", 0x10" in ptx
    assert widest == {True: True, False: False}


@pytest.mark.slow
def test_tensor_cores_are_used() -> None:
    for arch, instruction in ((80, "mma.sync"), (90, "wgmma"), (100, "tcgen05.mma")):
        rendered = render(PROBLEM, CONFIG, "fwd")
        source = triton.compiler.ASTSource(
            fn=getattr(load(rendered), rendered.function),
            signature=dict(rendered.signature),
            constexprs={},
            attrs={(i,): [["tt.divisibility", 16]] for i in range(5)},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=OPTIONS)
        assert instruction in compiled.asm["ptx"], arch


def test_failures_are_values_or_one_line() -> None:
    broken = render(PROBLEM, CONFIG, "fwd")
    broken = replace(
        broken, source=broken.source.replace("tl.exp2(", "tl.no_such("), digest="broken"
    )
    with pytest.raises(BuildFailed, match="no_such") as caught:
        compile_for(broken, "sm_90")
    assert "\n" not in str(caught.value)
    ((_, outcome),) = compile_many([broken], "sm_90", workers=1)
    assert isinstance(outcome, BuildFailed)
    with pytest.raises(Unsupported, match="arch must look like sm_90 or gfx942"):
        compile_for(render(PROBLEM, CONFIG), "hopper")


@pytest.mark.slow
@pytest.mark.usefixtures("compile_instead_of_launching")
@pytest.mark.parametrize("head_dim", [64, 60])
def test_kernels_compiled_ahead_are_found_at_launch(head_dim: int) -> None:
    """The launcher looks up in Triton's cache the kernel that `compile_for` put there."""
    problem = AttentionProblem.parse(f"hq1 hkv1 q64 d{head_dim} bf16 full")
    rendered = render(problem, TileConfig(block_m=16, block_n=16))
    compile_for(rendered, "sm_90")
    module, results = load(rendered), list[bool]()
    q = torch.empty(1, 1, 64, head_dim, dtype=torch.bfloat16)
    knobs = triton.knobs.compilation
    before, knobs.listener = knobs.listener, lambda **event: results.append(event["cache_hit"])
    try:
        module.launch(q, q, q, 0.1)
    finally:
        knobs.listener = before
    assert results == [True]


@pytest.mark.slow
@pytest.mark.usefixtures("compile_instead_of_launching")
@pytest.mark.parametrize(
    "kernel, head_dim, aligned",
    [
        *(("fwd", 64, True), ("fwd", 60, False), ("bwd_preprocess", 60, False)),
        *(("bwd_dkdv", 64, True), ("bwd_dq", 60, False)),
    ],
)
def test_no_length_recompiles(kernel: Kernel, head_dim: int, aligned: bool) -> None:
    """Through `launch`, as users do: lengths, heads and batches of all sorts, both layouts."""
    problem = AttentionProblem.parse(f"hq4 hkv2 q1024 d{head_dim} bf16 causal(bottom_right)")
    rendered = render(problem, TileConfig(block_m=32, block_n=32), kernel, aligned=aligned)
    module = load(rendered)
    lengths = [1, 2, 3, 15, 16, 17, 31, 32, 100, 1000, 1023, 1024, 4095]
    for i, seqlen_q in enumerate(lengths):
        for inside in (False, True):
            batch, heads, seqlen_kv = 1 + i % 3, 2 * (1 + i % 2), lengths[-1 - i]

            def tensor(n: int, h: int, batch: int = batch, inside: bool = inside) -> torch.Tensor:
                shape = (batch, n, h, head_dim) if inside else (batch, h, n, head_dim)
                # One element in: addresses are as odd as strides are.
                flat = torch.empty(batch * n * h * head_dim + 1, dtype=torch.bfloat16)
                values = flat[0 if aligned else 1 :][: batch * n * h * head_dim].view(shape)
                return values.transpose(1, 2) if inside else values

            q, k = tensor(seqlen_q, heads), tensor(seqlen_kv, heads // 2)
            rows = torch.empty(batch, heads, seqlen_q)
            if kernel == "fwd":
                module.launch(q, k, k, 0.1)
            elif kernel == "bwd_preprocess":
                module.launch(q, q)
            else:
                module.launch(q, k, k, q, rows, rows, 0.1)
    function = getattr(module, rendered.function)
    compiled = function.device_caches[0][0]
    assert len(compiled) == 1, list(compiled)
