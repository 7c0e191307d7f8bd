"""Functions that meet what is not a number: refused where their expression says something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilegen
from tilegen.errors import Unsupported

PAIRS = torch.arange(12)
TABLE = torch.linspace(-2, 2, 12)


def far(q: Any, k: Any) -> Any:
    return (q - k).float()


REFUSED: dict[str, Callable[..., Any]] = {
    "not below": lambda b, h, q, k: ~(torch.log(far(q, k)) < 0),
    "a root squared": lambda b, h, q, k: torch.sqrt(far(q, k)) ** 2 >= -100,
    "no magnitude is negative": lambda b, h, q, k: torch.log(far(q, k)).abs() > -1,
    "nothing times none": lambda b, h, q, k: torch.log(far(q, k)) * 0 == 0,
    "itself": lambda b, h, q, k: torch.log(far(q, k)) == torch.log(far(q, k)),
    "clamped": lambda b, h, q, k: torch.clamp(torch.log(far(q, k)), min=0) >= -1,
    "nothing by nothing": lambda b, h, q, k: (q - k) / (q - k) == 1,
    "of a table": lambda b, h, q, k: ~(torch.log(TABLE[q]) < k),
}
TAKEN: dict[str, Callable[..., Any]] = {
    "kept out": lambda b, h, q, k: torch.where(q > k, torch.log(far(q, k)), 0.0) < 2,
    "never negative": lambda b, h, q, k: torch.sqrt(far(q, k) ** 2) <= 5,
    "never zero": lambda b, h, q, k: q / (k + 1) < 2,
    "none is not larger": lambda b, h, q, k: torch.log(far(q, k)) > 1,
    "a root": lambda b, h, q, k: (q - k) ** 0.5 > 1,
    "of a table": lambda b, h, q, k: torch.log(TABLE[q]) < k - 5,
}


@pytest.mark.parametrize("name", REFUSED)
def test_masks_that_would_differ_are_refused(name: str) -> None:
    with pytest.raises(Unsupported, match="PyTorch meets one that is none") as raised:
        tilegen.predicate(REFUSED[name])
    assert "clamp what is divided by" in str(raised.value)


@pytest.mark.parametrize("name", TAKEN)
def test_masks_that_say_the_same_are_taken(name: str) -> None:
    """What is not a number is neither larger nor smaller than anything."""
    q, k = PAIRS[:, None], PAIRS[None]
    expected = TAKEN[name](0, 0, q, k)
    mask = tilegen.predicate(TAKEN[name])
    assert torch.equal(torch.as_tensor(mask.keep(q, k, 12, 12)).expand(12, 12), expected)


def test_scores_are_numbers_where_pytorch_has_them() -> None:
    for function in (
        lambda s, b, h, q, k: s + torch.sqrt(far(q, k)) ** 2,
        lambda s, b, h, q, k: s / (q - k) * (q - k),
    ):
        with pytest.raises(Unsupported, match="at q_idx 0 and kv_idx"):
            tilegen.score(function)
    assert tilegen.score(lambda s, b, h, q, k: s + torch.log(far(q, k))).text == "log(q-k)+s"


def test_functions_that_take_no_single_pair_are_not_tried() -> None:
    short = torch.arange(1, 4) / 2
    mask = tilegen.predicate(lambda b, h, q, k: torch.log(short[q]) < k)
    q, k = PAIRS[:3, None], PAIRS[None]
    assert torch.equal(torch.as_tensor(mask.keep(q, k, 3, 12)), torch.log(short)[:, None] < k)
