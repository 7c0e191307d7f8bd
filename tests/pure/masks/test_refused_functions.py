"""Functions that cannot be traced are refused, and the operation is named."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks.tracing.trace import MAX_LEVELS, trace_mask, trace_score

DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4])
LAYOUT = torch.arange(2 * 4 * 5).reshape(2, 4, 5) % 3 == 0

REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "if": (
        lambda b, h, q, k: q >= k if h > 1 else q < k,
        r"if, and, or.*bool\(1<h\).*torch\.where",
    ),
    "and": (lambda b, h, q, k: q >= k and k > 3, r"bool\(.*torch\.where, &"),
    "if_rows": (lambda b, h, q, k: q >= k if LAYOUT[b, q] else q < k, "without if, and, or"),
    "not": (lambda b, h, q, k: not q, r"bool\(q\)"),
    "chained": (lambda b, h, q, k: 0 <= q - k <= 3, r"chained comparisons"),
    "built_in_max": (lambda b, h, q, k: max(q, k) > 3, r"torch\.maximum"),
    "range": (lambda b, h, q, k: sum(range(q)) > 3, r"range\(\)"),
    "math": (lambda b, h, q, k: math.exp(q) > k, r"float\(q\)"),
    "loop": (lambda b, h, q, k: [x for x in q][0] > 1, "loops"),  # noqa: RUF015
    "list": (lambda b, h, q, k: [1, 2, 3][q] > k, r"list indices"),
    "unknown_function": (lambda b, h, q, k: torch.lgamma(q) > 0.5, r"got torch\.lgamma"),
    "unknown_method": (lambda b, h, q, k: q.cumsum(0) > k, r"got torch\.Tensor\.cumsum"),
    "reduction": (lambda b, h, q, k: torch.max(q, dim=0) > k, "elementwise max"),
    "item": (lambda b, h, q, k: q.item() > k, "item; a captured 0-dimensional"),
    "unindexed": (lambda b, h, q, k: q == DOCUMENTS, r"one value, got \(13,\); index the tensor"),
    "too_few_indices": (lambda b, h, q, k: LAYOUT[b, q], r"expected 3 indices.*got 2"),
    "rows_compared": (lambda b, h, q, k: LAYOUT[b, q] > 3, r"expected one value, got \(\d+,\)"),
    "too_many_indices": (lambda b, h, q, k: DOCUMENTS[q, k] > 3, r"expected 1 indices.*got 2"),
    "slice": (lambda b, h, q, k: LAYOUT[b, :, k] > 3, "one index per dimension"),
    "float_index": (lambda b, h, q, k: DOCUMENTS[q / 2] > 3, r"integer index, got 0.5\*q; use //"),
    "bool_index": (lambda b, h, q, k: DOCUMENTS[q > 2] > 3, "integer index, got 2<q"),
    "bits": (
        lambda b, h, q, k: ((q / 2) & 1) == 0,
        "PyTorch has, got and of float32",
    ),
    "shift": (
        lambda b, h, q, k: ((q / 2) >> 1) == 0,
        "PyTorch has, got rshift of float",
    ),
    "number": (lambda b, h, q, k: q - k, "returns a bool, got"),
    "text": (lambda b, h, q, k: "causal", "got 'causal'"),
    "complex": (lambda b, h, q, k: (q + 1j) == k, "a number or an expression, got 1j"),
    "new_shape": (lambda b, h, q, k: q.new_ones((3,)) > k, r"shape \(\), got \(3,\)"),
    "softmax": (lambda b, h, q, k: torch.softmax(q, 0) > k, r"got torch\.softmax"),
    "float_in_place": (lambda b, h, q, k: q.div_(2) > 3, "in place to give a torch.int64"),
    "signature": (lambda b, h: b == h, r"function of \(b, h, q_idx, kv_idx\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operations_that_cannot_be_traced_are_named(name: str) -> None:
    function, message = REFUSED[name]
    error = InvalidProblem if name == "signature" else Unsupported
    with pytest.raises(error, match=message):
        trace_mask(function)


@pytest.mark.slow
@pytest.mark.parametrize("times", [MAX_LEVELS + 1, 5000])
def test_functions_of_too_many_levels_are_refused(times: int) -> None:
    def nested(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for _ in range(times):
            s = torch.tanh(s)
        return s

    with pytest.raises(Unsupported, match=rf"at most {MAX_LEVELS} operations each on .* {times};"):
        trace_score(nested)
