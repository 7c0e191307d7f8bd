"""What the tuner hands to `launch` is what emitted kernels take, and gives finite results."""

from __future__ import annotations

import pytest
import torch

from tilegen.config import KERNELS, Kernel, TileConfig
from tilegen.emitted import load
from tilegen.problem import AttentionProblem
from tilegen.render import render
from tilegen.tuning.bench import _arguments


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "text",
    ["b2 hq4 hkv2 q60 kv70 d32/16 fp16 causal", "b1 hq1 hkv1 q1 kv33 d16 fp32 window(9,9)"],
)
def test_arguments_fit_the_launch(text: str, kernel: Kernel) -> None:
    problem = AttentionProblem.parse(text)
    module = load(render(problem, TileConfig(block_m=32, block_n=16), kernel))
    results = module.launch(*_arguments(problem, kernel, "cpu"))
    results = results if isinstance(results, tuple) else (results,)
    query = (problem.batch, problem.num_heads_q, problem.seqlen_q)
    key = (problem.batch, problem.num_heads_kv, problem.seqlen_kv)
    expected = {
        "fwd": [(*query, problem.head_dim_v), query],
        "bwd_preprocess": [query],
        "bwd_dkdv": [(*key, problem.head_dim_qk), (*key, problem.head_dim_v)],
        "bwd_dq": [(*query, problem.head_dim_qk)],
    }[kernel]
    assert expected == [tuple(result.shape) for result in results]
    assert all(torch.isfinite(result).all() for result in results)


def test_arguments_are_the_same_every_time() -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv1 q8 kv8 d16 fp16 full")
    one, other = (_arguments(problem, "bwd_dq", "cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one[:-1], other[:-1], strict=True))
