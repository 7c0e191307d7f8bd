"""Evaluates masks and scores with torch: one walk for pairs, in the reference and in tile lists,
and for the intervals of whole tiles.

Integers have 64 bits; floats are single precision in masks, as in kernels, and in scores have the
precision of the score; a comparison that reads a float64 table is made in double. Floors and
remainders are Python's; an integer divided by 0 is left as it is, with remainder 0.
"""

# SymPy is typed only in part, and where it is, too narrowly:
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportReturnType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Generic, TypeVar

import sympy
import torch
from sympy.core.relational import Relational

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks.language.integers import Exact, FloorDiv, is_int, prepared
from tilegen.masks.language.nodes import (
    MAX_SHIFT,
    BitAnd,
    BitOr,
    Bits,
    BitXor,
    Log1p,
    ShiftLeft,
    ShiftRight,
    Sigmoid,
    Where,
    ties,
)
from tilegen.masks.language.operations import is_condition
from tilegen.masks.language.symbols import (
    SEQLEN_KV,
    SEQLEN_Q,
    B,
    H,
    K,
    Lookup,
    Q,
    S,
    reads,
    slot_of,
)

_HALF = sympy.Rational(1, 2)
ELEMENTARY: dict[type, Callable[[torch.Tensor], torch.Tensor]] = {
    sympy.exp: torch.exp,
    sympy.log: torch.log,
    Log1p: torch.log1p,
    sympy.tanh: torch.tanh,
    sympy.sin: torch.sin,
    sympy.cos: torch.cos,
    sympy.erf: torch.erf,
    Sigmoid: torch.sigmoid,
}
BITS: dict[type, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    BitAnd: operator.and_,
    BitOr: operator.or_,
    BitXor: operator.xor,
    ShiftLeft: lambda left, right: left << right.clamp(0, MAX_SHIFT),
    ShiftRight: lambda left, right: left >> right.clamp(0, MAX_SHIFT),
}

Number = TypeVar("Number")
Truth = TypeVar("Truth")


def evaluate(
    expr: sympy.Basic,
    captured: Sequence[torch.Tensor],
    *,
    b: torch.Tensor,
    h: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    s: torch.Tensor | None = None,
    seqlen_q: int | torch.Tensor,
    seqlen_kv: int | torch.Tensor,
) -> torch.Tensor:
    """Return a mask (bool) or a score (dtype of `s`, else fp32) at index tensors that broadcast.

    Differentiable in `s` and in captured tensors. A negative index counts from the end; one that is
    still out of range reads 0. Raises Unsupported for a look-up of other dimensions than its
    tensor's, InvalidProblem for a score where `s` is missing.
    """
    given: dict[sympy.Symbol, Any] = {B: b.long(), H: h.long(), Q: q.long(), K: k.long()}
    if s is not None:
        given[S] = s
    for symbol, length in ((SEQLEN_Q, seqlen_q), (SEQLEN_KV, seqlen_kv)):
        given[symbol] = torch.as_tensor(length, device=q.device)
    dtype = torch.float32 if s is None else s.dtype
    points = Points(captured, given, q.device, dtype)
    found = points(prepared(expr))
    return found if is_condition(expr) else found.to(dtype)


class Evaluation(ABC, Generic[Number, Truth]):
    """Walks a prepared expression; every distinct subexpression is computed once and kept.

    What stands for a number and for a truth value, the subclass decides.
    """

    def __init__(
        self,
        captured: Sequence[torch.Tensor],
        values: Mapping[sympy.Symbol, Any],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`captured[i]` is what `Lookup(t<i>, ...)` reads; `values` stands for the symbols, and
        `dtype` is the one that floats are computed in."""
        self._captured = captured
        self._values = values
        self._device = device
        self._dtype = dtype
        self._done: dict[sympy.Basic, Any] = dict(values)
        self._in_double: Any = None
        self._doubles = {i for i, one in enumerate(captured) if one.dtype == torch.float64}

    def __call__(self, expr: sympy.Basic) -> Any:
        """Return the value of a prepared expression. Raises Unsupported, naming the term."""
        if expr not in self._done:
            self._done[expr] = self._compute(expr)
        return self._done[expr]

    def _compute(self, expr: Any) -> Any:
        number = self if is_int(expr) else self._float
        match expr:
            case sympy.Symbol():
                raise InvalidProblem(f"expected an expression without {expr}, which has no value")
            case sympy.Integer():
                return self.number(int(expr))
            case sympy.Number():
                return self.number(float(expr))
            case sympy.Add():
                return reduce(self.add, map(number, expr.args))
            case sympy.Mul():
                return reduce(self.multiply, map(number, expr.args))
            case sympy.Pow():
                return self._power(*expr.args, number)
            case FloorDiv():
                return self.floor_divide(*map(self._integer, expr.args))
            case sympy.Mod():
                return self.remainder(*map(self._integer, expr.args))
            case Bits():
                return self.bits(type(expr), *map(self._integer, expr.args))
            case Exact():
                return self._float(expr.args[0])
            case sympy.Max():
                return reduce(self.maximum, map(number, ties(expr.args)))
            case sympy.Min():
                return reduce(self.minimum, map(number, ties(expr.args)))
            case sympy.Abs():
                return self.absolute(number(expr.args[0]))
            case sympy.sign():
                return self.sign(number(expr.args[0]))
            case sympy.floor():
                return self.floor(self._float(expr.args[0]))
            case Where():
                return self.choose(self(expr.args[0]), *map(number, expr.args[1:]))
            case sympy.And():
                return reduce(self.both, map(self, expr.args))
            case sympy.Or():
                return reduce(self.either, map(self, expr.args))
            case sympy.Not():
                return self.inverse(self(expr.args[0]))
            case _ if expr in (sympy.true, sympy.false):
                return self.truth(bool(expr))
            case Relational():
                return self._comparison(expr)
            case Lookup():
                return self.lookup(self._tensor(expr), list(map(self._integer, expr.args[1:])))
            case _ if expr.func in ELEMENTARY:
                return self.function(ELEMENTARY[expr.func], self._float(expr.args[0]))
            case _:
                raise Unsupported(
                    "expected arithmetic, comparisons and the functions of masks, of b, h, q, k, "
                    f"the lengths and captured tensors; got the term {expr}"
                )

    def _float(self, expr: sympy.Basic) -> Any:
        return self.to_float(self(expr))

    def _integer(self, expr: sympy.Basic) -> Any:
        value = self(expr)
        return value if is_int(expr) else self.to_integer(value)  # of a float that was rounded

    def _power(self, base: sympy.Expr, exponent: sympy.Expr, number: Callable[..., Any]) -> Any:
        if exponent.is_Integer and exponent > 0:
            return self.power(number(base), int(exponent))
        if exponent.is_Rational and exponent < 0:
            below = self._power(base, -exponent, self._float) if exponent != -1 else None
            return self.divide(self.number(1.0), self._float(base) if below is None else below)
        if exponent == _HALF:
            return self.function(torch.sqrt, self._float(base))
        if exponent.is_Number:
            fixed = float(exponent)
            return self.function(lambda value: value**fixed, self._float(base))
        return self.general_power(self._float(base), self._float(exponent))

    def _comparison(self, expr: Relational) -> Any:
        if self._dtype != torch.float64 and reads(expr, self._doubles):
            if self._in_double is None:
                self._in_double = self.twin(torch.float64)
            return self._in_double(expr)
        left, right = map(self if all(map(is_int, expr.args)) else self._float, expr.args)
        match expr:
            case sympy.Lt():
                return self.less(left, right)
            case sympy.Le():
                return self.less_or_equal(left, right)
            case sympy.Gt():
                return self.less(right, left)
            case sympy.Ge():
                return self.less_or_equal(right, left)
            case sympy.Eq():
                return self.equal(left, right)
            case _:
                return self.inverse(self.equal(left, right))

    def _tensor(self, expr: Lookup) -> torch.Tensor:
        tensor = self._captured[slot_of(expr)]
        if tensor.dim() != len(expr.args) - 1:
            raise Unsupported(
                f"expected one index for each of the {tensor.dim()} dimensions of a captured "
                f"tensor, got {expr}"
            )
        return tensor

    def _constant(self, value: float) -> torch.Tensor:
        dtype = torch.int64 if isinstance(value, int) else self._dtype
        return torch.tensor(value, dtype=dtype, device=self._device)

    def twin(self, dtype: torch.dtype) -> Evaluation[Number, Truth]:
        """Return an evaluation of the same symbols that computes floats in another dtype."""
        return type(self)(self._captured, self._values, self._device, dtype)

    @abstractmethod
    def number(self, value: float) -> Number: ...
    @abstractmethod
    def truth(self, value: bool) -> Truth: ...
    @abstractmethod
    def to_float(self, value: Number) -> Number: ...
    @abstractmethod
    def to_integer(self, value: Number) -> Number: ...
    @abstractmethod
    def add(self, left: Number, right: Number) -> Number: ...
    @abstractmethod
    def multiply(self, left: Number, right: Number) -> Number: ...
    @abstractmethod
    def divide(self, left: Number, right: Number) -> Number: ...
    @abstractmethod
    def floor_divide(self, left: Number, right: Number) -> Number: ...
    @abstractmethod
    def remainder(self, left: Number, right: Number) -> Number: ...
    @abstractmethod
    def bits(self, operation: type[Bits], left: Number, right: Number) -> Number: ...
    @abstractmethod
    def power(self, base: Number, exponent: int) -> Number: ...
    @abstractmethod
    def general_power(self, base: Number, exponent: Number) -> Number: ...
    @abstractmethod
    def function(
        self, function: Callable[[torch.Tensor], torch.Tensor], value: Number
    ) -> Number: ...
    @abstractmethod
    def floor(self, value: Number) -> Number: ...
    @abstractmethod
    def absolute(self, value: Number) -> Number: ...
    @abstractmethod
    def sign(self, value: Number) -> Number: ...
    @abstractmethod
    def minimum(self, left: Number, right: Number) -> Number: ...
    @abstractmethod
    def maximum(self, left: Number, right: Number) -> Number: ...
    @abstractmethod
    def less(self, left: Number, right: Number) -> Truth: ...
    @abstractmethod
    def less_or_equal(self, left: Number, right: Number) -> Truth: ...
    @abstractmethod
    def equal(self, left: Number, right: Number) -> Truth: ...
    @abstractmethod
    def both(self, left: Truth, right: Truth) -> Truth: ...
    @abstractmethod
    def either(self, left: Truth, right: Truth) -> Truth: ...
    @abstractmethod
    def inverse(self, truth: Truth) -> Truth: ...
    @abstractmethod
    def choose(self, condition: Truth, left: Number, right: Number) -> Number: ...
    @abstractmethod
    def lookup(self, tensor: torch.Tensor, indices: list[Number]) -> Number: ...


class Points(Evaluation[torch.Tensor, torch.Tensor]):
    """Values of single pairs (b, h, q, k): numbers and truths are tensors that broadcast."""

    def number(self, value: float) -> torch.Tensor:
        return self._constant(value)

    def truth(self, value: bool) -> torch.Tensor:
        return torch.tensor(value, device=self._device)

    def to_float(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self._dtype)

    def to_integer(self, value: torch.Tensor) -> torch.Tensor:
        return value.long()

    add = staticmethod(torch.add)
    multiply = staticmethod(torch.mul)
    divide = staticmethod(torch.div)
    general_power = staticmethod(torch.pow)
    floor = staticmethod(torch.floor)
    absolute = staticmethod(torch.abs)
    sign = staticmethod(torch.sign)
    less = staticmethod(torch.lt)
    less_or_equal = staticmethod(torch.le)
    equal = staticmethod(torch.eq)
    both = staticmethod(torch.logical_and)
    either = staticmethod(torch.logical_or)
    inverse = staticmethod(torch.logical_not)
    choose = staticmethod(torch.where)

    def floor_divide(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return floor_divide(left, right)

    def remainder(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.remainder(left, nonzero(right))

    def bits(self, operation: type[Bits], left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return BITS[operation](left, right)

    def power(self, base: torch.Tensor, exponent: int) -> torch.Tensor:
        return power(base, exponent)

    def function(
        self, function: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor
    ) -> torch.Tensor:
        return function(value)

    # The first of equal arguments takes the gradient, which torch's own share; as with torch's own
    # what is not a number wins.
    def minimum(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.where((left <= right) | left.isnan(), left, right)

    def maximum(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.where((left >= right) | left.isnan(), left, right)

    def lookup(self, tensor: torch.Tensor, indices: list[torch.Tensor]) -> torch.Tensor:
        return read(tensor, indices)


def read(tensor: torch.Tensor, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `tensor[indices]`, integers as int64; negative indices count from the end, and 0 is
    read beyond."""
    if not tensor.is_floating_point():
        tensor = tensor.long()
    zero = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    if not tensor.numel():
        return zero
    positions: list[torch.Tensor] = []
    inside = torch.ones((), dtype=torch.bool, device=tensor.device)
    for index, size in zip(indices, tensor.shape, strict=True):
        index = index.long()
        index = torch.where(index < 0, index + size, index)
        inside = inside & (index >= 0) & (index < size)
        positions.append(index.clamp(0, size - 1))
    return torch.where(inside, tensor[tuple(positions)] if positions else tensor, zero)


def floor_divide(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the floor of a quotient of integers, `left` itself where the divisor is 0."""
    return torch.div(left, nonzero(right), rounding_mode="floor")


def power(base: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return a power by multiplication, which rounds monotonically; torch's own may not."""
    return reduce(torch.mul, [base] * exponent)


def nonzero(divisor: torch.Tensor) -> torch.Tensor:
    """Return a divisor with 1 for 0."""
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)
