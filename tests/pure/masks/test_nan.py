"""Functions that meet NaN: as PyTorch has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import tilegen
from tilegen.masks import parse_mask
from tilegen.masks.language.evaluation import evaluate

TABLE = torch.linspace(-2, 2, 400)
HOLED = torch.where(torch.arange(400) % 7 == 3, torch.nan, torch.linspace(0, 9, 400))
COUNTS = torch.arange(400) % 3
NUMBER = torch.tensor(3)


def far(q: Any, k: Any) -> Any:
    return (q - k).float()


MASKS: dict[str, Callable[[Any, Any], Any]] = {
    "not below a root": lambda q, k: ~(torch.sqrt(150.0 - q) < k),
    "not above a power": lambda q, k: ~((300.0 - q) ** 0.5 >= k / 8),
    "chosen by a logarithm": lambda q, k: torch.where(torch.log(200.0 - k) > 0, k <= q, k > q),
    "not below": lambda q, k: ~(torch.log(far(q, k)) < 0),
    "neither": lambda q, k: ~((torch.log(far(q, k)) < 0) | (torch.log(far(q, k)) >= 0)),
    "one or the other": lambda q, k: (torch.log(far(q, k)) < 2) | (torch.log(far(q, k)) >= 2),
    "no magnitude is negative": lambda q, k: torch.log(far(q, k)).abs() > -1,
    "itself": lambda q, k: torch.log(far(q, k)) == torch.log(far(q, k)),
    "another than itself": lambda q, k: torch.sqrt(far(q, k)) != torch.sqrt(far(q, k)),
    "as bools": lambda q, k: torch.logical_xor(torch.sqrt(far(q, k)), q > k),
    "equal conditions": lambda q, k: (torch.sqrt(far(q, k)) < 3) == (q < 3),
    "clamped": lambda q, k: torch.clamp(torch.log(far(q, k)), min=0) >= -1,
    "nothing by nothing": lambda q, k: ~((q - 3) / (k - 3) < 2.0301),
    "by a table": lambda q, k: ~(q / COUNTS[k] < 50),
    "by a number": lambda q, k: ~(q / (NUMBER - 3) < 50),
    "of a table": lambda q, k: ~(torch.log(TABLE[q]) < k),
    "infinity times nothing": lambda q, k: ~(torch.exp(q * 1.0) * (k % 2) < 5),
    "infinity less itself": lambda q, k: ~(torch.exp2(q * 1.0) - torch.exp2(k * 1.0) < 5),
    "kept out": lambda q, k: torch.where(q > k, torch.log(far(q, k)), 0.0) < 2,
    "never negative": lambda q, k: ~(torch.sqrt(far(q, k) ** 2) <= 5),
    "none is not larger": lambda q, k: torch.log(far(q, k)) > 1,
    "tables with NaN": lambda q, k: ~(HOLED[k] <= HOLED[q]),
    "tables with NaN by column": lambda q, k: ~(HOLED[k] < 3) & (k <= q),
    "tables with NaN either way": lambda q, k: (HOLED[k] < 3) | (HOLED[k] >= 3),
    "where a table is NaN": lambda q, k: HOLED[k] == HOLED[k],
    "chosen by tables with NaN": lambda q, k: torch.where(HOLED[k] < 3, k < q, k >= q),
    "a root squared": lambda q, k: torch.sqrt(far(q, k)) ** 2 >= -100,
    "a logarithm times 0": lambda q, k: torch.log(far(q, k)) * 0 == 0,
    "a logarithm less itself": lambda q, k: torch.log(q - 300) - torch.log(q - 300) <= k,
    "itself by itself": lambda q, k: (q - k) / (q - k) == 1,
    "far away": lambda q, k: torch.sqrt(300.0 - q) ** 2 > k,
}


@pytest.mark.parametrize("name", MASKS)
def test_nan_is_neither_larger_nor_smaller(name: str) -> None:
    fn, length = MASKS[name], 400
    expected = create_mask(lambda b, h, q, k: fn(q, k), None, None, length, length, device="cpu")[
        0, 0
    ]
    mask, index = tilegen.predicate(lambda b, h, q, k: fn(q, k)), torch.arange(length)
    actual = mask.kept(index[:, None], index[None], length, length)
    assert torch.equal(actual.expand(length, length), expected)
    opposite = (~mask).kept(index[:, None], index[None], length, length)
    assert torch.equal(opposite.expand(length, length), ~expected)
    assert parse_mask(mask.notation).notation == mask.notation


def test_scores_are_numbers_where_pytorch_has_them() -> None:
    index, s = torch.arange(12), torch.ones(12, 12)
    for function in (
        lambda s, b, h, q, k: s + torch.sqrt(far(q, k)) ** 2,
        lambda s, b, h, q, k: s / (q - k) * (q - k),
    ):
        value = value_of(tilegen.score(function), index, s)
        expected = function(s, 0, 0, index[:, None], index[None])
        assert torch.allclose(value, expected, equal_nan=True)
        assert value.isnan().any()
    score = tilegen.score(lambda s, b, h, q, k: torch.where(~(torch.log(far(q, k)) < 1), s, 0.0))
    value = value_of(score, index, s)
    assert torch.equal(value, 1.0 * ~(torch.log(far(index[:, None], index[None])) < 1))


def value_of(score: Any, index: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    zero, length = torch.tensor(0), len(index)
    pair = {"b": zero, "h": zero, "q": index[:, None], "k": index[None]}
    return evaluate(score.expression(), (), s=s, seqlen_q=length, seqlen_kv=length, **pair)
