"""Every way to call runs emitted kernels on CPU tensors by default, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention as of_torch

import tilegen
from tilegen.cpu.function import CpuFunction
from tilegen.integrations import flash_attn
from tilegen.integrations.sdpa import everywhere
from tilegen.launch import autograd
from tilegen.runtime import plans

ROWS, HEADS, WIDTH = 40, 2, 16
CU = torch.tensor([0, 15, ROWS], dtype=torch.int32)


class Launches:
    """Counts launches of compiled kernels."""

    def __init__(self) -> None:
        self.count = 0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    counted, run = Launches(), CpuFunction._run

    def counting(function: CpuFunction, *given: Any) -> None:
        counted.count += 1
        run(function, *given)

    monkeypatch.setattr(CpuFunction, "_run", counting)
    monkeypatch.delenv("TILEGEN_CPU", raising=False)
    plans.forget()
    yield counted
    plans.forget()


def causal_by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(batch, heads, rows, width), in fp64."""
    return of_torch(q.double(), k.double(), v.double(), is_causal=True).to(q.dtype)


def by_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return tilegen.attention(q, k, v, mask=tilegen.causal())


def by_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return tilegen.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_everywhere(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with everywhere():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, ROWS, ROWS, device="cpu")
    return tilegen.flex_attention(q, k, v, block_mask=mask)


def by_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    rows = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn.flash_attn_func(*rows, causal=True).transpose(1, 2)


def by_compile(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.compile(by_attention, backend="aot_eager", fullgraph=True)(q, k, v)


DIFFERENTIABLE = {
    "attention": by_attention,
    "scaled_dot_product_attention": by_sdpa,
    "everywhere": by_everywhere,
    "flex_attention": by_flex,
    "flash_attn_func": by_flash,
    "torch.compile": by_compile,
}


def leaves() -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    sizes = [(1, HEADS, ROWS, WIDTH)] * 3
    return [torch.randn(size, generator=drawn).requires_grad_() for size in sizes]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_calls_with_gradients(name: str, launches: Launches) -> None:
    given = leaves()
    out = DIFFERENTIABLE[name](*given)
    forward = launches.count
    assert forward >= 1
    gradients = torch.autograd.grad(out.square().sum(), given)
    assert launches.count - forward == 3  # delta, all gradients, the sum of dQ
    expected = causal_by_torch(*given)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    others = torch.autograd.grad(expected.square().sum(), given)
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-4, rtol=1e-4)


def test_packed_sequences(launches: Launches) -> None:
    given = leaves()
    tokens = [x[0].transpose(0, 1) for x in given]
    out = tilegen.attention_varlen(*tokens, CU, mask=tilegen.causal())
    parts = [
        causal_by_torch(*(x[:, :, first:end] for x in given))
        for first, end in zip(CU.tolist(), CU[1:].tolist(), strict=False)
    ]
    expected = torch.cat(parts, 2)[0].transpose(0, 1)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    forward = launches.count
    assert forward >= 1
    gradients = torch.autograd.grad(out.square().sum(), given)
    assert launches.count - forward == 3
    others = torch.autograd.grad(expected.square().sum(), given)
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-4, rtol=1e-4)


def test_pages(launches: Launches) -> None:
    """Keys are appended by a kernel, and read from their pages by others."""
    q, k, v = (x.detach() for x in leaves())
    pages = torch.zeros(2, 3, 16, HEADS, WIDTH)
    table, lengths = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([ROWS])
    tilegen.append_paged(k, v, pages[0], pages[1], table, lengths.int())
    assert launches.count == 1
    where = table, lengths.int()
    out = tilegen.attention_paged(q, pages[0], pages[1], *where, mask=tilegen.causal())
    assert launches.count == 3  # splits, and the kernel that joins them
    torch.testing.assert_close(out, causal_by_torch(q, k, v), atol=1e-5, rtol=1e-5)


def test_an_exported_program(launches: Launches) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return by_attention(q, k, v)

    given = tuple(x.detach() for x in leaves())
    program: Callable[..., Any] = torch.export.export(Layer(), given).module()
    before = launches.count
    out = program(*given)
    assert launches.count > before
    torch.testing.assert_close(out, causal_by_torch(*given), atol=1e-5, rtol=1e-5)


def test_a_setting_gives_pytorch_back(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CPU", "torch")
    given = leaves()
    out = by_attention(*given)
    torch.autograd.grad(out.sum(), given)
    assert not launches.count
    torch.testing.assert_close(out, causal_by_torch(*given), atol=1e-5, rtol=1e-5)


def test_named_kernels_are_not_replaced(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing compiles, PyTorch computes, unless TILEGEN_CPU=kernels is set."""
    from tilegen import cpu

    monkeypatch.setattr(cpu, "why_not_compiled", lambda: "no compiler")
    assert autograd.computes_by_torch(torch.device("cpu"))
    monkeypatch.setenv("TILEGEN_CPU", "kernels")
    assert not autograd.computes_by_torch(torch.device("cpu"))
