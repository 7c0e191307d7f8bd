"""`tilegen.attention` on CPU tensors, with the emitted kernels compiled for the CPU."""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import tilegen
from tests.support.calls import gpu_road
from tilegen import disk, pipeline
from tilegen.bounded_cache import BoundedCache
from tilegen.check.reference import attention_reference, make_inputs
from tilegen.cpu import executable
from tilegen.emit.identity import RenderedKernel
from tilegen.errors import Unsupported
from tilegen.kernels.registry import BACKWARD, FAMILIES, FORWARD
from tilegen.kernels.spec import Direction, FamilySpec
from tilegen.problem import AttentionProblem
from tilegen.runtime import dispatch, plans


def _inputs(text: str, **options: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = make_inputs(AttentionProblem.parse(text), **options)  # type: ignore[arg-type]
    return x.q, x.k, x.v


def _close(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(tensor, expected.to(tensor.dtype), atol=2e-5, rtol=2e-5)


def test_forward_and_lse_match_the_reference() -> None:
    q, k, v = _inputs("b2 hq4 hkv2 q60 kv70 d32 fp32 full")
    out, lse = tilegen.attention(q, k, v, mask=tilegen.causal("bottom_right"), return_lse=True)
    expected = attention_reference(q, k, v, mask=tilegen.causal("bottom_right"))
    _close(out, expected[0])
    _close(lse, expected[1])


@pytest.mark.slow
def test_autograd_through_out_and_lse() -> None:
    q, k, v = (t.requires_grad_() for t in _inputs("b1 hq4 hkv1 q50 kv40 d32/16 fp32 full"))
    mask = tilegen.causal() & tilegen.sliding_window(20, 0)

    def loss(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
        return (out * weights).sum() + lse.masked_fill(lse == float("-inf"), 0.0).square().sum()

    grads = torch.autograd.grad(
        loss(*tilegen.attention(q, k, v, mask=mask, return_lse=True)), (q, k, v)
    )
    expected = torch.autograd.grad(loss(*attention_reference(q, k, v, mask=mask)), (q, k, v))
    for a, b in zip(grads, expected, strict=True):
        _close(a, b)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "a sum, whose cotangent needs no gradient": lambda out, lse: out.sum(),
    "squares": lambda out, lse: out.square().sum(),
    "lse": lambda out, lse: lse.sum(),
    "both": lambda out, lse: out.sum() + lse.square().sum(),
}


@pytest.mark.slow
def test_a_penalty_on_lse_leaves_rows_without_keys_alone() -> None:
    """Their lse is -inf, and its square has an infinite gradient."""
    given = [t.requires_grad_() for t in _inputs("b1 hq2 hkv2 q20 kv12 d16 fp32 full")]
    out, lse = tilegen.attention(*given, mask=tilegen.causal("bottom_right"), return_lse=True)
    assert torch.equal(lse.isinf().sum(), torch.tensor(2 * 8))
    loss = out.sum() + lse.square().clamp(max=1e30).sum()
    whole, wide = (x.detach().double().requires_grad_() for x in given[1:]), given[0].double()
    keys, values = whole
    rows = wide[:, :, 8:].detach().requires_grad_()
    scores = (rows @ keys.mT / 4).masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
    expected = (scores.softmax(-1) @ values).sum() + scores.logsumexp(-1).square().sum()
    dq, dk, dv = torch.autograd.grad(expected, (rows, keys, values))
    dq = torch.cat([torch.zeros(1, 2, 8, 16), dq], 2)
    for ours, theirs in zip(torch.autograd.grad(loss, given), (dq, dk, dv), strict=True):
        torch.testing.assert_close(ours, theirs.float(), atol=1e-4, rtol=1e-4)


PULLS: dict[str, Callable[..., Any]] = {
    "backward": lambda penalty, q, k: penalty.backward(),
    "grad": lambda penalty, q, k: torch.autograd.grad(penalty, q),
    "grad of the keys": lambda penalty, q, k: torch.autograd.grad(penalty, k),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("pull", PULLS)
def test_a_second_derivative_is_refused_where_it_is_pulled(name: str, pull: str) -> None:
    q, k, v = (t.requires_grad_() for t in _inputs("b1 hq2 hkv2 q20 kv20 d16 fp32 full"))
    loss = LOSSES[name](*tilegen.attention(q, k, v, return_lse=True))
    once = torch.autograd.grad(loss, q, retain_graph=True)[0]
    grads = torch.autograd.grad(loss, q, create_graph=True)[0]
    assert torch.equal(grads, once), "nothing is refused for create_graph alone"
    penalty = grads.square().sum() + q.square().sum() + k.square().sum()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        PULLS[pull](penalty, q, k)


def test_a_first_derivative_in_a_graph_is_used_as_a_number() -> None:
    q, k, v = (t.requires_grad_() for t in _inputs("b1 hq2 hkv2 q20 kv20 d16 fp32 full"))
    weight = torch.ones((), requires_grad=True)
    grads = torch.autograd.grad(tilegen.attention(q, k, v).sum(), q, create_graph=True)[0]
    (weight * grads.detach().sum()).backward()
    assert weight.grad is not None
    assert weight.grad == grads.sum()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_tangents_of_forward_mode_are_refused(trained: bool, which: int) -> None:
    given = [t.requires_grad_(trained) for t in _inputs("b1 hq2 hkv2 q20 kv20 d16 fp32 full")]
    with forward_ad.dual_level():
        tilegen.attention(*given)
        given[which] = forward_ad.make_dual(given[which], torch.ones_like(given[which]))
        with pytest.raises(Unsupported, match="no forward-mode derivatives"):
            tilegen.attention(*given)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("result", [0, 1])
def test_tangents_of_cotangents_are_refused(result: int, counted: bool) -> None:
    q, k, v = (t.requires_grad_() for t in _inputs("b1 hq2 hkv2 q20 kv20 d16 fp32 full"))
    with forward_ad.dual_level(), FlopCounterMode(display=False) if counted else nullcontext():
        given = tilegen.attention(q, k, v, return_lse=True)[result]
        dual = forward_ad.make_dual(torch.ones_like(given), torch.ones_like(given))
        with pytest.raises(Unsupported, match="no forward-mode derivatives"):
            torch.autograd.grad(given, q, dual)


@pytest.mark.parametrize("trained", [True, False])
def test_tangents_of_a_score_are_refused(trained: bool) -> None:
    given = [t.requires_grad_(trained) for t in _inputs("b1 hq2 hkv2 q20 kv20 d16 fp32 full")]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.zeros(20, 20), torch.ones(20, 20))
        for score in (tilegen.bias(dual), tilegen.sinks(dual[0, :2])):
            with pytest.raises(Unsupported, match="no forward-mode derivatives"):
                tilegen.attention(*given, score=score)


def test_lse_alone_has_gradients() -> None:
    q, k, v = (t.requires_grad_() for t in _inputs("b1 hq2 hkv2 q20 kv20 d16 fp32 full"))
    _, lse = tilegen.attention(q, k, v, return_lse=True)
    _, expected = attention_reference(q, k, v)
    _close(torch.autograd.grad(lse.sum(), q)[0], torch.autograd.grad(expected.sum(), q)[0])


def test_only_requested_gradients_are_computed() -> None:
    q, k, v = _inputs("b1 hq2 hkv2 q20 kv20 d16 fp32 full")
    k.requires_grad_()
    tilegen.attention(q, k, v).sum().backward()
    assert k.grad is not None
    assert q.grad is None
    assert v.grad is None


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-50, 0.7, 1])
def test_any_finite_scale(scale: float) -> None:
    q, k, v = (t.requires_grad_() for t in _inputs("b1 hq2 hkv1 q33 kv40 d16 fp32 full"))
    out = tilegen.attention(q, k, v, scale=scale)
    expected, _ = attention_reference(q, k, v, scale=scale)
    _close(out, expected)
    _close(torch.autograd.grad(out.sum(), q)[0], torch.autograd.grad(expected.sum(), q)[0])


def test_transposed_views_are_not_copied_and_out_has_their_layout() -> None:
    q, k, v = _inputs("b2 hq2 hkv2 q40 kv40 d32 fp32 full", heads_inside=True)
    out = tilegen.attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    _close(out, attention_reference(q, k, v)[0])


@pytest.mark.parametrize("heads_inside", [False, True])
def test_odd_strides_and_offsets(heads_inside: bool) -> None:
    """Slices of a wider tensor, at addresses that no vector load can use."""
    wide = _inputs("b1 hq4 hkv2 q45 kv50 d40 fp16 full", heads_inside=heads_inside)
    q, k, v = (t[..., 3:36] for t in wide)
    assert not dispatch.is_aligned(q)
    expected, _ = attention_reference(q.float(), k.float(), v.float(), mask=tilegen.causal())
    torch.testing.assert_close(
        tilegen.attention(q, k, v, mask=tilegen.causal()).float(), expected, atol=3e-3, rtol=3e-3
    )


def test_a_strided_last_dimension_is_copied_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    q, k, v = _inputs("b1 hq2 hkv2 q20 kv30 d32 fp32 full")
    q = q.mT.contiguous().mT
    assert q.stride(-1) != 1
    disk.say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="tilegen"):
        for _ in range(2):
            _close(tilegen.attention(q, k, v), attention_reference(q, k, v)[0])
    assert [record.message for record in caplog.records if "copied" in record.message] == [
        "q: copied on every call, since kernels need a dense last dimension; "
        "pass a contiguous tensor"
    ]


def test_a_broadcast_gradient_is_accepted() -> None:
    """`out.sum().backward()` sends an expanded gradient whose strides are all 0."""
    q, k, v = (t.requires_grad_() for t in _inputs("b1 hq2 hkv2 q20 kv20 d16 fp32 full"))
    tilegen.attention(q, k, v).sum().backward()
    expected, _ = attention_reference(q, k, v)
    assert v.grad is not None
    _close(v.grad, torch.autograd.grad(expected.sum(), v)[0])


def test_broadcast_keys_work() -> None:
    q, k, v = _inputs("b3 hq2 hkv2 q20 kv20 d16 fp32 full")
    k, v = k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1)
    _close(tilegen.attention(q, k, v), attention_reference(q, k, v)[0])


def test_a_repeated_call_is_a_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = _inputs("b1 hq2 hkv2 q20 kv20 d16 fp32 full")
    tilegen.attention(q, k, v)

    def never(*_: object) -> None:
        raise AssertionError("a second call must not choose again")

    monkeypatch.setattr(dispatch, "_new_plan", never)
    monkeypatch.setattr(pipeline, "choose", never)
    tilegen.attention(q + 1, k, v)


def test_more_programs_than_a_grid_holds() -> None:
    q = torch.zeros(1, 1, 1, 16).expand(2**17, 2**10, 2**10, 16)
    with pytest.raises(Unsupported, match="split the batch"):
        tilegen.attention(q, q, q)


def test_plans_do_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "by_call", BoundedCache(3))
    for length in range(1, 8):
        q, k, v = _inputs(f"b1 hq1 hkv1 q{length} kv{length} d16 fp32 full")
        tilegen.attention(q, k, v)
        assert len(plans.by_call) <= 3


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Have every call computed by the small-cache kernels; returns which of them were loaded."""
    loaded: list[str] = []

    def chosen(known: object, direction: Direction) -> tuple[FamilySpec, ...]:
        return (FAMILIES[direction]["small_cache"],)

    def watched(rendered: RenderedKernel, device: torch.device) -> ModuleType:
        loaded.append(rendered.kernel)
        return executable(rendered, device)

    monkeypatch.setattr(pipeline, "families_used", chosen)
    with gpu_road(watched):
        yield loaded


@pytest.mark.slow
def test_small_cache_forward_backward_and_lse(small_cache: list[str]) -> None:
    q, k, v = (t.requires_grad_() for t in _inputs("b1 hq4 hkv2 q50 kv70 d48/32 fp32 full"))
    mask = tilegen.causal("bottom_right")

    def loss(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum() + lse.sum()

    grads = torch.autograd.grad(
        loss(*tilegen.attention(q, k, v, mask=mask, return_lse=True)), (q, k, v)
    )
    expected = torch.autograd.grad(loss(*attention_reference(q, k, v, mask=mask)), (q, k, v))
    for a, b in zip(grads, expected, strict=True):
        _close(a, b)
    assert set(small_cache) == {*FORWARD["small_cache"].names, *BACKWARD["small_cache"].names}


@pytest.mark.slow
def test_small_cache_computes_only_requested_gradients(small_cache: list[str]) -> None:
    q, k, v = _inputs("b1 hq2 hkv2 q20 kv20 d32 fp32 full")
    q.requires_grad_()
    tilegen.attention(q, k, v).sum().backward()
    assert q.grad is not None
    expected = q.detach().clone().requires_grad_()
    attention_reference(expected, k, v)[0].sum().backward()
    assert expected.grad is not None
    _close(q.grad, expected.grad)


@pytest.mark.slow
def test_large_head_dims_are_served() -> None:
    """The model chooses any family at this length; only the result is checked."""
    q, k, v = (t.requires_grad_() for t in _inputs("b1 hq2 hkv1 q40 kv50 d576/512 fp16 full"))
    out = tilegen.attention(q, k, v, mask=tilegen.causal())
    expected = attention_reference(q.double(), k.double(), v.double(), mask=tilegen.causal())[0]
    torch.testing.assert_close(out, expected.half(), atol=4e-3, rtol=4e-3)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    wanted = torch.autograd.grad(expected.sum(), (q, k, v))
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
