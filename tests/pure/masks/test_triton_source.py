"""Triton source of masks and scores, run with the few functions of tl it uses.

Integers divide as Triton's do. Kernels are tested elsewhere.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import expression_trees
from tests.support.expression_trees import (
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
from tilegen.masks.language.algebra import equal, less, where
from tilegen.masks.language.derivatives import derivatives
from tilegen.masks.language.evaluation import evaluate
from tilegen.masks.language.expr import SEQLEN_KV, SEQLEN_Q, B, Expr, H, K, Q, S
from tilegen.masks.language.functions import elementary
from tilegen.masks.language.loads import Loads
from tilegen.masks.language.texts import from_text, to_text
from tilegen.masks.language.triton_source import Writer
from tilegen.masks.score import score


def slope(expr: Expr, by: Expr) -> Expr:
    """Return the derivative of a score."""
    return derivatives(expr, [by])[0]


class Tile:
    """A tensor with Triton's arithmetic: numbers take 32 bits where they fit, `//` and `%` round
    towards zero."""

    def __init__(self, value: Any) -> None:
        if isinstance(value, int):
            value = torch.tensor(value, dtype=torch.int32 if -(2**31) <= value < 2**31 else None)
        elif isinstance(value, float):
            value = torch.tensor(value, dtype=torch.float32)
        self.value = torch.as_tensor(value)

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
        assert not self.value.is_floating_point()
        assert not right.is_floating_point()
        return self.value, right

    @staticmethod
    def of(value: Any) -> torch.Tensor:
        return value.value if isinstance(value, Tile) else Tile(value).value


def _binary(function: Callable[..., torch.Tensor]) -> Callable[..., Tile]:
    return lambda left, right: Tile(function(Tile.of(left), Tile.of(right)))


_BITS = {name: f"bitwise_{name}" for name in ("and", "or", "xor")}
_BITS |= {"truediv": "div"}
for _name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne", *_BITS):
    _torch = _BITS.get(_name, _name)
    _function = _binary(getattr(torch, _torch))
    setattr(Tile, f"__{_name}__", _function)
    setattr(Tile, f"__r{_name}__", lambda self, other, f=_function: f(other, self))


def _shift(function: Callable[..., torch.Tensor]) -> Callable[..., Tile]:
    def shift(value: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        bits = torch.iinfo(torch.promote_types(value.dtype, by.dtype)).bits
        assert 0 <= int(by.min()) <= int(by.max()) < bits, "LLVM leaves others undefined"
        return function(value, by)

    return _binary(shift)


Tile.__lshift__ = _shift(torch.bitwise_left_shift)  # type: ignore[attr-defined]
Tile.__rshift__ = _shift(torch.bitwise_right_shift)  # type: ignore[attr-defined]
Tile.__neg__ = lambda self: Tile(-self.value)  # type: ignore[attr-defined]
Tile.__invert__ = lambda self: Tile(~self.value)  # type: ignore[attr-defined]


def _unary(function: Callable[..., torch.Tensor]) -> Any:
    def apply(value: Tile) -> Tile:
        assert value.value.is_floating_point(), "Triton wants a float"
        return Tile(function(value.value))

    return staticmethod(apply)


class tl:  # noqa: N801
    """The parts of triton.language that emitted statements use."""

    float32, float64, int32, int64 = torch.float32, torch.float64, torch.int32, torch.int64
    exp, exp2, log, sqrt_rn = map(_unary, (torch.exp, torch.exp2, torch.log, torch.sqrt))
    sin, cos, floor, erf = map(_unary, (torch.sin, torch.cos, torch.floor, torch.erf))
    sqrt = sqrt_rn
    abs = staticmethod(lambda x: Tile(Tile.of(x).abs()))
    div_rn = staticmethod(_binary(torch.div))
    fma = staticmethod(lambda x, y, z: x * y + z)

    class PropagateNan:
        ALL = "all"

    @staticmethod
    def maximum(left: Any, right: Any, nan: str = "") -> Tile:
        return Tile(torch.maximum(Tile.of(left), Tile.of(right)))

    @staticmethod
    def minimum(left: Any, right: Any, nan: str = "") -> Tile:
        return Tile(torch.minimum(Tile.of(left), Tile.of(right)))

    @staticmethod
    def load(pointer: "Pointer", mask: Any = None, other: int = 0) -> Tile:
        at = Tile.of(pointer.at)
        if mask is None:
            return Tile(pointer.tensor.flatten()[at.long()])
        inside = torch.broadcast_to(
            Tile.of(mask), torch.broadcast_shapes(at.shape, Tile.of(mask).shape)
        )
        actual = pointer.tensor.flatten()[torch.where(inside, at, 0).long()]
        return Tile(torch.where(inside, actual, other))

    @staticmethod
    def where(condition: Any, then: Any, otherwise: Any) -> Tile:
        assert Tile.of(condition).dtype == torch.bool
        return Tile(torch.where(Tile.of(condition), Tile.of(then), Tile.of(otherwise)))


NAMES = {Q: "q_idx", K: "k_idx", B: "batch", H: "head", S: "s"}
NAMES |= {SEQLEN_Q: "seqlen_q", SEQLEN_KV: "seqlen_kv"}


@dataclass
class Pointer:
    tensor: torch.Tensor
    at: Any = 0

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.tensor, other)


def written(exprs: Mapping[str, Any], elements: Sequence[str] = ()) -> list[str]:
    """Return the statements of expressions."""
    writer = Writer(NAMES, Loads(elements, letter="t"))
    sources = writer.sources(exprs)
    return [*writer.statements, *(f"{name} = {source}" for name, source in sources.items())]


def run(
    exprs: Mapping[str, Any], captured: tuple[torch.Tensor, ...], s: torch.Tensor
) -> tuple[list[str], dict[str, Any]]:
    """Return the statements of expressions, and the values they leave."""
    tensors = [tensor.detach() for tensor in captured]
    tensors = [tensor.float() if tensor.dtype == torch.float64 else tensor for tensor in tensors]
    statements = written(exprs, [str(tensor.dtype).removeprefix("torch.") for tensor in tensors])
    values = (Q_IDX, K_IDX, B_IDX, H_IDX, s, torch.tensor(SEQLEN), torch.tensor(SEQLEN))
    scope: dict[str, Any] = {"tl": tl}
    for name, value in zip(NAMES.values(), values, strict=True):
        scope[name] = Tile(value.int() if value.dtype == torch.int64 else value.float())
    for name in ("batch", "head"):
        scope[name] = scope[name].to(torch.int64)
    for slot, table in enumerate(tensors):
        scope[f"t{slot}_ptr"] = Pointer(table)
        scope |= {f"t{slot}_n{axis}": Tile(size) for axis, size in enumerate(table.shape)}
    for statement in statements:
        name, source = statement.split(" = ", 1)
        assert name not in scope, f"{name} is written twice"
        scope[name] = eval(source, scope)
        if not isinstance(scope[name], Tile):
            scope[name] = Tile(scope[name])
    return statements, scope


@given(st.randoms(use_true_random=False), st.integers(0, 3), st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_triton_source_of_random_scores(random: Random, depth: int, seed: int) -> None:
    expr: Any = from_text(to_text(expression_trees.score(random, depth)), expression_trees.KINDS)
    keep: Any = expression_trees.condition(random, min(depth, 2))
    captured = (tensor(HEADS, 10, seed=seed), torch.arange(7) % 5 - 2, torch.arange(5) % 3 == 0)
    s = tensor(*SHAPE, seed=seed + 1).detach().float()
    exprs = {"out": expr, "change": slope(expr, S), "keep": keep}
    statements, scope = run(exprs, captured, s)
    names = [statement.split(" = ")[0] for statement in statements]
    assert [name for name in names if name in exprs] == list(exprs)
    for name, item in exprs.items():
        actual = Tile.of(scope[name]).expand(SHAPE)
        expected = value_of(item, captured, s.double()).expand(SHAPE)
        if name == "keep":
            kept = value_of(where(item, 1, 0), captured, s.double()).expand(SHAPE) > 0
            assert torch.equal(actual, kept)
            continue
        assert actual.dtype == torch.float32
        # A value beside a jump may fall to its other side in fp32.
        close = torch.isclose(actual.double(), expected, rtol=2e-4, atol=2e-4)
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


@pytest.mark.parametrize(
    "text", ["bitand(int64(0.5*k),6)", "bitxor(q,int64(0.3*k))", "shr(int64(0.5*k),q%3)"]
)
def test_bits_of_rounded_floats_are_those_of_integers(text: str) -> None:
    expr: Any = from_text(text)
    _, scope = run({"out": expr}, (), torch.zeros(SHAPE))
    actual = Tile.of(scope["out"]).expand(SHAPE)
    assert torch.equal(
        actual.double(), value_of(expr, (), torch.zeros(SHAPE)).double().expand(SHAPE)
    )


@pytest.mark.parametrize(
    "text",
    [
        *("shl(k+1,q-2)", "shr(9*q+k,q%5-2)", "shl(k,h*40)", "shr(-k,h*40)", "shr(k,q%5*10)"),
        *("q//(k-2)", "q%(k-2)", "(q-3)//(-h)", "(q-3)%(-h)", "(q-k)//h", "(q-k)%(h*b)"),
    ],
)
def test_shifts_and_divisions_of_no_meaning_are_defined(text: str) -> None:
    """Shifts by less than 0 or more bits than there are, and divisions by 0, as everywhere else."""
    expr: Any = from_text(text)
    _, scope = run({"keep": less(expr, 3), "is_2": equal(expr, 2)}, (), torch.zeros(SHAPE))
    expected = value_of(expr, (), torch.zeros(SHAPE)).expand(SHAPE)
    assert torch.equal(Tile.of(scope["keep"]).expand(SHAPE), expected < 3)
    assert torch.equal(Tile.of(scope["is_2"]).expand(SHAPE), expected == 2)


def test_tanh_is_right_everywhere_in_fp32() -> None:
    s = torch.cat([torch.logspace(-30, 2.5, 5000), torch.linspace(0.5, 0.7, 990)])
    s = torch.cat([s, torch.tensor([0.0, math.inf, 88.0, 89.0, 1e30, 1e-38, 0.6, 9.0, 1.0, 0.3])])
    s = torch.cat([s, -s]).reshape(-1, 1, SEQLEN, SEQLEN)
    _, scope = run({"out": elementary("tanh", S)}, (), s)
    exact = torch.tanh(s.double())
    error = ((Tile.of(scope["out"]).double() - exact) / exact).abs().nan_to_num(0)
    assert error.max() < 3 * 2.0**-23
    assert Tile.of(scope["out"]).abs().max() <= 1


def test_sigmoid_is_safe_far_out() -> None:
    s = torch.linspace(-200, 200, 25).reshape(1, 1, 5, 5)
    expr = from_text("sigmoid(s)")
    _, scope = run({"out": expr, "change": slope(expr, S)}, (), s)
    assert torch.allclose(Tile.of(scope["out"]), torch.sigmoid(s))
    assert torch.isfinite(Tile.of(scope["change"])).all()


def test_distances_stay_exact_at_a_million() -> None:
    expr = score(lambda s, b, h, q, k: s + 0.1 * (k - q) + (q - k)).expression()
    (statement,) = written({"out": expr})
    far = {"q_idx": Tile(10**6 + 1), "k_idx": Tile(10**6), "s": Tile(1e-3), "tl": tl}
    source = statement.removeprefix("out = ")
    assert abs(float(Tile.of(eval(source, far))) - 0.901) < 1e-6
    s = torch.tensor(1e-3)
    q, k = torch.tensor(10**6 + 1), torch.tensor(10**6)
    actual = evaluate(expr, (), b=q, h=q, q=q, k=k, s=s, seqlen_q=1, seqlen_kv=1)
    assert abs(float(actual) - 0.901) < 1e-6


def test_every_lookup_and_shared_value_is_one_statement() -> None:
    expr = from_text("t0[h]*s+t0[h]*tanh(s*t0[h])+t1[t2[q]]*t1[t2[q]]", ["float", "float", "int"])
    exprs = {"out": expr, "change": slope(expr, S)}
    statements = written(exprs, ["float32", "float32", "int32"])
    assert len(set(statements)) == len(statements)
    text = "\n".join(statements)
    assert text.count("tl.load(t0_ptr + head, mask=(head < t0_n0)") == 1
    assert text.count("tl.load(t1_ptr") == 1
    assert "tl.where(t2_q_idx < 0" in text  # it may be negative, as the others may not
    assert text.count("tl.load(t2_ptr + q_idx, ") == 1
    assert text.count("tl.exp(") == 1


def test_literals_are_single_precision() -> None:
    _, scope = run({"out": from_text("where(k<q,-inf,1e300)+1e-300*s")}, (), torch.zeros(SHAPE))
    actual = Tile.of(scope["out"]).expand(SHAPE)[0, 0]
    assert torch.equal(actual, torch.where(K_IDX < Q_IDX, -math.inf, math.inf)[0, 0])
    statements, _ = run({"out": from_text("1e-300*s")}, (), torch.zeros(SHAPE))
    assert statements == ["out = 0.0 * s"]


@pytest.mark.parametrize(
    "text", ["(k//5)*(q//3)<100", "(q//2)**2<=k*k", "bitxor(k*(q//2),t0[()])>=k", "-(q%3)*(k//2)<7"]
)
def test_integers_stay_integers(text: str) -> None:
    """Products of floors and remainders too: as floats they would be rounded past 2**24."""
    statements = written({"out": from_text(text, ["int"])}, ["int64"])
    assert "float" not in "".join(statements)
