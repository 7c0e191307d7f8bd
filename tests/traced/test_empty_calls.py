"""Calls without a batch, without queries or without keys are as PyTorch's: results and gradients
of the right shapes, of zeros. Eager, and as one graph of torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.nn.attention.flex_attention import AuxRequest
from torch.nn.functional import scaled_dot_product_attention as of_torch

import tilegen
from tilegen.errors import InvalidProblem
from tilegen.integrations import flash_attn

SIZES = {"batch": (0, 8, 8), "queries": (2, 0, 8), "keys": (2, 8, 0), "all": (0, 0, 0)}
HEADS, DIM = 2, 16
MINUS = float("-inf")


def of_heads(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * WEIGHTS[h] + q - k


WEIGHTS = torch.tensor([0.5, 2.0])


def of_flash(q: Any, k: Any, v: Any, _: Any) -> Any:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    return out.transpose(1, 2), lse


def of_flex(q: Any, k: Any, v: Any, _: Any) -> Any:
    mask = tilegen.predicate(lambda b, h, q, k: q >= k)
    return tilegen.flex_attention(q, k, v, of_heads, mask, return_lse=True)


def attention(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v, _: tilegen.attention(q, k, v, return_lse=True, **options)


def in_narrow_bf16(q: Any, k: Any, v: Any, _: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = tilegen.attention(*(x[..., :3] for x in (q, k, v)), return_lse=True)
    return torch.nn.functional.pad(out, (0, DIM - 3)).float(), lse


DOORS: dict[str, Callable[..., Any]] = {
    "attention": attention(mask=tilegen.causal("bottom_right"), dropout_p=0.3),
    "dilated": attention(mask=tilegen.causal() & tilegen.dilated(2), scale=-1.0),
    "documents": attention(mask=tilegen.documents([0, 0, 1, 1, 1, 1, 2, 2])),
    "autocast": in_narrow_bf16,
    "sinks": lambda q, k, v, _: tilegen.attention(q, k, v, score=tilegen.sinks(WEIGHTS)),
    "lengths": lambda q, k, v, _: tilegen.attention(
        q, k, v, kv_lengths=torch.zeros(q.shape[0], dtype=torch.int32), return_lse=True
    ),
    "flex": of_flex,
    "flash": of_flash,
    "sdpa": lambda q, k, v, _: tilegen.scaled_dot_product_attention(q, k, v, is_causal=True),
    "bias": lambda q, k, v, bias: tilegen.scaled_dot_product_attention(q, k, v, bias),
    "bools": lambda q, k, v, bias: tilegen.scaled_dot_product_attention(q, k, v, bias > 0),
    "rows": lambda q, k, v, bias: tilegen.scaled_dot_product_attention(
        q, k, v, bias.new_ones(bias.shape[0], 1, 1, k.shape[2]) > 0
    ),
    "five": lambda q, k, v, bias: tilegen.scaled_dot_product_attention(
        q.expand(3, *q.shape), k[None], v[None], bias[None] > 0
    )[0],
}


def traced(run: Callable[..., Any], compiles: bool) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(run, fullgraph=True, backend="aot_eager") if compiles else run


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("what", SIZES)
@pytest.mark.parametrize("door", DOORS)
def test_calls_of_nothing_are_as_in_pytorch(door: str, what: str, compiles: bool) -> None:
    batch, rows, columns = SIZES[what]
    shapes = ((rows, DIM), (columns, DIM), (columns, DIM), (rows, columns))
    leaves = [torch.randn(batch, HEADS, *shape, requires_grad=True) for shape in shapes]
    results = traced(DOORS[door], compiles)(*leaves)
    out, lse = results if isinstance(results, tuple) else (results, None)
    expected = of_torch(*leaves[:3])
    torch.testing.assert_close(out, expected)
    assert lse is None or torch.equal(lse, torch.full((batch, HEADS, rows), MINUS))
    used = leaves if door == "bias" else leaves[:3]
    theirs = [torch.zeros_like(x) for x in used]
    for left, other in zip(torch.autograd.grad(out.sum(), used), theirs, strict=True):
        torch.testing.assert_close(left, other)


def test_sinks_get_the_gradient_of_lse_without_keys() -> None:
    """Then lse is the logit of the sink."""
    sinks = torch.tensor([0.5, -2.0], requires_grad=True)
    q, k = torch.randn(1, HEADS, 3, DIM), torch.randn(1, HEADS, 0, DIM)
    _, lse = tilegen.attention(q, k, k, score=tilegen.sinks(sinks), return_lse=True)
    assert torch.equal(lse, sinks[:, None].expand(1, HEADS, 3))
    assert torch.equal(torch.autograd.grad(lse.sum(), sinks)[0], torch.tensor([3.0, 3.0]))


def test_largest_scores_without_keys_are_minus_infinity() -> None:
    q, k = torch.randn(2, HEADS, 3, DIM), torch.randn(2, HEADS, 0, DIM)
    _, aux = tilegen.flex_attention(q, k, k, return_aux=AuxRequest(max_scores=True))
    assert torch.equal(aux.max_scores, torch.full((2, HEADS, 3), MINUS))


PACKED = {
    "no documents": ([0], [0]),
    "an empty document": ([0, 0], [0, 0]),
    "no keys": ([0, 3, 5], [0, 0, 0]),
    "no queries": ([0, 0, 0], [0, 2, 4]),
}
VARLEN: dict[str, Callable[..., Any]] = {
    "causal": lambda *given: tilegen.attention_varlen(
        *given, mask=tilegen.causal("bottom_right"), return_lse=True
    ),
    "scored": lambda *given: tilegen.attention_varlen(
        *given, mask=tilegen.prefix_lm(3), score=of_heads, return_lse=True
    ),
    "flash": lambda *given: flash_attn.flash_attn_varlen_func(
        *given, 4, 4, causal=True, return_attn_probs=True
    )[:2],
}


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("door", VARLEN)
def test_packed_calls_of_nothing(door: str, name: str, compiles: bool) -> None:
    starts = [torch.tensor(cu, dtype=torch.int32) for cu in PACKED[name]]
    sizes = [int(cu[-1]) for cu in starts]
    leaves = [torch.randn(n, HEADS, DIM, requires_grad=True) for n in (*sizes, sizes[1])]
    out, lse = traced(VARLEN[door], compiles)(*leaves, *starts)
    assert torch.equal(out, torch.zeros_like(leaves[0]))
    assert torch.equal(lse, torch.full((HEADS, sizes[0]), MINUS))
    for grad, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


PAGED = {  # requests, queries of each, pages, pages of a request
    "requests": (0, 3, 4, 2),
    "queries": (2, 0, 4, 2),
    "pages": (2, 3, 0, 2),
    "room": (2, 3, 4, 0),
}


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", PAGED)
@torch.no_grad()
def test_calls_over_pages_of_nothing(name: str, compiles: bool) -> None:
    requests, rows, pages, columns = PAGED[name]
    q, cache = torch.randn(requests, 4, rows, DIM), torch.randn(pages, 16, HEADS, DIM)
    where = torch.zeros(requests, columns).int(), torch.zeros(requests).int()
    tokens, starts = q.transpose(1, 2).flatten(0, 1), torch.arange(requests + 1) * rows

    def run(q: Any, tokens: Any) -> Any:
        whole = tilegen.attention_paged(q, cache, cache, *where, return_lse=True)
        packed = tilegen.attention_paged(
            *(tokens, cache, cache, *where),
            q_starts=starts,
            max_q_length=rows,
            score=tilegen.softcap(20.0),
            return_lse=True,
        )
        named = flash_attn.flash_attn_varlen_func(
            *(tokens, cache, cache, starts, starts * 0, rows, None), block_table=where[0]
        )
        return *whole, *packed, named

    results = traced(run, compiles)(q, tokens)
    expected = (
        *(torch.zeros_like(q), torch.full((requests, 4, rows), MINUS)),
        *(torch.zeros_like(tokens), torch.full((4, requests * rows), MINUS)),
        torch.zeros_like(tokens),
    )
    for ours, other in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, other)


def test_pages_without_room_hold_no_keys() -> None:
    q, cache = torch.randn(2, HEADS, 3, DIM), torch.randn(0, 16, HEADS, DIM)
    with pytest.raises(InvalidProblem, match="kv_lengths must be 0 where"):
        tilegen.attention_paged(q, cache, cache, torch.zeros(2, 1).int(), torch.tensor([0, 4]))


@pytest.mark.parametrize(
    "batch, rows, caches, length", [(0, 3, 2, 32), (2, 0, 2, 32), (2, 3, 2, 0)]
)
def test_caches_of_nothing(batch: int, rows: int, caches: int, length: int) -> None:
    q, cache = torch.randn(batch, rows, 4, DIM), torch.randn(caches, length, HEADS, DIM)
    new = torch.randn(batch, 0, HEADS, DIM)
    out = flash_attn.flash_attn_with_kvcache(
        *(q, cache, cache.clone(), new, new), cache_seqlens=torch.zeros(batch).int(), causal=True
    )
    assert torch.equal(out, torch.zeros_like(q))
