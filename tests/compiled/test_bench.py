"""Emitted kernels accept the tuner's arguments of `launch`, and give finite results."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tilegen import cpu
from tilegen.check.reference import attention_reference, make_inputs
from tilegen.emit.render import render
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask
from tilegen.tuning.bench import check_config, make_launches


def arguments(problem: AttentionProblem, kernel: Kernel) -> list[Any]:
    (only,) = make_launches(KernelTask.of(kernel, problem, gpu("h200")), "cpu")
    return only


@pytest.mark.parametrize("kernel", LARGE_CACHE)
@pytest.mark.parametrize(
    "text",
    ["b2 hq4 hkv2 q60 kv70 d32/16 fp16 causal", "b1 hq1 hkv1 q1 kv33 d16 fp32 window(9,9)"],
)
def test_arguments_fit_the_launch(text: str, kernel: Kernel) -> None:
    problem = AttentionProblem.parse(text)
    module = cpu.load(render(problem, TileConfig(block_m=32, block_n=16), kernel))
    results = module.launch(*arguments(problem, kernel))
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


@pytest.mark.parametrize("kernel", LARGE_CACHE)
def test_arguments_are_in_the_order_of_the_launch(kernel: Kernel) -> None:
    """Each argument is in its place, although most would fit in another's."""
    problem = AttentionProblem.parse("b1 hq4 hkv2 q40 kv3000 d32/16 fp16 full")
    module = cpu.load(render(problem, TileConfig(block_m=32, block_n=16), kernel))
    names = [name for name in inspect.signature(module.launch).parameters if name != "laid"]
    results = dict(zip(names, arguments(problem, kernel), strict=True))
    shapes = {
        "q": (1, 4, 40, 32),
        "k": (1, 2, 3000, 32),
        "v": (1, 2, 3000, 16),
        "out": (1, 4, 40, 16),
        "dout": (1, 4, 40, 16),
        "lse": (1, 4, 40),
        "delta": (1, 4, 40),
    }
    for name, value in results.items():
        if name == "softmax_scale":
            assert value == 32**-0.5
        else:
            assert tuple(value.shape) == shapes[name], name
    if "lse" in results:
        inputs = make_inputs(problem, device="cpu", seed=0)
        _, lse = attention_reference(inputs.q.float(), inputs.k.float(), inputs.v.float())
        assert (results["lse"] - lse.mean()).abs().max() < 0.5
        assert results["delta"].mean().abs() < 0.5


@pytest.mark.parametrize("kernel", LARGE_CACHE)
def test_a_right_config_passes_the_check(kernel: Kernel) -> None:
    problem = AttentionProblem.parse("b2 hq4 hkv2 q60 kv70 d32/16 fp16 causal")
    config = TileConfig(block_m=32, block_n=32)
    assert check_config(problem, kernel, config) is None


def test_arguments_are_the_same_every_time() -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv1 q8 kv8 d16 fp16 full")
    left, other = (arguments(problem, "bwd_dq") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(left[:-1], other[:-1], strict=True))
