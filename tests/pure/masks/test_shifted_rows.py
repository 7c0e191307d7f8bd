"""Rows shifted by -1e9, or by the least number, where PyTorch computes."""

from __future__ import annotations

import pytest
import torch

import tilegen
from tests.support.inputs import COLUMNS, DIM, ROWS, SHIFTS, expected, shifted_bias
from tilegen.masks.score import bias, sinks


@pytest.mark.parametrize("sink", [None, -1e9])
@pytest.mark.parametrize("name", SHIFTS)
def test_shifted_rows_are_means(name: str, sink: float | None) -> None:
    generator = torch.Generator().manual_seed(2)
    q, dout = torch.randn(2, 1, 2, ROWS, DIM, generator=generator)
    k, v = torch.randn(2, 1, 1, COLUMNS, DIM, generator=generator)
    made = shifted_bias(name)
    judged = expected(q, k, v, dout, bias=made, sink=sink)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, made)]
    score = bias(leaves[3])
    if sink is not None:
        score = score.then(sinks(torch.full((2,), sink)))
    out, lse = tilegen.attention(*leaves[:3], score=score, return_lse=True)
    grads = (out, lse, *torch.autograd.grad(out, leaves, dout))
    for (result, item), ours in zip(judged.items(), grads, strict=True):
        torch.testing.assert_close(
            *(ours.double(), item),
            atol=2e-5,
            rtol=2e-5,
            msg=lambda text, result=result: f"{result}: {text}",
        )


def test_the_gradient_by_lse_of_a_shifted_row_is_a_mean() -> None:
    q, k = torch.randn(2, 1, 1, 8, 8)
    q.requires_grad_()
    _, lse = tilegen.attention(q, k, k, score=lambda s, b, h, q, k: s - 1e9, return_lse=True)
    (grads,) = torch.autograd.grad(lse.sum(), q)
    mean = (k.mean(2, keepdim=True) * 8**-0.5).expand_as(q)
    torch.testing.assert_close(grads, mean, atol=1e-5, rtol=1e-5)
