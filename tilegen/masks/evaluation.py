"""Evaluates mask expressions with torch: the walk that all evaluations share, and that of pairs.

Integers have 64 bits, floating point is single precision, as in the kernels. Floors and remainders
are Python's; one by an integer 0 counts as one by 1.
"""

# SymPy is typed only in part, and where it is, too narrowly:
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportReturnType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from sympy.logic.boolalg import ITE, BooleanAtom, BooleanFunction, Equivalent, Implies, Xor

from tilegen.errors import Unsupported
from tilegen.masks.nodes import Sigmoid, Where
from tilegen.masks.symbols import Lookup

LARGEST_POWER = 8
_MIRRORED = {">": "<", ">=": "<="}
_FUNCTIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    sympy.exp: torch.exp,
    sympy.log: torch.log,
    sympy.tanh: torch.tanh,
    sympy.sin: torch.sin,
    sympy.cos: torch.cos,
    sympy.sign: torch.sign,
    Sigmoid: torch.sigmoid,
}
_TRUTHS = (BooleanFunction, BooleanAtom, Relational)


class Evaluation(ABC):
    """Walks an expression; every distinct subexpression is computed once and kept.

    What stands for a number and for a truth value, the subclass decides.
    """

    def __init__(
        self,
        captured: Sequence[torch.Tensor],
        values: Mapping[sympy.Symbol, Any],
        device: torch.device,
    ) -> None:
        """`captured[i]` is what `Lookup(t<i>, ...)` reads; `values` stands for the symbols."""
        self._captured = captured
        self._device = device
        self._done: dict[sympy.Basic, Any] = dict(values)

    def __call__(self, expr: sympy.Basic) -> Any:
        """Return the value of an expression. Raises Unsupported, naming the term."""
        if expr not in self._done:
            self._done[expr] = self._compute(expr)
        return self._done[expr]

    def _compute(self, expr: sympy.Basic) -> Any:
        arguments = expr.args
        match expr:
            case sympy.Integer():
                return self.number(int(expr))
            case sympy.Rational() | sympy.Float():
                return self.number(float(expr))
            case BooleanAtom():
                return self.truth(bool(expr))
            case sympy.Add():
                return reduce(self.add, map(self, arguments))
            case sympy.Mul():
                return self._product(expr)
            case sympy.Pow(exp=sympy.Integer(p=exponent)) if 0 < exponent <= LARGEST_POWER:
                return self.power(self(expr.base), exponent)
            case sympy.Pow(exp=sympy.Integer(p=-1)):
                return self.divide(self.number(1), self(expr.base))
            case sympy.Pow(exp=sympy.Number()):
                exponent = float(expr.exp)
                return self.function(lambda base: base.float().pow(exponent), self(expr.base))
            case sympy.floor():
                return self.floor_divide(*map(self, _fraction(arguments[0])))
            case sympy.ceiling():
                numerator, denominator = map(self, _fraction(arguments[0]))
                return self.negate(self.floor_divide(self.negate(numerator), denominator))
            case sympy.Mod():
                return self.remainder(*map(self, arguments))
            case sympy.Abs():
                return self.absolute(self(arguments[0]))
            case sympy.Min():
                return reduce(self.minimum, map(self, arguments))
            case sympy.Max():
                return reduce(self.maximum, map(self, arguments))
            case Relational():
                return self._comparison(expr)
            case sympy.And():
                return reduce(self.both, map(self, arguments))
            case sympy.Or():
                return reduce(self.either, map(self, arguments))
            case sympy.Not():
                return self.inverse(self(arguments[0]))
            case Xor() | ITE() | Equivalent() | Implies():
                return self(expr.to_nnf(simplify=False))
            case sympy.Piecewise() if arguments[-1].args[1] == sympy.true:
                value = self(arguments[-1].args[0])
                for other, condition in (case.args for case in reversed(arguments[:-1])):
                    value = self.choose(self(condition), self(other), value)
                return value
            case Where():
                return self.choose(*map(self, arguments))
            case _ if expr.func in _FUNCTIONS:
                return self.function(_FUNCTIONS[expr.func], self(arguments[0]))
            case Lookup():
                return self.lookup(self._tensor(expr), [self(index) for index in arguments[1:]])
            case _:
                raise Unsupported(
                    "expected arithmetic, comparisons and the functions of masks, of b, h, q, k, "
                    f"the lengths and captured tensors; got the term {expr}"
                )

    def _product(self, expr: sympy.Mul) -> Any:
        numerator, denominator = sympy.fraction(expr)
        if denominator == 1 or denominator.is_Integer:  # 3*q/2 is 1.5*q
            return reduce(self.multiply, map(self, expr.args))
        return self.divide(self(numerator), self(denominator))

    def _comparison(self, expr: Relational) -> Any:
        left, right = expr.args
        if isinstance(left, _TRUTHS) or isinstance(right, _TRUTHS):
            same = Equivalent(left, right)
            return self(same if expr.rel_op == "==" else sympy.Not(same))
        left, right = _without_fractions(left, right)
        operator, left, right = expr.rel_op, self(left), self(right)
        if operator in _MIRRORED:
            operator, left, right = _MIRRORED[operator], right, left
        match operator:
            case "<":
                return self.less(left, right)
            case "<=":
                return self.less_or_equal(left, right)
            case "==":
                return self.equal(left, right)
            case _:
                return self.inverse(self.equal(left, right))

    def _tensor(self, expr: Lookup) -> torch.Tensor:
        tensor = self._captured[int(expr.args[0].name[1:])]
        if tensor.dim() != len(expr.args) - 1:
            raise Unsupported(
                f"expected one index for each of the {tensor.dim()} dimensions of a captured "
                f"tensor, got {expr}"
            )
        return tensor

    def _constant(self, value: float) -> torch.Tensor:
        dtype = torch.int64 if isinstance(value, int) else torch.float32
        return torch.tensor(value, dtype=dtype, device=self._device)

    @abstractmethod
    def number(self, value: float) -> Any: ...
    @abstractmethod
    def truth(self, value: bool) -> Any: ...
    @abstractmethod
    def add(self, left: Any, right: Any) -> Any: ...
    @abstractmethod
    def negate(self, value: Any) -> Any: ...
    @abstractmethod
    def multiply(self, left: Any, right: Any) -> Any: ...
    @abstractmethod
    def divide(self, left: Any, right: Any) -> Any: ...
    @abstractmethod
    def floor_divide(self, left: Any, right: Any) -> Any: ...
    @abstractmethod
    def remainder(self, left: Any, right: Any) -> Any: ...
    @abstractmethod
    def power(self, base: Any, exponent: int) -> Any: ...
    @abstractmethod
    def function(self, function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any: ...
    @abstractmethod
    def absolute(self, value: Any) -> Any: ...
    @abstractmethod
    def minimum(self, left: Any, right: Any) -> Any: ...
    @abstractmethod
    def maximum(self, left: Any, right: Any) -> Any: ...
    @abstractmethod
    def less(self, left: Any, right: Any) -> Any: ...
    @abstractmethod
    def less_or_equal(self, left: Any, right: Any) -> Any: ...
    @abstractmethod
    def equal(self, left: Any, right: Any) -> Any: ...
    @abstractmethod
    def both(self, left: Any, right: Any) -> Any: ...
    @abstractmethod
    def either(self, left: Any, right: Any) -> Any: ...
    @abstractmethod
    def inverse(self, truth: Any) -> Any: ...
    @abstractmethod
    def choose(self, condition: Any, left: Any, right: Any) -> Any: ...
    @abstractmethod
    def lookup(self, tensor: torch.Tensor, indices: list[Any]) -> Any: ...


class Points(Evaluation):
    """Values of single pairs (b, h, q, k): numbers and truths are tensors that broadcast."""

    def number(self, value: float) -> torch.Tensor:
        return self._constant(value)

    def truth(self, value: bool) -> torch.Tensor:
        return torch.tensor(value, device=self._device)

    def add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left + right

    def negate(self, value: torch.Tensor) -> torch.Tensor:
        return -value

    def multiply(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left * right

    def divide(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left / right

    def floor_divide(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return floor_divide(left, right)

    def remainder(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.remainder(left, _nonzero(right))

    def power(self, base: torch.Tensor, exponent: int) -> torch.Tensor:
        return power(base, exponent)

    def function(
        self, function: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor
    ) -> torch.Tensor:
        return function(value)

    def absolute(self, value: torch.Tensor) -> torch.Tensor:
        return value.abs()

    def minimum(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.minimum(left, right)

    def maximum(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.maximum(left, right)

    def less(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left < right

    def less_or_equal(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left <= right

    def equal(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left == right

    def both(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left & right

    def either(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left | right

    def inverse(self, truth: torch.Tensor) -> torch.Tensor:
        return ~truth

    def choose(
        self, condition: torch.Tensor, left: torch.Tensor, right: torch.Tensor
    ) -> torch.Tensor:
        return torch.where(condition, left, right)

    def lookup(self, tensor: torch.Tensor, indices: list[torch.Tensor]) -> torch.Tensor:
        return read(tensor, indices)


def read(tensor: torch.Tensor, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `tensor[indices]` as int64 or float; negative indices count from the end, 0 is read
    beyond."""
    if not tensor.numel():
        return torch.zeros((), dtype=wide_dtype(tensor.dtype), device=tensor.device)
    positions: list[torch.Tensor] = []
    inside = torch.ones((), dtype=torch.bool, device=tensor.device)
    for index, size in zip(indices, tensor.shape, strict=True):
        index = index.long()
        index = torch.where(index < 0, index + size, index)
        inside = inside & (index >= 0) & (index < size)
        positions.append(index.clamp(0, size - 1))
    value = (tensor[tuple(positions)] if positions else tensor).to(wide_dtype(tensor.dtype))
    return torch.where(inside, value, torch.zeros_like(value))


def floor_divide(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the floor of a quotient; floating point where an operand is."""
    return torch.div(left, _nonzero(right), rounding_mode="floor")


def power(base: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return a power by multiplication, which rounds monotonically; torch's own may not."""
    return reduce(torch.mul, [base] * exponent)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that elements of a captured tensor are computed with."""
    return torch.float32 if dtype.is_floating_point else torch.int64


def _nonzero(divisor: torch.Tensor) -> torch.Tensor:
    if divisor.is_floating_point():
        return divisor
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)


@lru_cache(maxsize=1024)
def _fraction(expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    numerator, denominator = sympy.fraction(sympy.together(expr))
    return numerator, denominator


@lru_cache(maxsize=1024)
def _without_fractions(left: sympy.Expr, right: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Return what to compare instead so that rational coefficients of integers stay exact."""
    difference = left - right
    integers = all(lookup.is_integer for lookup in difference.atoms(Lookup))
    if integers and not difference.has(sympy.Float):
        numerator, denominator = _fraction(difference)
        if denominator.is_Integer and denominator > 1:
            return numerator, sympy.Integer(0)
    return left, right
