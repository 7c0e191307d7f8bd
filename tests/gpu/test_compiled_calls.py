"""torch.compile and CUDA graphs on the GPU: compiled and captured calls are those of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo

import tilegen
from tests.support.problems import sized

HEADS, ROWS = sized((8, 200), rehearsed=(2, 80))


def given() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(2, HEADS, ROWS, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for _ in "qkv"
    ]


def run(q: Any, k: Any, v: Any, bias: Any) -> Any:
    ids = torch.arange(q.shape[2], device=q.device) // 33
    mask = tilegen.causal() & tilegen.documents(ids)
    return tilegen.attention(
        q * 2, k, v, mask=mask, score=lambda s, b, h, i, j: s + bias[h, (i - j).clamp(0, 7)]
    )


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_call_is_that_of_eager(mode: str) -> None:
    torch._dynamo.reset()
    bias = torch.randn(HEADS, 8, device="cuda", requires_grad=True)
    compiled = torch.compile(run, fullgraph=True, mode=mode)
    for _ in range(3):  # warmed up, captured, replayed
        arguments = (*given(), bias)
        actual, expected = compiled(*arguments), run(*arguments)
        torch.testing.assert_close(actual, expected)
        weights = torch.randn_like(actual)
        got = torch.autograd.grad(actual, arguments, weights)
        for left, other in zip(got, torch.autograd.grad(expected, arguments, weights), strict=True):
            torch.testing.assert_close(left, other, atol=2e-2, rtol=2e-2)


def test_a_warm_call_waits_for_nothing_and_is_captured() -> None:
    q, k, v = (x.detach() for x in given())
    mask = tilegen.causal() & tilegen.documents(torch.arange(ROWS, device="cuda") // 33)
    expected = tilegen.attention(q, k, v, mask=mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tilegen.attention(q, k, v, mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    q.mul_(0.5)
    graph.replay()
    torch.testing.assert_close(out, tilegen.attention(q, k, v, mask=mask))
    assert not torch.equal(out, expected)


def test_replays_see_changes_of_a_dense_mask() -> None:
    """Which lists of tiles are made for at other calls."""
    q, k, v = (x.detach() for x in given())
    keep = torch.rand(ROWS, ROWS, device="cuda") < 0.1
    tilegen.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilegen.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    keep.logical_not_()
    graph.replay()
    expected = tilegen.scaled_dot_product_attention(q, k, v, attn_mask=keep.clone())
    torch.testing.assert_close(out, expected)


def of_pairs(q: Any, k: Any, v: Any, keep: Any) -> Any:
    return tilegen.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def of_ids(q: Any, k: Any, v: Any, ids: Any) -> Any:
    return tilegen.attention(q, k, v, mask=lambda b, h, i, j: ids[i] == ids[j])


@pytest.mark.parametrize("called", [of_pairs, of_ids])
def test_reduced_overhead_sees_a_mask_that_changes_in_place(called: Any) -> None:
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in given())
    read = torch.arange(ROWS, device="cuda") // 33
    read = torch.rand(ROWS, ROWS, device="cuda") < 0.1 if called is of_pairs else read
    compiled = torch.compile(called, fullgraph=True, mode="reduce-overhead")
    before = None
    for _ in range(4):  # warmed up, captured, replayed twice
        actual = compiled(q, k, v, read).clone()
        expected = called(q, k, v, read.clone())
        torch.testing.assert_close(actual, expected, atol=1e-2, rtol=2e-2)
        assert before is None or not torch.equal(actual, before)
        before = actual
        read.copy_(read.roll(7, -1))


def test_replays_drop_other_weights() -> None:
    q, k, v = (x.detach() for x in given())
    tilegen.attention(q, k, v, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilegen.attention(q, k, v, dropout_p=0.5)
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(out.clone())
    assert not torch.equal(*drawn)
