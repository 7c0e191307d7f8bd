"""Quotients of floats that are rounded down, and their remainders, have PyTorch's bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import tilegen
from tests.pure.masks.test_dtypes import kept

N = 60
RANDOM = torch.Generator().manual_seed(0)
FLOATS, OTHERS = 5 * torch.randn(2, N, generator=RANDOM)
FLOATS[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, 0.1, -0.3])
OTHERS[:9] = torch.tensor([0.0, 1.0, torch.inf, -torch.inf, torch.nan, 0.1, -0.1, 2.0, 3.0])
FINITE = torch.where(OTHERS.isfinite() & (OTHERS.abs() > 0.25), OTHERS, 0.7)

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "%": lambda x, y: x % y,
    "//": lambda x, y: x // y,
    "fmod": torch.fmod,
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}
DIVIDENDS: dict[str, Callable[[Any, Any], Any]] = {
    "tenths": lambda q, k: q * 0.1,
    "distances": lambda q, k: (q - k).float(),
    "integers": lambda q, k: k,
    "floats": lambda q, k: FLOATS[q],
    "half precision": lambda q, k: FLOATS.half()[q],
    "bfloat16": lambda q, k: FLOATS.bfloat16()[q],
}
DIVISORS: dict[str, Callable[[Any, Any], Any]] = {
    **{
        str(number): lambda q, k, number=number: number
        for number in (0.1, 0.3, -0.3, 1 / 3, 0.5, 7.0, 3, 2 * math.pi, 0.0, math.inf, -math.inf)
    },
    "floats": lambda q, k: OTHERS[k],
    "half precision": lambda q, k: FINITE.half()[k],
}


@pytest.mark.sampled
@pytest.mark.parametrize("divisor", DIVISORS)
@pytest.mark.parametrize("dividend", DIVIDENDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_quotients_and_remainders(name: str, dividend: str, divisor: str) -> None:
    def value(q: Any, k: Any) -> Any:
        return OPERATIONS[name](DIVIDENDS[dividend](q, k), DIVISORS[divisor](q, k))

    rows, columns = torch.arange(N)[:, None], torch.arange(N)[None]
    expected = value(rows, columns).expand(N, N)

    def keep(b: Any, h: Any, q: Any, k: Any) -> Any:
        same = value(q, k) == expected[q, k]
        return torch.where(torch.isnan(value(q, k)), expected.isnan()[q, k], same)

    # Under vmap, PyTorch itself computes some of half precision otherwise.
    every = create_mask(keep, None, None, N, N, device="cpu")[0, 0]
    assert every.float().mean() > 0.8
    assert kept(tilegen.predicate(keep), N)[every].all()
