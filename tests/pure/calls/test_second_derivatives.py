"""Second derivatives and those of forward mode: as autograd has them where PyTorch computes, and
refused in operators and over pages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import tilegen
from tilegen.errors import Unsupported
from tilegen.masks.score import Score, bias, sinks

LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "a sum": lambda out, lse: out.sum(),
    "squares": lambda out, lse: out.square().sum(),
    "lse": lambda out, lse: lse.sum(),
}


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 2, 9, 16, generator=generator, requires_grad=True) for _ in "qkv"]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of causal attention."""
    above = torch.ones(9, 9, dtype=torch.bool).triu(1)
    scores = (q @ k.mT / 4).masked_fill(above, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return tilegen.attention(q, k, v, mask=tilegen.causal(), return_lse=True)


@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_penalty_is_pytorchs(name: str) -> None:
    def penalised(attention: Callable[..., Any]) -> list[torch.Tensor]:
        given = inputs()
        loss = LOSSES[name](*attention(*given))
        grads = torch.autograd.grad(loss, given, create_graph=True, allow_unused=True)
        sum(one.square().sum() for one in grads if one is not None).backward()  # type: ignore[union-attr]
        return [given[0].grad, given[1].grad]  # type: ignore[list-item]

    for actual, expected in zip(penalised(ours), penalised(plain), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_tangents_are_pytorchs() -> None:
    q, k, v = (one.detach() for one in inputs())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        for our, expected in zip(ours(dual, k, v), plain(dual, k, v), strict=True):
            tangents = (forward_ad.unpack_dual(one).tangent for one in (our, expected))
            torch.testing.assert_close(*tangents)


def test_tangents_over_pages_are_refused() -> None:
    q, pages = torch.randn(1, 2, 3, 16), torch.randn(2, 16, 2, 16)
    tables = torch.tensor([[0, 1]]), torch.tensor([20])
    with forward_ad.dual_level():
        for given in (
            (forward_ad.make_dual(q, torch.ones_like(q)), pages, pages),
            (q, pages, forward_ad.make_dual(pages, torch.ones_like(pages))),
        ):
            with pytest.raises(Unsupported, match="no forward-mode derivatives"):
                tilegen.attention_paged(*given, *tables)


SCORES: dict[str, Callable[[torch.Tensor], Score]] = {
    "bias": lambda x: bias(x),
    "sinks": lambda x: sinks(x[0, :2]),
    "function": lambda x: tilegen.score(lambda s, b, h, q, k: s + x[q, k]),
}


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("name", SCORES)
def test_tangents_of_a_score_over_pages_are_refused(name: str, counted: bool) -> None:
    q, pages = torch.randn(1, 2, 3, 16), torch.randn(2, 16, 2, 16)
    tables = torch.tensor([[0, 1]]), torch.tensor([20])
    with forward_ad.dual_level(), FlopCounterMode(display=False) if counted else nullcontext():
        score = SCORES[name](forward_ad.make_dual(torch.zeros(3, 32), torch.ones(3, 32)))
        with pytest.raises(Unsupported, match="no forward-mode derivatives"):
            tilegen.attention_paged(q, pages, pages, *tables, score=score)


def test_torch_func_drops_no_tangent_of_a_score_over_pages() -> None:
    q, pages = torch.randn(1, 2, 3, 16), torch.randn(2, 16, 2, 16)
    tables = torch.tensor([[0, 1]]), torch.tensor([20])

    def scored(values: torch.Tensor) -> Any:
        return tilegen.attention_paged(q, pages, pages, *tables, score=bias(values))

    with pytest.raises(Unsupported, match="no forward-mode derivatives"):
        torch.func.jvp(scored, (torch.zeros(3, 32),), (torch.ones(3, 32),))


@pytest.mark.parametrize("name", SCORES)
def test_tangents_of_a_score_in_a_watched_call_are_refused(name: str) -> None:
    q, k, v = (one.detach() for one in inputs())
    with forward_ad.dual_level(), FlopCounterMode(display=False):
        score = SCORES[name](forward_ad.make_dual(torch.zeros(9, 9), torch.ones(9, 9)))
        with pytest.raises(Unsupported, match="no forward-mode derivatives"):
            tilegen.attention(q, k, v, score=score)


def test_tangents_that_a_compiled_graph_passes_on_are_refused() -> None:
    q, k, v = (one.detach() for one in inputs())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(k, torch.ones_like(k))
        with pytest.raises(Unsupported, match="no forward-mode derivatives"):
            torch.ops.tilegen.forward(q, dual, v, "{}", [], 0.25, 0.0, None)


@pytest.mark.parametrize("trained", [False, True])
def test_a_watched_call_inside_forward_mode_is_computed(trained: bool) -> None:
    q, k, v = (one.detach().requires_grad_(trained) for one in inputs())
    with forward_ad.dual_level(), FlopCounterMode(display=False):
        torch.testing.assert_close(ours(q, k, v)[0], plain(q, k, v)[0])


@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.hessian])
def test_transforms_of_forward_mode_are_refused(transform: Callable[..., Any]) -> None:
    q, k, v = (one.detach() for one in inputs())
    with pytest.raises(Unsupported, match="no forward-mode derivatives"):
        transform(lambda q: ours(q, k, v)[0].sum())(q)


def test_tangents_of_appended_keys_are_refused() -> None:
    new, pages = torch.randn(1, 2, 3, 16), torch.randn(2, 16, 2, 16)
    tables = torch.tensor([[0, 1]]), torch.tensor([20])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(new, torch.ones_like(new))
        with pytest.raises(Unsupported, match="no forward-mode derivatives"):
            tilegen.append_paged(new, dual, pages, pages.clone(), *tables)


def test_a_watched_call_refuses_second_derivatives_where_they_are_pulled() -> None:
    q, k, v = inputs()
    first = torch.func.grad(lambda q: ours(q, k, v)[0].sum())
    torch.testing.assert_close(first(q), torch.autograd.grad(plain(q, k, v)[0].sum(), q)[0])
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.func.grad(lambda q: first(q).square().sum())(q)
