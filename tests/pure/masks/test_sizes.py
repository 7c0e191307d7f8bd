"""Tensors of other sizes than those of a call get one error, whichever way the call takes."""

from __future__ import annotations

import pytest
import torch

import tilegen
from tests.support.inputs import BIASES, MASKS, SCORES, refused_by_attention
from tilegen.errors import InvalidProblem


@pytest.mark.parametrize("name", [*SCORES, *BIASES, *MASKS])
def test_attention_with_pytorch(name: str) -> None:
    refused_by_attention(name)


@pytest.mark.parametrize("name", [*SCORES, *BIASES])
def test_packed_sequences(name: str) -> None:
    score, said = (SCORES | BIASES)[name]
    q = torch.ones(60, 2, 16)
    with pytest.raises(InvalidProblem, match=said):
        tilegen.attention_varlen(q, q, q, torch.tensor([0, 12, 60]), score=score)


@pytest.mark.parametrize("name", MASKS)
def test_masks_within_documents(name: str) -> None:
    mask, said = MASKS[name]
    q = torch.ones(60, 2, 16)
    with pytest.raises(InvalidProblem, match=said):
        tilegen.attention_varlen(q, q, q, torch.tensor([0, 12, 60]), mask=mask)


@pytest.mark.parametrize("name", [*SCORES, *BIASES])
def test_flex_attention(name: str) -> None:
    score, said = (SCORES | BIASES)[name]
    q = torch.ones(1, 2, 48, 16)
    with pytest.raises(InvalidProblem, match=said):
        tilegen.flex_attention(q, q, q, score_mod=score)


def test_tensors_that_fit_are_accepted() -> None:
    q = torch.ones(1, 2, 48, 16)
    scores = [
        tilegen.bias(torch.ones(sizes))
        for sizes in ((48,), (1, 48), (2, 1, 48), (1, 2, 48, 1), (1, 1, 48, 48), (1, 1, 1, 1))
    ]
    slopes = torch.ones(2)
    scores += [tilegen.alibi(slopes).then(tilegen.temperature(slopes))]
    for score in scores:
        assert tilegen.attention(q, q, q, score=score).isfinite().all()
    packed = q[0].transpose(0, 1)
    bias = tilegen.bias(torch.ones(2, 1, 40, 40))  # by document: the longest has 40 tokens
    tilegen.attention_varlen(packed, packed, packed, torch.tensor([0, 40, 48]), score=bias)
    tilegen.attention(q, q, q, mask=tilegen.block_sparse(torch.ones(9, 4) > 0, 16))
