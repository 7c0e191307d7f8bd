"""Backwards that split streamed rows, or take one pass, on the GPU: right, with the same bits in
each run."""

from __future__ import annotations

import pytest
import torch

from tests.support.splits import backward
from tilegen.check.reference import make_inputs
from tilegen.check.verification import require, run, verify
from tilegen.emit.render import render
from tilegen.problem import AttentionProblem


@pytest.mark.parametrize(
    "text, family",
    [
        ("b2 hq10 hkv10 q4096 kv77 d64 bf16 full", "split_dkdv"),
        ("b1 hq8 hkv2 q100 kv5000 d128 bf16 causal(bottom_right)", "split_dq"),
        ("b1 hq4 hkv1 q1500 kv1700 d128 fp16 causal&window(900,0) dropout", "split_backward"),
        ("b1 hq4 hkv2 q700 kv600 d64 fp32 block_sparse(@h:10,128)", "split_backward"),
        ("b1 hq4 hkv2 q1500 kv1700 d128 bf16 causal", "one_pass"),
        ("b1 hq4 hkv1 q700 kv600 d64 fp32 window(90,0)", "one_pass"),
    ],
)
def test_it_agrees_with_the_reference(text: str, family: str) -> None:
    problem = AttentionProblem.parse(text)
    for length, rows in ((128, 4), (1024, 16)):
        configs = backward(family, stays=64, passes=32, length=length, rows=rows)
        require(verify(problem, configs))


@pytest.mark.parametrize("family", ["split_backward", "one_pass"])
def test_the_same_bits_in_each_run(family: str) -> None:
    problem = AttentionProblem.parse("b1 hq8 hkv2 q3000 kv3000 d64 bf16 causal")
    configs = backward(family, stays=64, passes=64, length=256)
    kernels = {name: render(problem, config, name) for name, config in configs.items()}
    inputs = make_inputs(problem, device="cuda")
    first, *others = (run(kernels, inputs, 0.125) for _ in range(5))
    assert all(torch.equal(first[name], one[name]) for one in others for name in first)
