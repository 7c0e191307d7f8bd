"""torch.compile takes calls inside of a checkpoint whose masks and scores are functions, as one
graph. Judged by dense attention in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.nn.attention.flex_attention import create_block_mask
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import tilegen

ROWS, DIM, HEADS = 40, 16, 2
TABLE = torch.arange(ROWS) % 3
BLOCKS = create_block_mask(lambda b, h, q, k: q >= k, None, None, ROWS, ROWS, device="cpu")
AT = torch.arange(ROWS)
BELOW, CLOSE = AT[:, None] >= AT, (AT[:, None] - AT).abs() < 7


def of_blocks(x: Any, slopes: Any) -> Any:
    return tilegen.flex_attention(x * 2, x, x, block_mask=BLOCKS)


def of_scores(x: Any, slopes: Any) -> Any:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s - slopes[h] * (q - k).abs() + TABLE[k]

    return tilegen.flex_attention(x * 2, x, x, score, BLOCKS)


def of_predicate(x: Any, slopes: Any) -> Any:
    mask = tilegen.predicate(lambda b, h, q, k: (q - k).abs() < 7)
    return tilegen.attention(x * 2, x, x, mask=mask & tilegen.causal())


def dense(x: torch.Tensor, slopes: torch.Tensor, call: Any) -> torch.Tensor:
    s = (x * 2) @ x.mT * DIM**-0.5
    if call is of_scores:
        s = s - slopes[:, None, None] * (AT[:, None] - AT).abs() + TABLE
    keep = BELOW & CLOSE if call is of_predicate else BELOW
    return s.masked_fill(~keep, float("-inf")).softmax(-1) @ x


CALLS = (of_blocks, of_scores, of_predicate)


def checked(run: Callable[..., Any], layers: tuple[Callable[..., Any], ...]) -> None:
    """Compare results and gradients of `run(x, slopes)` with those of dense layers."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, HEADS, ROWS, DIM, generator=generator)
    slopes, weight = torch.tensor([0.1, 0.4]), torch.randn(x.shape, generator=generator)
    results: list[Any] = []
    for function, dtype in ((run, torch.float32), (None, torch.float64)):
        leaves = [one.to(dtype).requires_grad_() for one in (x.clone(), slopes.clone())]
        out = leaves[0]
        if function is not None:
            out = function(*leaves)
        else:
            for layer in layers:
                out = dense(out, leaves[1], layer)
        loss = (out * weight).sum() + (leaves[1] * 0).sum()
        results.append((out, *torch.autograd.grad(loss, leaves)))
    for left, other in zip(*results, strict=True):
        torch.testing.assert_close(left.double(), other, atol=1e-4, rtol=1e-4)


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_checkpoint_with_a_function_is_one_graph(call: Callable[..., Any]) -> None:
    def run(x: Any, slopes: Any) -> Any:
        return checkpoint(call, x, slopes, use_reentrant=False)

    checked(torch.compile(run, backend="aot_eager", fullgraph=True), (call,))


class Doubled(TorchFunctionMode):
    """Twice the cosine."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.cos else result


@pytest.mark.slow
def test_layers_in_checkpoints_leave_other_modes_alone() -> None:
    """Neither a mode around the checkpoints, nor one entered after a graph break."""

    def run(x: Any, slopes: Any) -> Any:
        with Doubled():
            for layer in CALLS:
                x = checkpoint(layer, x, slopes, use_reentrant=False)
            x = x + torch.cos(slopes.detach()[0]) * 0.5
        torch._dynamo.graph_break()
        return x - torch.cos(slopes.detach()[0])

    checked(torch.compile(run, backend="aot_eager"), CALLS)
