"""Conditions at a tie: a product that a compiler fuses with a sum is rounded once, in PyTorch
twice, and the two results differ in the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilegen

pytestmark = pytest.mark.portable

N, D = 200, 16
Number = Callable[[Any], Any]
CASES: dict[str, Number] = {
    "product and constant": lambda q: 0.3 * q - 2.1,
    "product and product": lambda q: 0.3 * q + 0.7 * (q % 7),
    "square": lambda q: (0.1 * q) * (0.1 * q) - 0.1 * q,
    "power": lambda q: (0.1 * q) ** 3 - 1.7,
    "negative": lambda q: 1.3 - 0.7 * q,
    "double": lambda q: q.double() * 0.3 - 2.1,
}


def fused_differently(number: Number) -> int:
    """Count the indices at which a fused product, computed in a wider type, rounds otherwise."""
    q = torch.arange(N)
    exact = number(q.double()).to(number(q).dtype)
    return int((exact != number(q)).sum())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_ties_are_ties(name: str, dtype: torch.dtype) -> None:
    """A table holds the very numbers that the condition compares it with."""
    number = CASES[name]
    table = number(torch.arange(N))
    if table.dtype == torch.float32:
        assert fused_differently(number), "no rounding to lose"
    q, k, v = (torch.randn(1, 1, N, D).to(dtype) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).float()
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    sides: list[Callable[..., Any]] = [
        lambda b, h, q, k: number(q) <= table[q],
        lambda b, h, q, k: number(q) >= table[q],
        lambda b, h, q, k: number(k) == table[k],
    ]
    for keep in sides:
        # PyTorch on a CPU keeps everything: the numbers are the same.
        at = torch.arange(N)
        assert keep(0, 0, at[:, None], at[None]).all()
        masked = tilegen.attention(q, k, v, mask=tilegen.predicate(keep)).float()
        assert (masked - expected).abs().max() < bound
        if table.dtype == torch.float64:
            continue  # scores compute in single precision

        def score(s: Any, b: Any, h: Any, q: Any, k: Any, keep: Any = keep) -> Any:
            return torch.where(keep(b, h, q, k), s, s - 1000)

        scored = tilegen.attention(q, k, v, score=tilegen.score(score)).float()
        assert (scored - expected).abs().max() < bound
