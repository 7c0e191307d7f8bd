"""Names and hooks of other libraries on the GPU, against PyTorch's own kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as of_torch

import tilegen
from tests.support.problems import sized
from tilegen.integrations import flash_backend, sdpa
from tilegen.integrations.flash_attn import flash_attn_func


def inputs(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3)]


def with_gradients(out: torch.Tensor, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").reshape(out.shape).to(out.dtype)
    return out, *torch.autograd.grad(out, given, weights)


def compare(results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for left, other in zip(results, expected, strict=True):
        torch.testing.assert_close(left, other, atol=2e-2, rtol=2e-2)


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """tilegen instead of PyTorch's flash attention; its passes are listed as they run."""
    ran: list[str] = []
    for name, operator in flash_backend.OPERATORS.items():

        def counted(*args: Any, name: str = name, operator: Any = operator, **kwargs: Any) -> Any:
            results = operator(*args, **kwargs)  # or it raises, and PyTorch's own kernel runs
            ran.append("backward" if name.endswith("backward") else "forward")
            return results

        monkeypatch.setitem(flash_backend.OPERATORS, name, counted)
    tilegen.activate()
    yield ran
    tilegen.deactivate()


def test_sdpa_runs_on_tilegen_while_it_is_active(active: list[str]) -> None:
    given = inputs(2, 8, 1000, 64)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        grads = with_gradients(of_torch(*given, is_causal=True), given)
        assert active == ["forward", "backward"]
        tilegen.deactivate()
        expected = with_gradients(of_torch(*given, is_causal=True), given)
    assert active == ["forward", "backward"]
    compare(grads, expected)


def test_varlen_attn_runs_on_tilegen_while_it_is_active(active: list[str]) -> None:
    given = inputs(900, 8, 64)
    cu = torch.tensor([0, 300, 300, 900], dtype=torch.int32, device="cuda")
    packed = (*given, cu, cu, 600, 600)
    grads = with_gradients(varlen_attn(*packed, window_size=(127, 0)), given)
    assert active == ["forward", "backward"]
    tilegen.deactivate()
    compare(grads, with_gradients(varlen_attn(*packed, window_size=(127, 0)), given))


def test_slopes_and_other_refusals_reach_pytorchs_own_kernel(active: list[str]) -> None:
    q = inputs(2, 100, 4, 64)[0].detach()
    slopes = torch.rand(4, device="cuda")

    def slopes_by_torch() -> torch.Tensor:
        return torch.ops.aten._flash_attention_forward(
            *(q, q, q, None, None, 100, 100, 0.0, True, False), alibi_slopes=slopes
        )[0]

    tilegen.deactivate()
    try:
        slopes_by_torch()
    except RuntimeError as error:  # PyTorch 2.11 for CUDA 13 was built without ALiBi
        tilegen.activate()
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            slopes_by_torch()
        assert not active
        return
    tilegen.activate()
    out = slopes_by_torch()
    assert not active
    compare((out,), (flash_attn_func(q, q, q, causal=True, alibi_slopes=slopes),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everywhere_takes_explicit_masks(dtype: torch.dtype) -> None:
    n = sized(300, rehearsed=90)
    given = inputs(2, 4, n, 64, dtype=dtype)
    keep = torch.rand(2, 1, n, n, device="cuda") > 0.3
    padded = (torch.arange(n, device="cuda") < n * 2 // 3).expand(2, 1, 1, n)
    for mask in (keep, padded, torch.randn(n, n, dtype=dtype, device="cuda")):
        expected = with_gradients(of_torch(*given, mask), given)
        with sdpa.everywhere():
            compare(with_gradients(of_torch(*given, mask), given), expected)
