"""Copies of masks and scores, in this process and in another."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilegen
from tests.pure.masks.test_trace import BIAS, DOCUMENTS
from tilegen.masks import predicate
from tilegen.masks.score import Score
from tilegen.operators.crossing import crossing

DOCUMENTS_OF_A_BATCH = DOCUMENTS[None].int()
MADE: dict[str, Callable[[], Any]] = {
    "a function": lambda: predicate(lambda b, h, q, k: q >= k),
    "a function of a tensor": lambda: predicate(lambda b, h, q, k: DOCUMENTS[q] >= DOCUMENTS[k]),
    "a function that makes a tensor": lambda: predicate(
        lambda b, h, q, k: (DOCUMENTS + 1)[q] > DOCUMENTS[k]
    ),
    "not a function": lambda: ~predicate(lambda b, h, q, k: q >= k),
    "two masks": lambda: tilegen.causal() & predicate(lambda b, h, q, k: (q - k) % 3 == 0),
    "documents": lambda: tilegen.documents(DOCUMENTS_OF_A_BATCH),
    "a tree": lambda: tilegen.tree(torch.ones(1, 1, dtype=torch.bool)),
    "a score": lambda: tilegen.score(lambda s, b, h, q, k: s + BIAS[h, q]),
    "a score that makes a tensor": lambda: tilegen.score(
        lambda s, b, h, q, k: s + (2 * BIAS)[h, q]
    ),
    "two scores": lambda: tilegen.softcap(3.0).then(tilegen.score(lambda s, b, h, q, k: s * h)),
}


@pytest.mark.parametrize("name", MADE)
def test_another_process_and_a_copy_get_the_same_kernel(name: str) -> None:
    """A copy in this process crosses into graphs of torch.compile as the original does."""
    made = MADE[name]()
    text = made.text if isinstance(made, Score) else made.stand_in.notation
    elsewhere = pickle.loads(pickle.dumps(made))
    assert (elsewhere.text if isinstance(made, Score) else elsewhere.stand_in.notation) == text
    pair = (None, made) if isinstance(made, Score) else (made, None)
    crossed, copied = (crossing(*one, None) for one in (pair, copy.deepcopy(pair)))
    assert crossed.text == copied.text
