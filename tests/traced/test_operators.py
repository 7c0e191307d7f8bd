"""The operators that calls become, and what else takes calls as they are: transforms of torch.func,
torch.export, checkpoints."""

from __future__ import annotations

import functools
import io
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import tilegen
import tilegen.operators.call  # registers the operators
from tests.support.traced import BATCH, HEADS, IDS, ROWS, WIDTH, normal, qkv
from tilegen.errors import Unsupported
from tilegen.operators.crossing import crossing

MASK = tilegen.causal() & tilegen.documents(IDS)


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["plain", "transposed", "score", "dropout"])
def test_opcheck(form: str, dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in qkv())
    bias = normal(HEADS, ROWS, ROWS).requires_grad_()
    score = (lambda s, b, h, i, j: s + bias[h, i, j]) if form == "score" else None
    crossed = crossing(MASK, score, None)
    if form == "transposed":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    drops = (0.3, torch.tensor([1, 2])) if form == "dropout" else (0.0, None)
    arguments = (q, k, v, crossed.text, crossed.tensors, 0.25, *drops)
    operator = torch.ops.tilegen.forward.default
    assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


@pytest.mark.slow
def test_opcheck_of_gradients() -> None:
    q, k, v = qkv(trained=False)
    bias = normal(HEADS, ROWS, ROWS).requires_grad_()
    crossed = crossing(MASK, lambda s, b, h, i, j: s + bias[h, i, j], None)
    tensors = [one.detach() for one in crossed.tensors]
    out, lse = torch.ops.tilegen.forward(q, k, v, crossed.text, tensors, 0.25, 0.0, None)
    dout, dlse = normal(*out.shape), normal(*lse.shape)
    arguments = (q, k, v, out, lse, dout, dlse, crossed.text, tensors, 0.25, 0.0, None)
    operator = torch.ops.tilegen.backward.default
    assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def test_operations_are_counted() -> None:
    with FlopCounterMode(display=False) as counted:
        tilegen.attention(*qkv(), mask=MASK).sum().backward()
    pairs = BATCH * HEADS * ROWS * ROWS
    assert counted.get_total_flops() == 2 * pairs * WIDTH * (2 + 5)


# --------------------------------------------------------------------------------------------------
# Transforms


def _loss(q: Any, k: Any, v: Any, bias: Any) -> Any:
    out = tilegen.attention(q, k, v, mask=MASK, score=lambda s, b, h, i, j: s + bias[h, i, j])
    return out.cos().sum()


def _given() -> tuple[torch.Tensor, ...]:
    return (*qkv(trained=False), normal(HEADS, ROWS, ROWS))


def _expected(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    trained = tuple(x.clone().requires_grad_() for x in given)
    return torch.autograd.grad(_loss(*trained), trained)


def test_grad_and_vjp() -> None:
    given = _given()
    _, pull = torch.func.vjp(_loss, *given)
    for actual in (torch.func.grad(_loss, argnums=(0, 1, 2, 3))(*given), pull(torch.ones(()))):
        for left, other in zip(actual, _expected(given), strict=True):
            torch.testing.assert_close(left, other)


def test_vmap() -> None:
    _, k, v, bias = _given()
    queries = normal(3, BATCH, HEADS, ROWS, WIDTH)
    mapped = torch.func.vmap(torch.func.grad(_loss), in_dims=(0, None, None, None))
    actual = mapped(queries, k, v, bias)
    for item, q in zip(actual, queries, strict=True):
        torch.testing.assert_close(item, _expected((q, k, v, bias))[0])


@pytest.mark.slow
def test_tensors_of_mask_and_score_are_transformed_too() -> None:
    q, k, v, bias = _given()
    grads = torch.func.grad(lambda item: _loss(q, k, v, item))(bias)
    torch.testing.assert_close(grads, _expected((q, k, v, bias))[3])

    def run(lengths: Any, ids: Any) -> Any:
        mask = tilegen.documents(ids) | tilegen.causal()
        return tilegen.attention(q, k, v, mask=mask, kv_lengths=lengths)

    given = torch.tensor([[3, 24], [10, 7]]), torch.stack([IDS, IDS // 2])
    mapped = torch.func.vmap(run)(*given)
    for item, *each in zip(mapped, *given, strict=True):
        torch.testing.assert_close(item, run(*each))


def test_bad_numbers_are_refused() -> None:
    for arguments in ({"dropout_p": 1.5}, {"scale": float("nan")}):

        def run(q: Any, k: Any, v: Any, given: Any = arguments) -> Any:
            return tilegen.attention(q, k, v, **given)

        with pytest.raises(Exception, match=r"must be a (finite )?number"):
            torch.compile(run, fullgraph=True, backend="eager")(*qkv())


def test_second_derivatives_are_refused() -> None:
    given = _given()
    with pytest.raises(Unsupported, match="first derivatives"):
        torch.func.grad(lambda q: torch.func.grad(_loss)(q, *given[1:]).sum())(given[0])


def test_make_fx() -> None:
    def run(q: Any, k: Any, v: Any) -> Any:
        return tilegen.attention(q, k, v, mask=MASK, score=tilegen.softcap(2.0))

    graph = make_fx(run)(*qkv(trained=False))
    assert any(node.target is torch.ops.tilegen.forward.default for node in graph.graph.nodes)
    torch.testing.assert_close(graph(*qkv(trained=False)), run(*qkv(trained=False)))


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.bias = torch.nn.Parameter(normal(HEADS, 2 * ROWS, 2 * ROWS))

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s + self.bias[h, i, j]

        return tilegen.attention(self.linear(q), k, v, mask=tilegen.causal(), score=score)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_layer_comes_back(strict: bool) -> None:
    layer = _Layer()
    sizes = {2: torch.export.Dim.AUTO}
    exported = torch.export.export(
        layer, qkv(trained=False), dynamic_shapes=(sizes, sizes, sizes), strict=strict
    )
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for rows in (ROWS, ROWS + 9):
        given = qkv(rows, trained=False)
        torch.testing.assert_close(loaded(*given), layer(*given))


def test_checkpoints_compute_again_or_keep() -> None:
    given = tuple(x.requires_grad_() for x in _given())
    kept: list[Any] = []

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept.append(operator)
        is_ours = operator is torch.ops.tilegen.forward.default
        return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE

    selective = functools.partial(create_selective_checkpoint_contexts, policy)
    for options in ({}, {"context_fn": selective}):
        loss = checkpoint(_loss, *given, use_reentrant=False, **options)
        for left, other in zip(torch.autograd.grad(loss, given), _expected(given), strict=True):
            torch.testing.assert_close(left, other)
    assert torch.ops.tilegen.forward.default in kept
