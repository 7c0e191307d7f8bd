"""Keys split over programs on the GPU: right, in graphs of a fixed capacity, and the same bits
whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch

import tilegen
from tests.support.problems import sized
from tests.support.splits import splits
from tilegen.check.verification import require, verify
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans

BOTTOM = tilegen.causal("bottom_right")


@pytest.mark.parametrize(
    "text",
    [
        "b1 hq64 hkv8 q1 kv8192 d128 bf16",
        "b3 hq12 hkv2 q8 kv5000 d128 bf16 causal(bottom_right)",
        "b1 hq8 hkv1 q100 kv9000 d256 fp16 window(3000,0,bottom_right)",
        "b2 hq4 hkv4 q3 kv2000 d64 fp32 full",
        "b3 hq16 hkv2 q5 kv3000 d128 bf16 causal(bottom_right) page16",
        "b2 hq16 hkv2 q1 kv3000 d128 fp16 full page128",
        "b2 hq16 hkv2 q70 kv3000 d128 bf16 causal(bottom_right) invariant",
    ],
)
def test_it_agrees_with_the_reference(text: str) -> None:
    problem = AttentionProblem.parse(text)
    kernels = ("fwd_paged" if problem.page else "fwd_split", "fwd_combine")
    for keys in (256, 2048):
        counts = splits(problem, rows=16, block_n=64, keys=keys)
        configs = {kernels[0]: counts["fwd_split"], kernels[1]: counts["fwd_combine"]}
        require(verify(problem, configs))


def cache(
    requests: int, keys: int, page: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pages of keys and of values, and a table that has room for so many keys each."""
    each = keys // page
    pages = torch.randn(2, requests * each, page, 2, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(requests * each, device="cuda").view(requests, each).int()
    return pages[0], pages[1], table


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_new_tokens_are_written_as_on_a_cpu(layout: str) -> None:
    """By one kernel, in a graph too, which other lengths are written to before it runs again."""
    k_pages, v_pages, table = cache(3, 256)
    if layout == "HND":
        k_pages, v_pages = (x.transpose(1, 2).contiguous() for x in (k_pages, v_pages))
    k, v = torch.randn(2, 9, 2, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([40, 1, 256], device="cuda", dtype=torch.int32)
    starts = torch.tensor([0, 5, 6, 8], device="cuda", dtype=torch.int32)
    given = k, v, k_pages, v_pages, table, lengths
    tilegen.append_paged(*given, q_starts=starts, layout=layout)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            tilegen.append_paged(*given, q_starts=starts, layout=layout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for now in ([40, 1, 256], [17, 200, 16]):
        lengths.copy_(torch.tensor(now))
        expected = [x.cpu() for x in given]
        tilegen.append_paged(*expected, q_starts=starts.cpu(), layout=layout)
        graph.replay()
        assert torch.equal(k_pages.cpu(), expected[2])
        assert torch.equal(v_pages.cpu(), expected[3])


def test_one_graph_serves_all_lengths() -> None:
    longest = sized(4096, rehearsed=512)
    k_pages, v_pages, table = cache(4, longest)
    lengths = torch.tensor([1, 100, longest // 2, longest], device="cuda", dtype=torch.int32)
    q = torch.randn(4, 16, 1, 128, device="cuda", dtype=torch.bfloat16)
    given = q, k_pages, v_pages, table, lengths
    tilegen.attention_paged(*given, mask=BOTTOM)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            out = tilegen.attention_paged(*given, mask=BOTTOM)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for actual in ([longest, 1, 77, 0], [5, 5, 5, 5]):
        lengths.copy_(torch.tensor(actual))
        graph.replay()
        torch.testing.assert_close(out, tilegen.attention_paged(*given, mask=BOTTOM))
        # Other splits, of a grid that is made for these lengths.
        bounded = tilegen.attention_paged(*given, mask=BOTTOM, max_kv_length=max(actual))
        torch.testing.assert_close(out, bounded)


def test_the_same_bits_in_any_batch_chunk_and_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_BATCH_INVARIANT", "1")
    plans.forget()
    tokens = 3000
    k_pages, v_pages, table = cache(3, 4096)
    q = torch.randn(3, 16, tokens, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (
        x[table[:1].long()].flatten(1, 2)[:, :tokens].transpose(1, 2) for x in (k_pages, v_pages)
    )
    whole = tilegen.attention(q[:1], k, v, mask=BOTTOM)
    lengths = torch.tensor([tokens, 17, 4000], device="cuda")
    batch = tilegen.attention_paged(q, k_pages, v_pages, table, lengths, mask=BOTTOM)
    assert torch.equal(batch[:1], whole)
    for first, end in ((0, 1), (1, 700), (700, 2999), (2999, 3000)):
        part = tilegen.attention_paged(
            *(q[:1, :, first:end], k_pages, v_pages, table[:1]),
            torch.tensor([end], device="cuda"),
            mask=BOTTOM,
        )
        assert torch.equal(part, whole[:, :, first:end]), (first, end)
    plans.forget()
