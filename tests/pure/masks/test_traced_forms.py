"""Traces follow the forms of PyTorch code that users write. The function itself, called pair by
pair with tensors, says what each form means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilegen
from tests.support.traced import BOUNDS, MASKS, PICKED, Given, N
from tilegen.errors import Unsupported
from tilegen.masks.language.evaluation import evaluate
from tilegen.masks.tracing.trace import trace_mask

TABLE = torch.linspace(-1, 1, N)


@pytest.mark.parametrize("name", MASKS)
def test_a_trace_follows_pytorch(name: str) -> None:
    fn = MASKS[name]
    expected = torch.empty(2, N, N, dtype=torch.bool)
    for h, q, k in torch.cartesian_prod(*map(torch.arange, expected.shape)):
        expected[h, q, k] = fn(torch.tensor(0), h.clone(), q.clone(), k.clone())
    h, q, k = torch.meshgrid(*map(torch.arange, expected.shape), indexing="ij")
    traced = trace_mask(fn)
    actual = evaluate(traced.expr, traced.captured, b=h * 0, h=h, q=q, k=k, seqlen_q=N, seqlen_kv=N)
    assert torch.equal(actual, expected)
    assert 0 < expected.sum() < expected.numel()


def hidden(x: Any) -> Any:
    x.data = x + 1
    return x


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    ".mT": (lambda b, h, q, k: PICKED[q][None].mT[0, 0] > k, r"without \.mT of traced"),
    ".data": (lambda b, h, q, k: q.data > k, r"without \.data of traced"),
    "set": (lambda b, h, q, k: hidden(q) > k, r"got torch\.Tensor\.data\.__set__;"),
    "setitem": (
        lambda b, h, q, k: PICKED.__setitem__(q, 3) > k,
        r"got torch\.Tensor\.__setitem__;",
    ),
    "range": (lambda b, h, q, k: PICKED[q:k] > 3, r"slice"),
    "tolist": (lambda b, h, q, k: q.tolist() > k, r"got torch\.Tensor\.tolist;"),
    "numpy": (lambda b, h, q, k: q.numpy() > k, r"got torch\.Tensor\.numpy;"),
    "shapes": (
        lambda b, h, q, k: (PICKED[q] == BOUNDS[h]).any(),
        r"broadcast in eq.*\(3,\), \(2,\)",
    ),
    "dimension": (lambda b, h, q, k: (PICKED[q] > k).any(2), "Dimension out of range"),
    "dimensions": (lambda b, h, q, k: PICKED[q].unsqueeze(4).any(), "expected unsqueeze of the 1"),
    "beyond": (lambda b, h, q, k: (PICKED[q] + 1)[3] > 2, "constant indices"),
    "an index of rows": (lambda b, h, q, k: (PICKED[q] + 1)[k] > 2, "constant indices"),
    "a table in place": (lambda b, h, q, k: TABLE.add_(q) > k, "in place"),
    "rows in place": (lambda b, h, q, k: PICKED[q].add_(1).any(), "in place"),
    "a tensor of values": (
        lambda b, h, q, k: torch.stack([q, k]).any(),
        r"got torch\.stack; write",
    ),
    "in": (lambda b, h, q, k: q in PICKED, "without"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_cannot_be_traced_are_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(Unsupported, match=message):
        trace_mask(function)
    assert torch.equal(TABLE, torch.linspace(-1, 1, N))


def test_tables_without_elements_are_captured() -> None:
    """As bundles are made of."""
    table = torch.empty(N, device="meta")
    assert trace_mask(lambda b, h, q, k: table[q] > table[k]).captured == (table,)


def test_parameters_are_captured_themselves() -> None:
    table = torch.nn.Parameter(torch.zeros(3))
    assert tilegen.score(lambda s, b, h, q, k: s + table[h]).captured[0] is table


def test_a_score_may_be_given_back_by_an_autograd_function() -> None:
    assert tilegen.score(lambda s, b, h, q, k: Given.apply(s) * 2).text == "2.0*s"
