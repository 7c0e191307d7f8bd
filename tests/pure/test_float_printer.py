"""Triton source of masks and scores, run with the few functions of tl it uses.

Integers divide as Triton's do. Kernels are tested elsewhere.
"""

import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import expression_trees
from tests.expression_trees import (
    B_IDX,
    H_IDX,
    HEADS,
    K_IDX,
    Q_IDX,
    SEQLEN,
    SHAPE,
    tensor,
    value_of,
)
from tilegen.masks.dense import evaluate
from tilegen.masks.derivatives import derivative
from tilegen.masks.expression import from_text, to_text
from tilegen.masks.float_printer import value_statements
from tilegen.masks.nodes import Where
from tilegen.masks.score import score
from tilegen.masks.symbols import SEQLEN_KV, SEQLEN_Q, B, H, K, Q, S


class Tile:
    """A tensor with Triton's arithmetic: int32 or fp32, `//` and `%` round towards zero."""

    def __init__(self, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(value)
        if value.dtype in (torch.int64, torch.float64):
            value = value.to(torch.int32 if value.dtype == torch.int64 else torch.float32)
        self.value = value

    def to(self, dtype: torch.dtype) -> "Tile":
        return Tile(self.value.to(dtype))

    def __floordiv__(self, other: Any) -> "Tile":
        left, right = self._integers(other)
        return Tile(torch.div(left, right, rounding_mode="trunc"))

    def __mod__(self, other: Any) -> "Tile":
        left, right = self._integers(other)
        return Tile(torch.fmod(left, right))

    def _integers(self, other: Any) -> tuple[torch.Tensor, torch.Tensor]:
        right = Tile.of(other)
        assert {self.value.dtype, right.dtype} == {torch.int32}
        return self.value, right

    @staticmethod
    def of(value: Any) -> torch.Tensor:
        return value.value if isinstance(value, Tile) else Tile(value).value


def _binary(function: Callable[..., torch.Tensor]) -> Callable[..., Tile]:
    return lambda left, right: Tile(function(Tile.of(left), Tile.of(right)))


for _name in ("add", "sub", "mul", "truediv", "lt", "le", "gt", "ge", "eq", "ne", "and", "or"):
    _torch = {"and": "logical_and", "or": "logical_or", "truediv": "div"}.get(_name, _name)
    _function = _binary(getattr(torch, _torch))
    setattr(Tile, f"__{_name}__", _function)
    setattr(Tile, f"__r{_name}__", lambda self, other, f=_function: f(other, self))
Tile.__neg__ = lambda self: Tile(-self.value)  # type: ignore[attr-defined]
Tile.__invert__ = lambda self: Tile(~self.value)  # type: ignore[attr-defined]


def _unary(function: Callable[..., torch.Tensor]) -> Any:
    def apply(value: Tile) -> Tile:
        assert value.value.dtype == torch.float32, "Triton wants a float"
        return Tile(function(value.value))

    return staticmethod(apply)


class tl:  # noqa: N801
    """What emitted statements use of triton.language."""

    float32, int32 = torch.float32, torch.int32
    exp, exp2, log, sqrt = map(_unary, (torch.exp, torch.exp2, torch.log, torch.sqrt))
    sin, cos, floor = map(_unary, (torch.sin, torch.cos, torch.floor))
    abs = staticmethod(lambda x: Tile(Tile.of(x).abs()))
    maximum, minimum = staticmethod(_binary(torch.maximum)), staticmethod(_binary(torch.minimum))

    @staticmethod
    def where(condition: Any, then: Any, otherwise: Any) -> Tile:
        assert Tile.of(condition).dtype == torch.bool
        return Tile(torch.where(Tile.of(condition), Tile.of(then), Tile.of(otherwise)))


NAMES = {Q: "q_idx", K: "k_idx", B: "batch", H: "head", S: "s"}
NAMES |= {SEQLEN_Q: "seqlen_q", SEQLEN_KV: "seqlen_kv"}


def run(
    exprs: Mapping[str, Any], captured: tuple[torch.Tensor, ...], s: torch.Tensor
) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Return the statements of expressions, and the values they leave."""

    def element(name: str, indices: list[Any], signed: list[bool]) -> Tile:
        held = captured[int(name[1:])]
        index: list[torch.Tensor] = []
        inside = torch.tensor(True)
        for size, part, may_be_negative in zip(held.shape, indices, signed, strict=True):
            at = Tile.of(part)
            assert at.dtype == torch.int32
            assert may_be_negative or bool((at >= 0).all())
            at = torch.where(at < 0, at + size, at)
            inside = inside & (at >= 0) & (at < size)
            index.append(at.clamp(0, size - 1).long())
        found = held.detach()[tuple(index)]
        return Tile(torch.where(inside, found if found.is_floating_point() else found.long(), 0))

    def lookup(name: str, indices: Any, signed: Any) -> str:
        return f"element({name!r}, [{', '.join(indices)}], {list(signed)})"

    statements = value_statements(exprs, NAMES, lookup)
    scope: dict[str, Any] = {"tl": tl, "element": element}
    values = (Q_IDX, K_IDX, B_IDX, H_IDX, s, torch.tensor(SEQLEN), torch.tensor(SEQLEN))
    scope |= {name: Tile(value) for name, value in zip(NAMES.values(), values, strict=True)}
    for name, source in statements:
        assert name not in scope, f"{name} is written twice"
        scope[name] = eval(source, scope)
    return statements, scope


@given(st.randoms(use_true_random=False), st.integers(0, 3), st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_triton_source_of_random_scores(random: Random, depth: int, seed: int) -> None:
    expr: Any = from_text(to_text(expression_trees.score(random, depth)), expression_trees.KINDS)
    keep: Any = expression_trees.condition(random, min(depth, 2))
    captured = (tensor(HEADS, 10, seed=seed), torch.arange(7) % 5 - 2, torch.arange(5) % 3 == 0)
    s = tensor(*SHAPE, seed=seed + 1).detach().float()
    exprs = {"out": expr, "change": derivative(expr, S), "keep": keep}
    statements, scope = run(exprs, captured, s)
    assert [name for name, _ in statements if name in exprs] == list(exprs)
    for name, one in exprs.items():
        found = Tile.of(scope[name]).expand(SHAPE)
        expected = value_of(one, captured, s.double()).expand(SHAPE)
        if name == "keep":
            kept = value_of(Where(one, 1, 0), captured, s.double()).expand(SHAPE) > 0
            assert torch.equal(found, kept)
            continue
        assert found.dtype == torch.float32
        # A value beside a jump may fall to its other side in fp32.
        close = torch.isclose(found.double(), expected, rtol=2e-4, atol=2e-4)
        assert close.float().mean() > 0.95


@pytest.mark.parametrize(
    "text",
    [
        "(q-k)//3",
        "(q-k)%3",
        "(q-k)//t1[q]",
        "(q-k)%t1[q]",
        "(k-q)//(-2)",
        "(q+k)//2",
        "q%4",
        "-(q%4)",
    ],
)
def test_integer_division_rounds_down(text: str) -> None:
    divisors = torch.tensor([2, -3, 1, -1, 4])
    expr: Any = from_text(text, ["float", "int"])
    captured = (tensor(3), divisors)
    statements, scope = run({"out": expr}, captured, torch.zeros(SHAPE))
    expected = value_of(expr, captured, torch.zeros(SHAPE))
    assert torch.equal(Tile.of(scope["out"]), expected)
    if text in ("(q+k)//2", "q%4"):
        assert len(statements) == 1  # provably nonnegative: as Triton divides


def test_tanh_is_right_everywhere_in_fp32() -> None:
    s = torch.cat([torch.logspace(-30, 2.5, 5000), torch.linspace(0.5, 0.7, 990)])
    s = torch.cat([s, torch.tensor([0.0, math.inf, 88.0, 89.0, 1e30, 1e-38, 0.6, 9.0, 1.0, 0.3])])
    s = torch.cat([s, -s]).reshape(-1, 1, SEQLEN, SEQLEN)
    _, scope = run({"out": sympy.tanh(S)}, (), s)
    exact = torch.tanh(s.double())
    error = ((Tile.of(scope["out"]).double() - exact) / exact).abs().nan_to_num(0)
    assert error.max() < 3 * 2.0**-23
    assert Tile.of(scope["out"]).abs().max() <= 1


def test_sigmoid_is_safe_far_out() -> None:
    s = torch.linspace(-200, 200, 25).reshape(1, 1, 5, 5)
    expr = from_text("sigmoid(s)")
    _, scope = run({"out": expr, "change": derivative(expr, S)}, (), s)
    assert torch.allclose(Tile.of(scope["out"]), torch.sigmoid(s))
    assert torch.isfinite(Tile.of(scope["change"])).all()


def test_distances_stay_exact_at_a_million() -> None:
    expr = score(lambda s, b, h, q, k: s + 0.1 * (k - q) + (q - k)).expression()
    statements = value_statements({"out": expr}, NAMES, lambda *_: "")
    far = {"q_idx": Tile(10**6 + 1), "k_idx": Tile(10**6), "s": Tile(1e-3), "tl": tl}
    ((_, source),) = statements
    assert abs(float(Tile.of(eval(source, far))) - 0.901) < 1e-6
    s = torch.tensor(1e-3)
    q, k = torch.tensor(10**6 + 1), torch.tensor(10**6)
    found = evaluate(expr, (), b=q, h=q, q=q, k=k, s=s, seqlen_q=1, seqlen_kv=1)
    assert abs(float(found) - 0.901) < 1e-6


def test_every_lookup_and_shared_value_is_one_statement() -> None:
    expr = from_text("t0[h]*s+t0[h]*tanh(s*t0[h])+t1[t2[q]]*t1[t2[q]]", ["float", "float", "int"])
    statements = value_statements(
        {"out": expr, "change": derivative(expr, S)},
        NAMES,
        lambda name, indices, signed: f"load({name}, {indices[0]}, {signed[0]})",
    )
    sources = [source for _, source in statements]
    assert len(set(sources)) == len(sources)
    text = "\n".join(sources)
    assert text.count("load(t0, head, False)") == 1
    assert text.count("load(t1, t2_0, True)") == 1
    assert text.count("load(t2, q_idx, False)") == 1
    assert text.count("tl.exp(") == 1


def test_literals_are_single_precision() -> None:
    _, scope = run({"out": from_text("where(k<q,-inf,1e300)+1e-300*s")}, (), torch.zeros(SHAPE))
    found = Tile.of(scope["out"]).expand(SHAPE)[0, 0]
    assert torch.equal(found, torch.where(K_IDX < Q_IDX, -math.inf, math.inf)[0, 0])
    statements, _ = run({"out": from_text("1e-300*s")}, (), torch.zeros(SHAPE))
    assert statements == [("out", "0.0 * s")]
