"""torch.compile takes SDPA's and flash-attn's names as they are: one graph, and no warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.nn.functional import scaled_dot_product_attention as of_torch

import tilegen
from tilegen.integrations import flash_attn, sdpa

SLOPES = torch.tensor([0.1, 0.2, 0.4, 0.8])
CU = torch.tensor([0, 3, 3, 9])
KEEP = torch.arange(9) < torch.tensor([9, 4])[:, None, None, None]


def of_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options: Any = {"softcap": 2.0, "alibi_slopes": SLOPES, "window_size": (5, 1)}
    return flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)[:2]


def of_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return flash_attn.flash_attn_varlen_func(q, k, v, CU, CU, 6, 6, causal=True)


def inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    with sdpa.everywhere():
        return of_torch(q, k, v, is_causal=True, enable_gqa=True)


def of_sdpa(**options: Any) -> Callable[..., Any]:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return tilegen.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

    return run


CALLS = {
    "flash": of_flash,
    "packed": of_packed,
    "everywhere": inside,
    "causal": of_sdpa(is_causal=True),
    "pairs": of_sdpa(attn_mask=KEEP & torch.ones(9, 9).tril().bool()),
    "columns": of_sdpa(attn_mask=KEEP),
    "added": of_sdpa(attn_mask=torch.linspace(-1, 1, 81).view(9, 9)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_is_the_same(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    given = [torch.randn(2, heads, 9, 16, requires_grad=True) for heads in (4, 2, 2)]
    run = CALLS[name]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results: list[Any] = []
    for left in (run, compiled):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*lru_cache.*")
            out = left(*given)
        outs = out if isinstance(out, tuple) else (out,)
        results.append((*outs, *torch.autograd.grad(sum(x.sum() for x in outs), given)))
    for left, other in zip(*results, strict=True):
        torch.testing.assert_close(left, other)
