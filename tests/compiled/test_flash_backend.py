"""The overrides of PyTorch's flash attention, by emitted kernels on a CPU: the contracts of `aten`
on a GPU, and results through PyTorch's autograd."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import scaled_dot_product_attention as of_torch

from tests.pure.calls.test_flash_attn import dense, of_documents
from tilegen.check.reference import attention_reference
from tilegen.disk import say_once
from tilegen.integrations import flash_backend
from tilegen.masks.dropout import Dropout
from tilegen.masks.mask import causal

Make = Callable[..., torch.Tensor]
ATEN = torch.ops.aten


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The overrides in place for CPU tensors, which no other kernel of these operators takes."""
    overrides = flash_backend.Overrides("CPU")
    yield
    overrides.remove()


def described(value: Any) -> list[Any]:
    """Sizes, strides and dtypes of an operator's results."""
    value = value if isinstance(value, tuple | list) else (value,)
    return [
        (tuple(one.shape), one.stride(), one.dtype) if isinstance(one, torch.Tensor) else one
        for one in value
    ]


def heads_first(make: Make) -> tuple[torch.Tensor, ...]:
    return make(2, 4, 20, 16), make(2, 2, 20, 16), make(2, 2, 20, 16)


def heads_inside(make: Make) -> tuple[torch.Tensor, ...]:
    return tuple(make(2, 20, heads, 16).transpose(1, 2) for heads in (4, 2, 2))


def in_one_tensor(make: Make) -> tuple[torch.Tensor, ...]:
    return make(2, 20, 3, 4, 16).transpose(1, 3).unbind(2)


def lengths_first(make: Make) -> tuple[torch.Tensor, ...]:
    return tuple(make(20, 2, heads, 16).permute(1, 2, 0, 3) for heads in (4, 2, 2))


@pytest.mark.parametrize("layout", [heads_first, heads_inside, in_one_tensor, lengths_first])
def test_dense_results_are_laid_out_as_aten_promises(layout: Any) -> None:
    """For SDPA's operator, and for flash's own, whose heads lie inside."""
    results: list[list[Any]] = []
    for real in (True, False):
        names = flash_backend.OPERATORS
        ops: dict[str, Any] = names if real else {name: getattr(ATEN, name) for name in names}
        with FakeTensorMode(allow_non_fake_inputs=True) if not real else torch.no_grad():
            device = "cpu" if real else "cuda"

            def make(*size: int, device: str = device) -> torch.Tensor:
                return torch.ones(*size, dtype=torch.float16, device=device)

            q, k, v = layout(make)
            fwd = ops["_scaled_dot_product_flash_attention"](q, k, v, 0.0, True, False, scale=0.3)
            out, lse, _, _, rows, columns, state, unused, _ = fwd
            none = None if real else make(1)
            bwd = ops["_scaled_dot_product_flash_attention_backward"](
                *(torch.ones_like(out), q, k, v, out, lse, none, none, rows, columns, 0.0, True),
                *(state, unused),
                scale=0.3,
            )
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            own = ops["_flash_attention_forward"](q, k, v, None, None, 20, 20, 0.0, True, False)
            inplace = ops["_flash_attention_forward_no_dropout_inplace"](
                *(torch.empty_like(q), q, k, v, None, None, 20, 20, 0.0, True, False)
            )
            results.append([described(one) for one in (fwd, bwd, own, inplace)])
    assert results[0] == results[1]


def test_packed_results_are_laid_out_as_aten_promises() -> None:
    results: list[list[Any]] = []
    for real in (True, False):
        with FakeTensorMode(allow_non_fake_inputs=True) if not real else torch.no_grad():
            device = "cpu" if real else "cuda"
            q, k, v = torch.ones(20, 3, 4, 16, dtype=torch.float16, device=device).unbind(1)
            cu = torch.tensor([0, 7, 20], dtype=torch.int32, device=device)
            names = flash_backend.OPERATORS
            ops: dict[str, Any] = names if real else {name: getattr(ATEN, name) for name in names}
            fwd = ops["_flash_attention_forward"](q, k, v, cu, cu, 13, 13, 0.0, True, False)
            out, lse, state, unused, _ = fwd
            bwd = ops["_flash_attention_backward"](
                *(torch.ones_like(out), q, k, v, out, lse, cu, cu, 13, 13, 0.0, True),
                *(state, unused),
            )
            results.append([described(one) for one in (fwd, bwd)])
    assert results[0] == results[1]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("layout", [heads_first, in_one_tensor])
def test_sdpa_and_its_gradients(layout: Any) -> None:
    """As PyTorch's autograd calls the operators."""
    torch.manual_seed(0)
    given = [x.detach().requires_grad_() for x in layout(torch.randn)]
    expected = of_torch(*given, is_causal=True, scale=0.3, enable_gqa=True)
    out, lse, *_ = ATEN._scaled_dot_product_flash_attention(*given, 0.0, True, scale=0.3)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    for left, other in zip(
        (out, *torch.autograd.grad(out, given, weights)),
        (expected, *torch.autograd.grad(expected, given, weights)),
        strict=True,
    ):
        torch.testing.assert_close(left, other, atol=3e-5, rtol=3e-5)
    scores = given[0] @ given[1].repeat_interleave(given[0].shape[1] // given[1].shape[1], 1).mT
    scores = (scores * 0.3).masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=3e-5, rtol=3e-5)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)], ids=str)
def test_varlen_attn_and_its_gradients(window: tuple[int, int]) -> None:
    """Torch's own function for packed sequences, with documents of different lengths."""
    torch.manual_seed(0)
    cu_q, cu_k = [0, 4, 4, 12], [0, 7, 9, 15]
    given = [torch.randn(n, h, 16, requires_grad=True) for n, h in ((12, 4), (15, 2), (15, 2))]
    cu = [torch.tensor(left, dtype=torch.int32) for left in (cu_q, cu_k)]
    out, lse = varlen_attn(
        *(*given, *cu, 8, 7),
        window_size=window,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    expected, expected_lse = of_documents(given, cu_q, cu_k, {"window_size": window})
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    for left, other in zip(
        (out, lse, *torch.autograd.grad(out, given, weights)),
        (expected, expected_lse, *torch.autograd.grad(expected, given, weights)),
        strict=True,
    ):
        torch.testing.assert_close(left, other, atol=3e-5, rtol=3e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_dropout_is_drawn_once_for_both_passes() -> None:
    """Its state goes where PyTorch keeps that of its own; the reference is given the same."""
    torch.manual_seed(0)
    given = [x.requires_grad_() for x in heads_first(torch.randn)]
    out, _, _, _, _, _, state, *_ = ATEN._scaled_dot_product_flash_attention(*given, 0.3, True)
    assert state.dtype is torch.uint64
    expected, _ = attention_reference(
        *given, mask=causal(), dropout=Dropout(0.3, state.view(torch.int64))
    )
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    for left, other in zip(
        (out, *torch.autograd.grad(out, given, weights)),
        (expected, *torch.autograd.grad(expected, given, weights)),
        strict=True,
    ):
        torch.testing.assert_close(left, other, atol=3e-5, rtol=3e-5)
    again, *_ = ATEN._scaled_dot_product_flash_attention(*given, 0.3, True)
    assert not torch.equal(out, again)


@pytest.mark.usefixtures("on_cpu")
def test_flash_with_a_window_at_other_lengths() -> None:
    """Aligned at the end; out is written where it is asked for."""
    torch.manual_seed(0)
    given = torch.randn(2, 9, 4, 16), torch.randn(2, 20, 2, 16), torch.randn(2, 20, 2, 16)
    expected, expected_lse = dense(*given, causal=True, window_size=(7, 3))
    out = torch.empty(2, 9, 4, 16)
    lse = ATEN._flash_attention_forward_no_dropout_inplace(
        *(out, *given, None, None, 9, 20, 0.0, True, False),
        window_size_left=7,
        window_size_right=3,
    )
    torch.testing.assert_close(out, expected, atol=3e-5, rtol=3e-5)
    torch.testing.assert_close(lse, expected_lse, atol=3e-5, rtol=3e-5)


def test_unsupported_calls_reach_the_previous_kernel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="tilegen")
    say_once.cache_clear()
    calls: list[Any] = []

    def of_another(query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        calls.append((args[7:], kwargs))
        values = query.new_zeros(())
        return values, values, values, values, values

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", of_another, "CPU")
    overrides = flash_backend.Overrides("CPU")
    q = torch.randn(1, 4, 2, 16)
    given = (q, q, q, None, None, 4, 4, 0.0, True, False)
    slopes = torch.ones(2)
    out, *_ = ATEN._flash_attention_forward(*given)
    assert out.shape == q.shape
    assert not calls
    for _ in range(2):
        out, *_ = ATEN._flash_attention_forward(*given, alibi_slopes=slopes)
        assert out.shape == ()
    assert calls[0][1]["alibi_slopes"] is slopes
    assert len(calls) == 2
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.message for record in warned] == [
        "flash attention: PyTorch's own kernel computes instead: "
        "tilegen's flash attention has no alibi_slopes"
    ]
    overrides.remove()
    out, *_ = ATEN._flash_attention_forward(*given)
    assert out.shape == ()
