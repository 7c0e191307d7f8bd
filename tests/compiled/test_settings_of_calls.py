"""A call, its backward and a compiled graph compute under the settings that hold when they run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilegen
from tilegen.environment import Settings, current
from tilegen.launch.changes import Changes
from tilegen.launch.kernels import Kernels, Pass
from tilegen.operators import library
from tilegen.runtime import dispatch, plans


@pytest.fixture(autouse=True)
def _no_plans() -> Iterator[None]:
    plans.forget()
    yield
    plans.forget()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The passes loaded by calls, each with whether batch invariance was on."""
    seen: list[tuple[str, bool]] = []
    load = Kernels.load

    def noted(self: Kernels, direction: Any) -> Pass:
        seen.append((direction, self.problem.invariant))
        return load(self, direction)

    monkeypatch.setattr(Kernels, "load", noted)
    return seen


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 64, 32).unbind()
    return q, k, v


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())


def test_known_calls_follow_settings_and_come_back_to_their_plan() -> None:
    q, k, v = tensors()

    def plan() -> dispatch.Plan:
        out = tilegen.attention(q, k, v)
        torch.testing.assert_close(out, exact(q, k, v).to(out.dtype))
        return dispatch.plan_of(q, k, v, Changes(tilegen.full()))

    first = plan()
    assert first.kernels is not None
    with tilegen.settings(batch_invariant=True):
        invariant = plan().kernels
        assert invariant is not None
        assert invariant.problem.invariant
    with tilegen.settings(cpu="torch"):
        assert plan().kernels is None
    assert plan() is first


@pytest.mark.slow
def test_known_calls_over_pages_follow_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Settings] = []
    forward = Kernels.forward

    def noted(self: Kernels, *given: Any) -> Any:
        used.append(self.settings)
        return forward(self, *given)

    monkeypatch.setattr(Kernels, "forward", noted)
    q, pages = torch.randn(2, 2, 1, 32), torch.randn(4, 16, 2, 32)
    table, lengths = torch.arange(4, dtype=torch.int32).view(2, 2), torch.tensor([20, 32])

    for is_invariant in (False, True, False):
        with tilegen.settings(batch_invariant=is_invariant):
            tilegen.attention_paged(q, pages, pages, table, lengths)
    assert [settings.batch_invariant for settings in used] == [False, True, False]


def test_a_backward_uses_the_settings_of_its_forward(
    loads: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread without the forward's settings, as autograd's own threads for GPUs are."""
    seen: list[bool] = []
    backward = Kernels.backward

    def noted(self: Kernels, *given: Any) -> Any:
        seen.append(current().batch_invariant)
        return backward(self, *given)

    monkeypatch.setattr(Kernels, "backward", noted)
    q, k, v = (x.requires_grad_() for x in tensors())
    with tilegen.settings(batch_invariant=True):
        out = tilegen.attention(q, k, v)
    thread = threading.Thread(target=out.sum().backward)
    thread.start()
    thread.join()
    assert seen == [True]
    assert loads == [("forward", True), ("backward", True)]
    (expected,) = torch.autograd.grad(exact(q, k, v).sum(), [q])
    torch.testing.assert_close(q.grad, expected.to(q.dtype))


@pytest.mark.slow
def test_a_graph_reads_settings_when_it_runs_and_its_backward_uses_them(
    loads: list[tuple[str, bool]],
) -> None:
    graph = torch.compile(tilegen.attention, fullgraph=True, backend="aot_eager")
    q, k, v = (x.requires_grad_() for x in tensors())
    (expected,) = torch.autograd.grad(exact(q, k, v).sum(), [q])
    for is_invariant in (False, True, False):
        loads.clear()
        plans.forget()
        with tilegen.settings(batch_invariant=is_invariant):
            out = graph(q, k, v)
        with tilegen.settings(batch_invariant=not is_invariant):
            (given,) = torch.autograd.grad(out.sum(), [q])
        assert loads == [("forward", is_invariant), ("backward", is_invariant)]
        torch.testing.assert_close(given, expected.to(q.dtype))


@pytest.mark.slow
def test_packed_calls_in_a_graph_read_settings_when_they_run() -> None:
    q, k, v = torch.randn(3, 40, 2, 32).unbind()
    starts = torch.tensor([0, 13, 40])
    graph = torch.compile(tilegen.attention_varlen, backend="aot_eager")
    for cpu in ("kernels", "torch", "kernels"):
        with tilegen.settings(cpu=cpu):
            out = graph(q, k, v, starts)
        for a, b in ((0, 13), (13, 40)):
            alone = exact(*(x[a:b].transpose(0, 1) for x in (q, k, v))).transpose(0, 1)
            torch.testing.assert_close(out[a:b], alone.to(out.dtype))


def test_settings_noted_for_backwards_are_those_of_the_last_tensor_at_an_address() -> None:
    lse = torch.zeros(4)
    with tilegen.settings(tune=True) as chosen:
        library.noted(lse)
        assert library._noted[library._place(lse)] is chosen
    library.noted(lse)
    assert library._place(lse) not in library._noted
