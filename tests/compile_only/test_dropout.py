"""Kernels that drop weights compile; drawing goes through no shared memory; neither the
probability nor the seed compiles them again."""

from __future__ import annotations

import pytest
import torch

import tilegen
from benchmarks.call_cost import as_on_a_gpu
from tests.support import sliced
from tilegen.compiling.compiler import CompiledKernel
from tilegen.compiling.workers import compile_many
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem

TEXT = "hq4 hkv2 q1024 d64 bf16 causal"
CONFIG = TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, arch",
    [
        *(("fwd", "sm_80"), ("fwd", "sm_90"), ("bwd_dkdv", "sm_90"), ("bwd_dq", "sm_80")),
        *(("fwd_streamed", "sm_90"), ("fwd_scores", "sm_80"), ("bwd_scores", "sm_90")),
    ],
)
def test_drawing_takes_no_shared_memory(kernel: Kernel, arch: str) -> None:
    """As words are given to pairs, threads have all that they need of each Philox."""
    config = sliced.ALL.get(kernel, CONFIG)
    wanted = [
        render(AttentionProblem.parse(TEXT + end), config, kernel) for end in ("", " dropout")
    ]
    results = dict(compile_many(wanted, arch, workers=1))
    plain, dropping = (results[one] for one in wanted)
    assert isinstance(plain, CompiledKernel), plain
    assert isinstance(dropping, CompiledKernel), dropping
    assert dropping.reported.shared_bytes == plain.reported.shared_bytes


@pytest.mark.slow
def test_calls_with_other_seeds_and_probabilities_launch_the_same_binary() -> None:
    q = torch.zeros(1, 2, 32, 16, dtype=torch.bfloat16, requires_grad=True)
    with as_on_a_gpu(notes=True) as driver:
        for p in (0.5, 0.25):
            out = tilegen.attention(q, q, q, dropout_p=p)
            out.backward(torch.zeros_like(out))
    forward, *backward = driver.launches[:4]
    assert {name for _, name, _ in driver.launches[4:]} == {
        name for _, name, _ in driver.launches[:4]
    }
    state, p = forward[2][-2:]
    assert p == 0.5
    drawing = [values[-2:] for _, name, values in backward if "preprocess" not in name]
    assert drawing == [[state, p]] * 2  # what the forward drew
    assert driver.launches[4][2][-2:] == [driver.launches[5:][-1][2][-2], 0.25]
