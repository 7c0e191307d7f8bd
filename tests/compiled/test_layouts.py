"""Outputs and gradients have the strides that kernels give, on every road."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as of_torch

import tilegen
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from tilegen.runtime import plans

DOORS = tilegen.attention, tilegen.scaled_dot_product_attention, tilegen.flex_attention
BATCH, HEADS, ROWS = 2, 2, 24


def bfloat16(*given: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return tilegen.attention(*given)


CALLS: dict[str, tuple[Callable[..., torch.Tensor], int, int]] = {
    **{door.__name__: (door, 16, 16) for door in DOORS},
    "narrow": (tilegen.attention, 4, 4),
    "wide values": (tilegen.attention, 16, 32),
    "dilated": (partial(tilegen.attention, mask="causal&dilated(3)"), 16, 16),
    "negative": (partial(tilegen.attention, scale=-0.5), 16, 16),
    "autocast": (bfloat16, 16, 16),
}
ROADS = ["kernels", "torch"]


@pytest.fixture(params=ROADS)
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels compute, or PyTorch."""
    if request.param == "torch":
        monkeypatch.setenv("TILEGEN_CPU", "torch")
    plans.forget()
    yield
    plans.forget()


def rows(width: int, *, inside: bool, batch: int = BATCH) -> torch.Tensor:
    torch.manual_seed(width)
    if inside:
        return torch.randn(batch, ROWS, HEADS, width).transpose(1, 2).requires_grad_()
    return torch.randn(batch, HEADS, ROWS, width, requires_grad=True)


@pytest.mark.parametrize("inside", [(True,) * 3, (False,) * 3, (True, False, True)], ids=str)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("road")
def test_strides_are_those_of_the_inputs(name: str, inside: tuple[bool, ...]) -> None:
    call, width, of_v = CALLS[name]
    for batch in (BATCH, 1):
        given = [
            rows(size, inside=one, batch=batch)
            for size, one in zip((width, width, of_v), inside, strict=True)
        ]
        expected = torch.empty_like(rows(of_v, inside=inside[0], batch=batch)).stride()
        with torch.no_grad():
            assert call(*given).stride() == expected
        out = call(*given)
        assert out.stride() == expected
        for gradient, x in zip(torch.autograd.grad(out.square().sum(), given), given, strict=True):
            assert gradient.stride() == x.stride()


@pytest.mark.usefixtures("road")
def test_a_copied_tensor_does_not_change_the_strides() -> None:
    q, k, v = (rows(32, inside=True)[..., ::2] for _ in range(3))
    assert tilegen.attention(q, k, v).transpose(1, 2).is_contiguous()


@pytest.mark.usefixtures("road")
def test_compiled_calls_have_the_same_strides() -> None:
    def run(*given: torch.Tensor) -> torch.Tensor:
        out = tilegen.attention(*given)
        return out.transpose(1, 2).view(BATCH, ROWS, -1) * out.stride(2)

    given = [rows(16, inside=True) for _ in range(3)]
    torch._dynamo.reset()
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(*given)
    torch.testing.assert_close(out, run(*given))
    for gradient, x in zip(torch.autograd.grad(out.square().sum(), given), given, strict=True):
        assert gradient.stride() == x.stride()


@pytest.mark.usefixtures("road")
def test_flash_attn_gives_contiguous_outputs() -> None:
    q, k, v = torch.randn(3, BATCH, ROWS, HEADS, 16, requires_grad=True).unbind()
    out = flash_attn_func(q, k, v)
    assert out.is_contiguous()
    assert all(x.is_contiguous() for x in torch.autograd.grad(out.sum(), (q, k, v)))
    q, k, v = (x[0] for x in (q, k, v))
    starts = torch.tensor([0, 9, ROWS], dtype=torch.int32)
    assert flash_attn_varlen_func(q, k, v, starts, starts, 15, 15).is_contiguous()


def test_gradients_by_torch_are_differentiable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CPU", "torch")
    plans.forget()
    given = [rows(16, inside=True).detach().double().float().requires_grad_() for _ in range(3)]
    seconds: list[Any] = []
    for call in (tilegen.attention, of_torch):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            first = torch.autograd.grad(call(*given).square().sum(), given, create_graph=True)
            seconds.append(torch.autograd.grad(sum(x.square().sum() for x in first), given))
    plans.forget()
    for left, other in zip(*seconds, strict=True):
        torch.testing.assert_close(left, other, atol=1e-3, rtol=1e-3)


def test_errors_are_of_the_classes_that_torch_raises() -> None:
    q = torch.randn(1, 2, 8, 16)
    misfit = q, q[..., :12], q
    for call in (of_torch, tilegen.scaled_dot_product_attention, tilegen.attention):
        with pytest.raises(RuntimeError):
            call(*misfit)
    with pytest.raises(ValueError, match="k must have"):
        tilegen.flex_attention(*misfit)
    with pytest.raises(RuntimeError, match="k must have"):
        flash_attn_func(*(x.transpose(1, 2) for x in misfit))
    assert issubclass(Unsupported, NotImplementedError)
    assert issubclass(InvalidProblem, ValueError)
