"""Calls of tensors without elements."""

import pytest
import torch

import tilegen
from tests.compiled.test_calls import leaf
from tilegen.masks import Mask


@pytest.mark.parametrize("mask", [None, tilegen.causal(), tilegen.sliding_window(3, 3)], ids=str)
@pytest.mark.parametrize("batch, rows, columns", [(0, 8, 8), (2, 0, 8), (2, 8, 0)])
def test_empty_tensors_attend_to_nothing(
    batch: int, rows: int, columns: int, mask: Mask | None
) -> None:
    q, k, v = leaf(batch, 4, rows, 16), leaf(batch, 2, columns, 16), leaf(batch, 2, columns, 24)
    out, lse = tilegen.attention(q, k, v, mask=mask, return_lse=True)
    assert torch.equal(out, torch.zeros(batch, 4, rows, 24))
    assert torch.equal(lse, torch.full((batch, 4, rows), -torch.inf))
    for given, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert torch.equal(gradient, torch.zeros_like(given))


def test_packed_and_paged_calls_of_nothing() -> None:
    nothing, pages = torch.randn(0, 2, 16), torch.randn(4, 16, 2, 16)
    for starts in ([0], [0, 0]):
        assert tilegen.attention_varlen(nothing, nothing, nothing, torch.tensor(starts)).shape == (
            nothing.shape
        )
    for requests in (0, 2):
        q, table = torch.randn(requests, 2, 1, 16), torch.zeros(requests, 4, dtype=torch.int32)
        out = tilegen.attention_paged(q, pages, pages, table, table[:, 0])
        assert torch.equal(out, torch.zeros_like(q))
