"""Functions over small tables, traced: PyTorch's own, called with the indices of each pair."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional

import tilegen
from tilegen.errors import Unsupported
from tilegen.masks.language.derivatives import derivatives, text_of
from tilegen.masks.language.evaluation import evaluate
from tilegen.masks.language.expr import S, slot_of
from tilegen.masks.language.texts import from_text, to_text
from tilegen.masks.tracing.trace import trace_mask, trace_score

SHAPE = BATCH, HEADS, ROWS, COLUMNS = 2, 2, 7, 9
INF, NAN = torch.inf, torch.nan
FEW = torch.tensor([3, 1, 7])
NARROW = FEW.to(torch.int32)
GRID = torch.arange(6).reshape(2, 3) * 2
PICKED = torch.arange(27).reshape(9, 3) % 5
NUMBERS = torch.tensor([0.5, 1.0, INF, 2.0, NAN, -INF, 3.5, NAN, 2.00001])
DOUBLES = NUMBERS.double() + 1e-9
HALVES = torch.linspace(1, 1.1, 9).half()
WIDE = 2**24 + torch.arange(9)
EDGES = torch.tensor([-2, 0, 0, 3, 5])
BY_BATCH = torch.tensor([[0, 2, 5], [1, 1, 6]])
SCALE = torch.tensor([-1.5, 0.0, 0.5, 3.0])
ORDER = torch.tensor([2, 0, 1])
LONG = torch.arange(256) * 2 - 100
IS_ODD = torch.arange(9) % 2 == 1

MASKS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "isin": lambda b, h, q, k: torch.isin(k, FEW),
    "isin inverted": lambda b, h, q, k: torch.isin(q - k, GRID, invert=True),
    "isin, narrow": lambda b, h, q, k: torch.isin(q - k, NARROW, assume_unique=True),
    "isin, floats": lambda b, h, q, k: torch.isin(k / 2, NUMBERS),
    "isin, not a number": lambda b, h, q, k: torch.isin(NUMBERS[k], NUMBERS),
    "isin, wide in single": lambda b, h, q, k: torch.isin(WIDE[k], WIDE[:1].float()),
    "isin, rows": lambda b, h, q, k: torch.isin(PICKED[q], PICKED[k]).all(),
    "isin, rows in a number": lambda b, h, q, k: torch.isin(PICKED[q], 4).any(-1),
    "isin, a number in rows": lambda b, h, q, k: torch.isin(3, PICKED[k]),
    "isin, a table in a number": lambda b, h, q, k: torch.isin(FEW, q - k).any(),
    "isin, two numbers": lambda b, h, q, k: torch.isin(q, k),
    "isin by keywords": lambda b, h, q, k: torch.isin(test_elements=FEW, elements=k),
    "isin, made inside": lambda b, h, q, k: torch.isin(k, torch.tensor([3, 9])) | (q >= k),
    "isin, long": lambda b, h, q, k: torch.isin(q * k, LONG),
    "isclose": lambda b, h, q, k: torch.isclose(q, k),
    "isclose, tolerances": lambda b, h, q, k: torch.isclose(q, k, 0.25, atol=0.5),
    "isclose, none": lambda b, h, q, k: torch.isclose(NUMBERS[q], NUMBERS[k], rtol=0, atol=0),
    "isclose, wide": lambda b, h, q, k: torch.isclose(WIDE[q], WIDE[k], rtol=0.0, atol=1.0),
    "isclose, floats": lambda b, h, q, k: NUMBERS[q].isclose(NUMBERS[k]),
    "isclose, infinite": lambda b, h, q, k: NUMBERS[q].isclose(NUMBERS[k], atol=INF),
    "isclose, nan": lambda b, h, q, k: torch.isclose(NUMBERS[q], NUMBERS[k], equal_nan=True),
    "isclose, doubles": lambda b, h, q, k: torch.isclose(DOUBLES[q], DOUBLES[k] + 1e-8, rtol=1e-9),
    "isclose, halves": lambda b, h, q, k: torch.isclose(HALVES[q], HALVES[k], rtol=0.02, atol=1e-3),
    "isclose, rows": lambda b, h, q, k: torch.isclose(PICKED[q], PICKED[k], atol=1).all(),
    "searchsorted": lambda b, h, q, k: torch.searchsorted(EDGES, q - k) <= 1,
    "searchsorted, right": lambda b, h, q, k: torch.searchsorted(EDGES, q - k, right=True) > k,
    "searchsorted, a side": lambda b, h, q, k: torch.searchsorted(EDGES, q, side="right") > k,
    "searchsorted, left": lambda b, h, q, k: torch.searchsorted(EDGES, q, side="left") > k,
    "searchsorted, 32 bits": lambda b, h, q, k: (
        torch.searchsorted(EDGES, q, out_int32=True) << 30 > k
    ),
    "searchsorted, sorter": lambda b, h, q, k: torch.searchsorted(FEW, q, sorter=FEW.argsort()) > k,
    "searchsorted, a number": lambda b, h, q, k: torch.searchsorted(BY_BATCH[b], 2) * 3 == k,
    "searchsorted, row": lambda b, h, q, k: torch.searchsorted(BY_BATCH[b], q - k) == 2,
    "searchsorted, rows": lambda b, h, q, k: (
        torch.searchsorted(BY_BATCH, GRID - k, right=True).sum() > q
    ),
    "searchsorted by keywords": lambda b, h, q, k: (
        torch.searchsorted(input=q, sorted_sequence=EDGES) > k
    ),
    "searchsorted, nan": lambda b, h, q, k: torch.searchsorted(SCALE, NUMBERS[k], right=True) > q,
    "searchsorted, an index": lambda b, h, q, k: (
        PICKED[torch.searchsorted(EDGES, q), 1] == PICKED[k, 1]
    ),
    "bucketize": lambda b, h, q, k: torch.bucketize(q - k, EDGES) >= 3,
    "bucketize, right": lambda b, h, q, k: torch.bucketize(q - k, EDGES, right=True) % 2 == 0,
    "bucketize, rows": lambda b, h, q, k: torch.bucketize(PICKED[q], EDGES).sum() > k,
    "bucketize, floats": lambda b, h, q, k: (
        torch.bucketize((q - k) / 2, SCALE, out_int32=True, right=True) == 2
    ),
    "any of a table": lambda b, h, q, k: (k == FEW).any(),
    "all of a table": lambda b, h, q, k: torch.all(q - k != GRID),
    "any along a dimension": lambda b, h, q, k: (q == GRID).any(0).sum() <= k,
    "any of numbers": lambda b, h, q, k: torch.any(PICKED[k] - PICKED[q]),
    "sum of a table": lambda b, h, q, k: (q >= FEW).sum() > k // 3,
    "sum of a long table": lambda b, h, q, k: (LONG * q).sum() > k * 9000,
    "any of a long table": lambda b, h, q, k: (q * k == LONG).any(),
    "parity": lambda b, h, q, k: (k > FEW).sum() % 2 == IS_ODD[q],
}
TABLE = torch.randn(9, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BIAS = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(2, 6)
TABLE.requires_grad_()
BIAS.requires_grad_()
SCORES: dict[str, Callable[[Any, Any, Any, Any, Any], Any]] = {
    "buckets": lambda s, b, h, q, k: s + BIAS[h, torch.bucketize(q - k, EDGES)],
    "isin": lambda s, b, h, q, k: torch.where(torch.isin(k, FEW), s, s * TABLE[q, 3]),
    "isclose": lambda s, b, h, q, k: torch.where(torch.isclose(s, s + 1e-7 * k), s**2, -s),
    "a table at the pair": lambda s, b, h, q, k: torch.where(
        (q - k == FEW).any(), s * TABLE[q, k], s
    ),
    "256 numbers": lambda s, b, h, q, k: s * (TABLE[q] - TABLE[k]).pow(2).sum(-1),
    "their mean": lambda s, b, h, q, k: s + (TABLE[q] * TABLE[k]).mean(-1),
    "a product": lambda s, b, h, q, k: s * (1 + TABLE[q][:3]).prod(-1),
    "a dot": lambda s, b, h, q, k: s + torch.dot(TABLE[q], TABLE[k]),
}


def of_pairs(function: Callable[..., Any]) -> torch.Tensor:
    """Call a function of (b, h, q, k) with the indices of each pair."""
    results = [
        torch.as_tensor(function(*map(torch.tensor, pair))) for pair in product(*map(range, SHAPE))
    ]
    return torch.stack(results).reshape(SHAPE)


def value(expr: Any, captured: Any, **symbols: torch.Tensor) -> torch.Tensor:
    index = [
        torch.arange(n).reshape([-1 if i == j else 1 for j in range(4)])
        for i, n in enumerate(SHAPE)
    ]
    at = dict(zip("bhqk", index, strict=True))
    result = evaluate(expr, captured, **at, seqlen_q=ROWS, seqlen_kv=COLUMNS, **symbols)
    return result.expand(SHAPE)


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_search_tables(name: str) -> None:
    traced = trace_mask(MASKS[name])
    expected = of_pairs(MASKS[name]).bool()
    kinds = tuple([one.kind for one in traced.tables])
    for expr in (traced.expr, from_text(to_text(traced.expr), kinds)):
        assert torch.equal(value(expr, traced.captured), expected)


@pytest.mark.parametrize("name", SCORES)
def test_scores_that_search_tables_and_their_gradients(name: str) -> None:
    traced = trace_score(SCORES[name])
    s = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    s.requires_grad_()
    pairs = zip(s.flatten(), product(*map(range, SHAPE)), strict=True)
    expected = torch.stack([SCORES[name](x, *map(torch.tensor, pair)) for x, pair in pairs])
    kinds = tuple([one.kind for one in traced.tables])
    near: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
    for expr in (traced.expr, from_text(text_of(traced.expr), kinds)):
        actual = value(expr, traced.captured, s=s)
        torch.testing.assert_close(actual.flatten(), expected, **near)
    trained = [table for table in (TABLE, BIAS) if any(table is one for one in traced.captured)]
    of_s, *of_tables = torch.autograd.grad(expected.sum(), [s, *trained])
    loads = [one for one in traced.expr.loads() if one.dtype == "float64"]
    by_s, *by_load = derivatives(traced.expr, [S, *loads])
    torch.testing.assert_close(value(by_s, traced.captured, s=s.detach()).double(), of_s, **near)
    sums = {slot: torch.zeros_like(table) for slot, table in enumerate(traced.captured)}
    for element, expr in zip(loads, by_load, strict=True):
        at = tuple(value(index, traced.captured).long() for index in element.args)
        change = value(expr, traced.captured, s=s.detach()).double()
        sums[slot_of(element)].index_put_(at, change, accumulate=True)
    for table, grad in zip(trained, of_tables, strict=True):
        (slot,) = (slot for slot, one in enumerate(traced.captured) if one is table)
        torch.testing.assert_close(sums[slot], grad, **near)


REFUSED: dict[str, tuple[Callable[[Any, Any, Any, Any], Any], str]] = {
    "a large table": (
        lambda b, h, q, k: torch.searchsorted(torch.arange(257), q) > k,
        r"at most 256 elements in the tensors of torch\.searchsorted, got more; compute",
    ),
    "many pairs": (
        lambda b, h, q, k: (LONG + q == (LONG + k)[:, None, None] + FEW[:, None]).any(),
        r"at most 65536 elements in eq, got a result of shape \(256, 3, 256\)",
    ),
    "a table of other rows": (
        lambda b, h, q, k: torch.searchsorted(BY_BATCH, GRID.T + q).sum() > k,
        r"expected dimensions \(2,\) before the last",
    ),
    "another sorter": (
        lambda b, h, q, k: torch.searchsorted(FEW, q, sorter=torch.arange(4)) > k,
        r"expected a sorter of shape \(3,\), got \(4,\)",
    ),
    "opposite sides": (
        lambda b, h, q, k: torch.searchsorted(EDGES, q, side="left", right=True) > k,
        "side and right can't be set to opposites",
    ),
    "two dtypes": (lambda b, h, q, k: torch.isclose(q, k / 2), "did not match"),
    "a negative tolerance": (lambda b, h, q, k: torch.isclose(q, k, rtol=-1.0), "rtol must be"),
    "a result for a table": (lambda b, h, q, k: torch.isin(FEW, k), r"one value, got \(3,\)"),
    "by its name": (lambda b, h, q, k: torch.sinc(q) > k, r"got torch\.sinc; write"),
    "another folder": (lambda b, h, q, k: torch.special.i0(q) > k, r"got torch\.special\.i0;"),
    "an operator": (lambda b, h, q, k: q @ k, r"got torch\.Tensor\.matmul;"),
    "a module": (
        lambda b, h, q, k: torch.nn.functional.selu(q / 2) > k,
        r"got torch\.nn\.functional\.selu;",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_function(name: str) -> None:
    function, reason = REFUSED[name]
    with pytest.raises(Unsupported, match=reason):
        trace_mask(function)


def test_tables_that_are_searched_are_read_at_each_call() -> None:
    few, edges = FEW.clone(), EDGES.clone()

    def keep(b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.isin(q - k, few) | (torch.searchsorted(edges, k - q) == 3) | (k == 0)

    mask = tilegen.predicate(keep)
    q, k, v = torch.randn(3, 1, 1, 24, 16, generator=torch.Generator().manual_seed(2))
    at = torch.arange(24)
    for change in (0, 2):
        few.add_(change)
        edges.mul_(1 + change)
        kept = keep(0, 0, at[:, None], at)
        wide = (one.double() for one in (q, k, v))
        expected = functional.scaled_dot_product_attention(*wide, attn_mask=kept)
        torch.testing.assert_close(tilegen.attention(q, k, v, mask=mask), expected.float())
