"""Dropout on the GPU: right at the tiles that calls choose, reproducible, and anew at every replay
of a CUDA graph."""

from __future__ import annotations

import pytest
import torch

import tilegen
from tests.support.problems import sized
from tilegen.check.reference import attention_reference
from tilegen.check.verification import require, verify
from tilegen.choose.ranker import propose
from tilegen.gpus.spec import detect
from tilegen.kernels.registry import BACKWARD, FORWARD, LARGE_CACHE
from tilegen.masks.dropout import Dropout
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask

SMALL_CACHE = (*FORWARD["small_cache"].names, *BACKWARD["small_cache"].names)


@pytest.mark.parametrize("kernels", [LARGE_CACHE, SMALL_CACHE], ids=["whole_heads", "small_cache"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_agrees_with_the_reference(dtype: str, kernels: tuple[str, ...]) -> None:
    sizes = sized("b2 hq4 hkv2 q700 kv650", rehearsed="b1 hq2 hkv1 q140 kv130")
    problem = AttentionProblem.parse(f"{sizes} d64 {dtype} causal dropout")
    spec = detect()
    assert spec
    require(
        verify(
            problem, {k: propose(KernelTask.of(k, problem, spec), top=1)[0].config for k in kernels}
        )
    )


HEADS, LENGTH = sized((4, 300), rehearsed=(2, 70))


def made() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, HEADS, LENGTH, 64, device="cuda", requires_grad=True) for _ in range(3)]


def test_a_seed_makes_calls_reproducible() -> None:
    q, k, v = made()
    results: list[list[torch.Tensor]] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = tilegen.attention(q, k, v, dropout_p=0.2)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    torch.manual_seed(1)
    expected, _ = attention_reference(q, k, v, dropout=Dropout.drawn(0.2, q.device))
    torch.testing.assert_close(results[0][0], expected, atol=1e-4, rtol=1e-4)
    for first, again, other in zip(*results, strict=True):
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_replays_of_a_graph_drop_other_pairs_and_their_backward_the_same_as_their_forward() -> None:
    q, k, _ = (one.detach() for one in made())
    v = (
        torch.eye(LENGTH, device="cuda")
        .expand(2, HEADS, LENGTH, LENGTH)
        .contiguous()
        .requires_grad_()
    )

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        out = tilegen.attention(q, k, v, dropout_p=0.5)  # the weights themselves
        (dv,) = torch.autograd.grad(out.sum(), v)
        return out.detach(), dv

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = step()
    seen: list[torch.Tensor] = []
    for _ in range(3):
        graph.replay()
        torch.testing.assert_close(dv[..., 0], out.sum(2), atol=1e-3, rtol=1e-3)
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
