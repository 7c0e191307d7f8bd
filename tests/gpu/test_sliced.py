"""Large head dims on the GPU: every family of kernels right at real tiles, memory linear in the
length."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

import tilegen
from tilegen.check import verification
from tilegen.check.verification import run_device
from tilegen.choose.families import kernels_of
from tilegen.choose.ranker import propose
from tilegen.errors import NoRecord
from tilegen.gpus.spec import GpuSpec, detect
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.panels import rows_for
from tilegen.kernels.registry import BACKWARD, FORWARD
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask
from tilegen.tuning.tuner import tune

SMALL_CACHE = (*FORWARD["small_cache"].names, *BACKWARD["small_cache"].names)
STREAMED = (*FORWARD["q_streamed"].names, *BACKWARD["small_cache"].names)
MASKS = ["full", "causal(bottom_right)", "causal&window(200,0)"]
DIMS = ["256 fp32", "320 bf16", "512 bf16", "512 fp32", "576/512 fp16", "768 bf16", "1024 bf16"]


@pytest.fixture(scope="module")
def spec() -> GpuSpec:
    actual = detect()
    assert actual is not None
    assert run_device().type == "cuda"
    return actual


def best(
    problem: AttentionProblem, spec: GpuSpec, kernels: tuple[Kernel, ...]
) -> Mapping[Kernel, TileConfig]:
    return {k: propose(KernelTask.of(k, problem, spec), top=1)[0].config for k in kernels}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS)
def test_small_cache_agrees_with_the_reference(dims: str, mask: str, spec: GpuSpec) -> None:
    problem = AttentionProblem.parse(f"b1 hq4 hkv2 q700 kv1000 d{dims} {mask}")
    verification.require(
        verification.verify(problem, best(problem, spec, SMALL_CACHE), device="cuda")
    )


@pytest.mark.parametrize("dims", ["256 bf16", "320 bf16", "512 fp16"])
def test_the_streamed_forward_agrees_with_the_reference(dims: str, spec: GpuSpec) -> None:
    problem = AttentionProblem.parse(f"b1 hq4 hkv2 q700 kv1000 d{dims} causal")
    verification.require(verification.verify(problem, best(problem, spec, STREAMED), device="cuda"))


def test_the_choice_for_a_large_head_dim_is_right(spec: GpuSpec) -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv2 q2048 kv2048 d512 bf16 causal")
    verification.require(
        verification.verify(problem, best(problem, spec, kernels_of(problem, spec)), device="cuda")
    )


@pytest.mark.parametrize("length", [2048, 8192])
def test_memory_is_linear_in_the_length(length: int, spec: GpuSpec) -> None:
    """Out, lse and one panel in the forward; gradients, two panels and carried sums after it."""
    problem = AttentionProblem.parse(f"b1 hq4 hkv4 q{length} kv{length} d1024 bf16 full")
    q, k, v = (
        torch.randn(1, 4, length, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    tensor, rows = q.numel() * 2, 4 * 4 * length

    def panels(direction: str) -> int:
        rows_at_once = rows_for(problem.bucket, spec, direction)  # type: ignore[arg-type]
        return min(rows_at_once, 4 * length) * length * 2

    for _ in range(2):  # the first call compiles
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = tilegen.attention(q, k, v)
        forward = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, (q, k, v), out)
        backward = torch.cuda.max_memory_allocated() - before
        del out
    assert forward <= 1.1 * (tensor + rows + panels("forward")) + 2**22
    assert backward <= 1.1 * (5 * tensor + 2 * rows + 2 * panels("backward")) + 2**22


@pytest.mark.parametrize("kernel", [k for k in SMALL_CACHE if k != "bwd_preprocess"])
def test_every_small_cache_kernel_can_be_tuned(
    kernel: Kernel, spec: GpuSpec, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    problem = AttentionProblem.parse("b1 hq4 hkv2 q1024 kv1024 d512 bf16 causal")
    try:
        record = tune(KernelTask.of(kernel, problem, spec), trials=3, seconds=20.0, progress=False)
    except NoRecord as error:
        pytest.fail(str(error))
    assert record.is_measured
    assert record.config.block_d
