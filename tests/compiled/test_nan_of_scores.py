"""NaN in a call whose scores change: results and gradients are NaN where PyTorch's are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilegen
from tilegen.masks.score import Score, bias, softcap

ROWS, DIM, BAD = 8, 16, 3
TABLE = torch.linspace(-1, 1, ROWS * ROWS).view(ROWS, ROWS)
SCORES: dict[str, tuple[Callable[[torch.Tensor], Score], Callable[..., torch.Tensor]]] = {
    "softcap": (lambda table: softcap(5.0), lambda s, table: 5 * torch.tanh(s / 5)),
    "bias": (bias, lambda s, table: s + table),
    "product": (
        lambda table: tilegen.score(lambda s, b, h, q, k: s * table[q, k]),
        lambda s, table: s * table,
    ),
}


def nan_rows(
    run: Callable[..., torch.Tensor], given: list[torch.Tensor], trains: bool
) -> list[torch.Tensor]:
    """Return which rows of out, dq, dk, dv and the table's gradient hold NaN."""
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    table = given[0].new_tensor(TABLE.tolist()).requires_grad_(trains)
    out = run(*leaves, table)
    reads = [*leaves, table] if trains else leaves
    grads = torch.autograd.grad(out, reads, given[3], allow_unused=True)
    return [x.isnan().any(-1) for x in (out, *grads) if x is not None]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("name", SCORES)
def test_nan_is_where_pytorch_has_it(name: str, where: str, trains: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(1, 1, ROWS, DIM, generator=generator) for _ in range(4)]
    given[["q", "k", "v", "dout"].index(where)][0, 0, BAD, 2] = float("nan")
    ours, theirs = SCORES[name]

    def kernels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> Any:
        return tilegen.attention(q, k, v, score=ours(table))

    def pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> Any:
        return theirs(q @ k.mT * DIM**-0.5, table).softmax(-1) @ v

    actual = nan_rows(kernels, given, trains)
    expected = nan_rows(pytorch, [x.double() for x in given], trains)
    assert [x.tolist() for x in actual] == [x.tolist() for x in expected]
