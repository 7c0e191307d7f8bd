"""Tokens beyond the last document, as in batches padded for graphs: results and gradients are 0
there, and NaN in them reaches no document. Judged by dense attention in fp64 of each document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo

import tilegen
from tilegen.integrations import flash_attn
from tilegen.runtime import plans

TOKENS, HEADS, DIM = 40, 2, 16
ROWS, COLUMNS = [0, 10, 25], [0, 7, 30]
SLOPES = torch.tensor([0.1, 0.2])
SINKS = torch.tensor([0.3, -0.4])


def by_document(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + SLOPES[b] * (q - k)


def varlen(**options: Any) -> Callable[..., Any]:
    return lambda *given: tilegen.attention_varlen(*given[:5], return_lse=True, **options)


CAUSAL = tilegen.causal("bottom_right")
DOORS: dict[str, Callable[..., Any]] = {
    "full": varlen(),
    "causal": varlen(mask=CAUSAL),
    "scored": varlen(mask=CAUSAL, score=by_document),
    "any mask": varlen(mask=CAUSAL | tilegen.prefix_lm(0), score=by_document),
    "sinks": lambda *given: tilegen.attention_varlen(
        *given[:5], mask=CAUSAL, score=tilegen.sinks(given[5]), return_lse=True
    ),
    "flash": lambda *given: flash_attn.flash_attn_varlen_func(
        *given[:5], 30, 30, causal=True, return_attn_probs=True
    )[:2],
}


def alone(
    given: Sequence[torch.Tensor], dout: torch.Tensor, cu_q: list[int], cu_k: list[int], door: str
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return out of the documents, and the gradients of q, k, v and the sinks."""
    q, k, v, sinks = (x.detach().double().requires_grad_() for x in given)
    parts: list[torch.Tensor] = []
    for i in range(2):
        rows, columns = slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])
        s = q[rows].transpose(0, 1) @ k[columns].transpose(0, 1).mT * DIM**-0.5
        n, m = s.shape[1:]
        at, seen = torch.arange(n)[:, None], torch.arange(m)
        if door in ("scored", "any mask"):
            s = s + SLOPES[i].double() * (at - seen)
        if door != "full":
            last = at + (max(0, m - n) if door == "any mask" else m - n)
            s = s.masked_fill(seen > last, float("-inf"))
        if door == "sinks":
            s = torch.cat([s, sinks[:, None, None].expand(-1, n, 1)], -1)
        weights = s.softmax(-1).nan_to_num()[..., :m]  # rows without keys have weight 0
        parts.append((weights @ v[columns].transpose(0, 1)).transpose(0, 1))
    out = torch.cat(parts)
    leaves = (q, k, v, sinks) if door == "sinks" else (q, k, v)
    return out.detach(), torch.autograd.grad(out, leaves, dout[: cu_q[-1]].double())


@pytest.fixture
def setting(how: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the call's setting, which known plans do not follow."""
    names = {"invariant": ("TILEGEN_BATCH_INVARIANT", "1"), "pytorch": ("TILEGEN_CPU", "torch")}
    if how in names:
        plans.forget()
        monkeypatch.setenv(*names[how])
    yield
    if how in names:
        plans.forget()


@pytest.mark.slow
@pytest.mark.usefixtures("setting")
@pytest.mark.parametrize("how", ["eager", "compiled", "no_grad", "invariant", "pytorch"])
@pytest.mark.parametrize("shared", [True, False], ids=["same", "two"])
@pytest.mark.parametrize("door", DOORS)
def test_tokens_beyond_the_documents(door: str, shared: bool, how: str) -> None:
    torch._dynamo.reset()
    bad = float("nan" if shared else "inf")
    cu_q, cu_k = ROWS, ROWS if shared else COLUMNS
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(TOKENS, HEADS, DIM, generator=generator) for _ in range(4))
    expected, grads = alone((q, k, v, SINKS), dout, cu_q, cu_k, door)
    for x, end in ((q, cu_q[-1]), (dout, cu_q[-1]), (k, cu_k[-1]), (v, cu_k[-1])):
        x[end:] = bad
    trains = how in ("eager", "compiled", "pytorch")
    leaves = [x.clone().requires_grad_(trains) for x in (q, k, v, SINKS)]
    starts = torch.tensor(cu_q)
    given = (*leaves[:3], starts, starts if shared else torch.tensor(cu_k), leaves[3])
    run = DOORS[door]
    if how == "compiled":
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    out, lse = run(*given)
    end = cu_q[-1]
    assert not out[end:].any()
    nothing = SINKS[:, None] if door == "sinks" else torch.tensor(float("-inf"))
    torch.testing.assert_close(lse[:, end:], nothing.expand(HEADS, TOKENS - end))
    torch.testing.assert_close(out[:end].double(), expected, atol=1e-5, rtol=1e-5)
    if trains:
        ours = torch.autograd.grad(out, leaves[: len(grads)], dout)
        for left, other in zip(ours, grads, strict=True):
            torch.testing.assert_close(left.double(), other, atol=2e-5, rtol=2e-5)


def test_a_batch_of_padding_only() -> None:
    for cu in ([0], [0, 0]):
        leaves = [torch.full((5, HEADS, DIM), float("nan"), requires_grad=True) for _ in range(3)]
        out = tilegen.attention_varlen(*leaves, torch.tensor(cu))
        assert not out.any()
        grads = torch.autograd.grad(out, leaves, torch.full_like(out, float("nan")))
        assert not any(grad.any() for grad in grads)
