"""Calls over pages that sizes let pass at once are those in which a closer look finds nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from tests.pure.test_paged import call
from tilegen.errors import InvalidProblem
from tilegen.problem import PAGES
from tilegen.runtime.paged_call import _check, _fits

Call = dict[str, Any]
NAMES = ("q", "k_pages", "v_pages", "block_table", "kv_lengths", "q_starts", "max_q_length")
SIZES = (0, 1, 2, 3, 5, 24, *PAGES)
TOGETHER = (  # dimensions that must agree
    *([("k_pages", dim), ("v_pages", dim)] for dim in range(3)),
    [("q", -1), ("k_pages", -1)],
    [("q", 0), ("block_table", 0), ("kv_lengths", 0)],
)


def usual() -> Iterator[Call]:
    """Yield calls that are right."""
    for layout in ("NHD", "HND"):
        one = call(layout=layout, q_starts=None, max_q_length=None)
        if layout == "HND":
            one |= {name: one[name].transpose(1, 2) for name in ("k_pages", "v_pages")}
        yield one
        starts = torch.tensor([0, 2, 3, 6])
        yield one | {"q": torch.randn(6, 4, 32), "q_starts": starts, "max_q_length": 3}


def others(one: Call) -> Iterator[Call]:
    """Yield what may be given instead of one argument, or of several that belong together."""
    for name in NAMES:
        for value in _others_of(one[name]):
            yield {name: value}
    yield {"layout": "NDH"}
    yield {"layout": "NHD" if one["layout"] == "HND" else "HND"}
    for sized in TOGETHER:
        for size in SIZES:
            yield {name: _resized(one[name], dim, size) for name, dim in sized}
    far = torch.empty_strided((20, 1, 1, 32), (32, 1 << 31, 1 << 31, 1))
    yield {"k_pages": far, "v_pages": far}


def _others_of(value: Any) -> Iterator[Any]:
    yield from (None, 0, -1, 5, True, 2.0, [[1, 2]], torch.tensor([0, 1, 2, 3]))
    if isinstance(value, torch.Tensor):
        for dim in range(value.ndim):
            yield from (_resized(value, dim, size) for size in SIZES)
            yield from (value.select(dim, 0), value.unsqueeze(dim), value.unsqueeze(dim + 1))
        yield from (value.to(one) for one in (torch.float16, torch.float64, torch.int32, "meta"))
        yield value.transpose(-1, 0).contiguous().transpose(-1, 0)
        yield value.unsqueeze(-1).expand(*value.shape, 2)[..., 0]
        yield value.repeat_interleave(2, -1)[..., ::2]


def _resized(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = [size if i == dim % x.ndim else n for i, n in enumerate(x.shape)]
    return torch.zeros(shape).to(x.dtype)


def given(one: Call) -> tuple[Any, ...]:
    """Return a call's arguments in their order."""
    return (*(one[name] for name in NAMES), one["layout"])


def is_right(one: Call) -> bool:
    """Whether a closer look finds nothing."""
    try:
        _check(*given(one))
    except InvalidProblem:
        return False
    return True


def test_usual_calls_are_let_pass() -> None:
    for one in usual():
        assert is_right(one)
        assert _fits(*given(one))


def test_what_is_let_pass_is_right() -> None:
    """With one change, each there is; with two, many."""
    draw = random.Random(1)
    passing = 0
    for one in usual():
        changes = list(others(one))
        pairs = [a | b for a, b in (draw.sample(changes, 2) for _ in range(1500))]
        for change in (*changes, *pairs):
            changed = one | change
            passes = _fits(*given(changed))
            assert is_right(changed) or not passes, change
            passing += passes
    assert passing > 500
