"""Tensors of subclasses: PyTorch's causal biases, and classes with functions of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as of_torch

import tilegen
from tests.pure.calls.test_no_such_argument import CALLS, called
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.integrations.sdpa import everywhere

Bias = Callable[[int, int], CausalBias]
ATTENTION = tilegen.scaled_dot_product_attention
BIASES = pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])


class Own(torch.Tensor):
    """A class whose elements are not those in memory: twice as large."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN206
        if func is of_torch:
            return torch.full((1,), 7.0)
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(torch.Tensor):
    """A class without functions of its own."""


def qkv(rows: int = 5, columns: int = 9) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    return [torch.randn(1, 2, size, 16, requires_grad=True) for size in (rows, columns, columns)]


@BIASES
@pytest.mark.parametrize("lengths", [(5, 9), (9, 9), (1, 9)])
def test_causal_biases_are_causal_masks(bias: Bias, lengths: tuple[int, int]) -> None:
    given, mask = qkv(*lengths), bias(*lengths)
    expected = of_torch(*given, mask._materialize())
    weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    with everywhere():
        inside = of_torch(*given, attn_mask=mask)
    for out in (ATTENTION(*given, mask), inside):
        for left, other in zip(
            (out, *torch.autograd.grad(out, given, weights)),
            (expected, *torch.autograd.grad(expected, given, weights, retain_graph=True)),
            strict=True,
        ):
            torch.testing.assert_close(left, other, atol=2e-5, rtol=2e-5)


@pytest.mark.slow
@BIASES
def test_causal_biases_compile(bias: Bias) -> None:
    given, mask = qkv(), bias(5, 9)
    expected = of_torch(*given, mask._materialize())

    def inside(*given: Any) -> torch.Tensor:
        with everywhere():
            return of_torch(*given)

    for run in (ATTENTION, inside):
        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*given, mask), expected, atol=2e-5, rtol=2e-5)


def test_causal_biases_of_other_lengths() -> None:
    """PyTorch ignores the lengths of an upper left corner."""
    given = qkv()
    out = ATTENTION(*given, causal_upper_left(64, 64))
    torch.testing.assert_close(out, of_torch(*given, is_causal=True), atol=2e-5, rtol=2e-5)
    with pytest.raises(InvalidProblem, match=r"broadcast to \(5, 9\), got \(5, 7\)"):
        ATTENTION(*given, causal_lower_right(5, 7))


ARGUMENTS = [
    (name, argument)
    for name, (_, given) in CALLS.items()
    for argument, x in given.items()
    if isinstance(x, torch.Tensor)
]
OPTIONAL: dict[tuple[str, str], torch.Tensor] = {
    ("attention", "kv_lengths"): torch.tensor([3, 4]),
    ("flash", "alibi_slopes"): torch.ones(4),
    ("paged", "out"): torch.empty(2, 8, 4, 16),
    ("sdpa", "attn_mask"): torch.zeros(4, 4),
    ("varlen", "cu_seqlens_kv"): torch.tensor([0, 8]),
}


@pytest.mark.parametrize("name, argument", [*ARGUMENTS, *OPTIONAL])
def test_classes_with_functions_of_their_own_are_refused(name: str, argument: str) -> None:
    known = OPTIONAL.get((name, argument))
    given = CALLS[name][1][argument] if known is None else known
    with pytest.raises(Unsupported, match=f"(^{argument}|^kv_lengths) must be.* Own, whose"):
        called(name, **{argument: given.clone().as_subclass(Own)})


@pytest.mark.parametrize(
    "changes",
    [
        lambda x: dict(mask=tilegen.kv_lengths(x[:1].long())),
        lambda x: dict(mask=tilegen.predicate(lambda b, h, q, k: x[q] <= k)),
        lambda x: dict(score=tilegen.sinks(x[:2])),
        lambda x: dict(score=tilegen.alibi(x[:2])),
        lambda x: dict(score=lambda s, b, h, q, k: s + x[q]),
    ],
)
@pytest.mark.parametrize("compiles", [False, True])
def test_masks_and_scores_of_them_are_refused(
    changes: Callable[[torch.Tensor], dict[str, Any]], compiles: bool
) -> None:
    def run(q: Any, k: Any, v: Any, x: Any) -> torch.Tensor:
        return tilegen.attention(q, k, v, **changes(x))

    torch._dynamo.reset()
    run = torch.compile(run, fullgraph=True, backend="eager") if compiles else run
    run(*qkv(), torch.ones(9))
    with pytest.raises(Exception, match="must be a plain tensor, got Own, whose __torch_function"):
        run(*qkv(), torch.ones(9).as_subclass(Own))


def test_everywhere_leaves_them_to_torch() -> None:
    q, k, v = qkv()
    bias = torch.zeros(5, 9).as_subclass(Own)
    with torch.no_grad(), everywhere():
        for given in ((q, k, v, bias), (q.as_subclass(Own), k, v)):
            assert of_torch(*given).tolist() == [7.0]


def test_other_classes_go_on() -> None:
    q, k, v = qkv()
    slopes = torch.nn.Parameter(torch.ones(2))
    expected = tilegen.attention(q, k, v, score=tilegen.alibi(slopes))
    for make in (torch.nn.Parameter, lambda x: x.as_subclass(Plain), torch.clone):
        torch.testing.assert_close(
            tilegen.attention(*map(make, (q, k, v)), score=tilegen.alibi(slopes)), expected
        )
        with torch.device("cpu"):  # a mode, under which every tensor seems to override functions
            out = tilegen.attention(q, *map(make, (k, v)), score=tilegen.alibi(slopes))
        torch.testing.assert_close(out, expected)
    compiled = torch.compile(tilegen.attention, fullgraph=True, backend="eager")
    for make in (torch.nn.Parameter, lambda x: x.as_subclass(Plain)):
        out = compiled(*map(make, (q, k, v)), score=tilegen.alibi(make(slopes)))
        torch.testing.assert_close(out, expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = tilegen.attention(*map(mode.from_tensor, (q, k, v)), mask=tilegen.causal())
    assert out.shape == q.shape


def test_strided_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 16), torch.randn(2, 5, 16)])
    tokens = torch.nested.nested_tensor([torch.randn(4, 16)] * 3)
    with pytest.raises(RuntimeError, match=r"q must be a jagged.* got Tensor .torch.strided"):
        tilegen.attention(nested, nested, nested)
    doors = {"attention": "k", "flex": "query", "sdpa": "key", "flash": "k"}
    for name, argument in doors.items():
        with pytest.raises(RuntimeError, match=f"{argument} .*(nested|Tensor .torch.strided)"):
            called(name, **{argument: nested})
    with pytest.raises(RuntimeError, match="q must be a dense tensor, got a nested tensor"):
        called("varlen", q=tokens)
