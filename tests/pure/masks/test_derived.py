"""Tensors that a mask or a score makes itself are made anew at each call, as PyTorch makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import tilegen
from tests.pure.masks.test_dtypes import kept
from tilegen.errors import Unsupported
from tilegen.runtime.call import score_of

N = 40
TABLE = torch.zeros(N)


def filled() -> torch.Tensor:
    new = torch.zeros(N)
    new[5:] = TABLE[5:]
    new[4:20].mul_(3)
    new.view(2, -1)[1] += 2
    return new


def added() -> torch.Tensor:
    new = TABLE.clone()
    new += 3
    return new


MADE: dict[str, Callable[[], torch.Tensor]] = {
    "a part": lambda: (TABLE * 2)[1:],
    "a view": lambda: (TABLE * 2).view(2, -1).mT.reshape(-1),
    "an element": lambda: TABLE.cumsum(0)[3].expand(N),
    "an element at a place": lambda: TABLE[TABLE.argmax()].expand(N),
    "a column": lambda: torch.stack([TABLE, -TABLE], 1)[:, 1],
    "sorted": lambda: TABLE.sort().values,
    "parts": lambda: (TABLE * 2).split(N // 2)[1],
    "rows": lambda: torch.stack([TABLE, -TABLE]).unbind()[1],
    "filled in place": filled,
    "changed by +=": added,
    "changed by a method": lambda: TABLE.clone().mul_(3),
    "changed by an option": lambda: torch.nn.functional.relu(TABLE - 9, inplace=True),
    "written to": lambda: torch.add(TABLE, 1, out=torch.empty(N)),
    "copied to": lambda: torch.zeros(N).copy_(TABLE),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_made_tensors_follow_the_tensors_they_are_made_of(name: str, inference: bool) -> None:
    def keep(b: Any, h: Any, q: Any, k: Any) -> Any:
        made = MADE[name]()
        return (made[q % len(made)] + made[k % len(made)]) % 7 < 3

    def change(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        made = MADE[name]()
        return s + made[q % len(made)] * (k + 1)

    TABLE.copy_(torch.arange(N))
    rows, columns = torch.arange(N)[:, None], torch.arange(N)[None]
    with torch.inference_mode() if inference else contextlib.nullcontext():
        mask, score = tilegen.predicate(keep), tilegen.score(change)
        for values in (torch.arange(N), torch.arange(N).flip(0) // 3):
            TABLE.copy_(values)
            expected = create_mask(keep, None, None, N, N, device="cpu")[0, 0]
            assert torch.equal(kept(mask, N).expand(N, N), expected)
            new = score.anew()
            (table,) = new.captured
            at = rows % (len(table) if table.ndim else 1)
            elements = table[at] if table.ndim else table
            expected = change(torch.zeros(()), 0, 0, rows, columns)
            assert torch.equal((elements * (columns + 1)).expand(N, N), expected)


def test_gradients_reach_tensors_through_changes_in_place() -> None:
    table = torch.randn(N).requires_grad_()

    def made(table: torch.Tensor) -> torch.Tensor:
        new = torch.zeros(N, dtype=table.dtype)
        new[3:] = table[3:] * 2
        new[5:9].mul_(3)
        return new

    q = torch.randn(1, 2, N, 16)
    out = tilegen.attention(q, q, q, score=lambda s, b, h, i, j: s + made(table)[j])
    weights = torch.randn_like(out)
    (actual,) = torch.autograd.grad(out, table, weights)
    exact = table.detach().double().requires_grad_()
    x = q.double()
    out = (x @ x.mT / 4 + made(exact)).softmax(-1) @ x
    (expected,) = torch.autograd.grad(out, exact, weights.double())
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


def test_constants_are_made_once() -> None:
    def change(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        slopes = torch.zeros(N)
        slopes[3:] = 2
        return s + slopes[q]

    score = score_of(change)
    assert score is not None
    assert not score.makes_tensors


def test_tensors_change_before_they_are_read() -> None:
    def keep(b: Any, h: Any, q: Any, k: Any) -> Any:
        new = TABLE.clone()
        before = new[q]
        new.add_(10)
        return before + new[q] < k

    with pytest.raises(Unsupported, match="expected add_ before the tensor that it changes"):
        tilegen.predicate(keep)
