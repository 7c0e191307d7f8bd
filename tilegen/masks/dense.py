"""Evaluates masks and scores in plain PyTorch: what kernels are compared with."""

# SymPy is typed only in part, and where it is, too narrowly:
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportReturnType=false, reportCallIssue=false, reportMatchNotExhaustive=false

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import sympy
import torch

from tilegen.errors import InvalidProblem
from tilegen.masks.integers import Exact, FloorDiv, exact, is_int
from tilegen.masks.nodes import Sigmoid, Where, normalise, ties
from tilegen.masks.operations import is_condition
from tilegen.masks.symbols import Lookup


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
    still out of range reads 0.
    """
    values = {
        "b": b,
        "h": h,
        "q": q,
        "k": k,
        "s": s,
        "seqlen_q": torch.as_tensor(seqlen_q, device=q.device),
        "seqlen_kv": torch.as_tensor(seqlen_kv, device=q.device),
    }
    evaluator = _Evaluator(values, captured, torch.float32 if s is None else s.dtype, q.device)
    prepared = exact(normalise(expr))
    result = evaluator.value(prepared)
    return result if is_condition(prepared) else result.to(evaluator.dtype)


_UNARY: dict[type, Callable[[torch.Tensor], torch.Tensor]] = {
    sympy.exp: torch.exp,
    sympy.log: torch.log,
    sympy.tanh: torch.tanh,
    sympy.sin: torch.sin,
    sympy.cos: torch.cos,
    sympy.floor: torch.floor,
    Sigmoid: torch.sigmoid,
}
_COMPARE: dict[type, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    sympy.Eq: torch.eq,
    sympy.Ne: torch.ne,
    sympy.Le: torch.le,
    sympy.Lt: torch.lt,
}


class _Evaluator:
    def __init__(
        self,
        values: dict[str, torch.Tensor | None],
        captured: Sequence[torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`dtype` is the one floats are computed in."""
        self.dtype = dtype
        self._values = values
        self._captured = captured
        self._device = device
        self._known: dict[sympy.Basic, torch.Tensor] = {}

    def value(self, expr: sympy.Basic) -> torch.Tensor:
        """Return the value of a node, computed once."""
        if expr not in self._known:
            self._known[expr] = self._compute(expr)
        return self._known[expr]

    def _float(self, expr: sympy.Basic) -> torch.Tensor:
        return self.value(expr).to(self.dtype)

    def _int(self, expr: sympy.Basic) -> torch.Tensor:
        return self.value(expr).to(torch.int64)

    def _compute(self, expr: Any) -> torch.Tensor:
        number = self._int if is_int(expr) else self._float
        match expr:
            case sympy.Symbol():
                return self._symbol(expr.name)
            case sympy.Number():
                value = int(expr) if expr.is_Integer else float(expr)
                return torch.tensor(
                    value, dtype=None if expr.is_Integer else self.dtype, device=self._device
                )
            case Lookup():
                return self._lookup(expr)
            case sympy.Add():
                return reduce(operator.add, map(number, expr.args))
            case sympy.Mul():
                return reduce(operator.mul, map(number, expr.args))
            case sympy.Pow():
                return self._power(expr, number)
            case FloorDiv():
                return torch.div(*map(self._int, expr.args), rounding_mode="floor")
            case sympy.Mod():
                return torch.remainder(*map(self._int, expr.args))
            case Exact():
                return self._float(expr.args[0])
            case sympy.Max():
                return reduce(lambda x, y: torch.where(x >= y, x, y), map(number, ties(expr.args)))
            case sympy.Min():
                return reduce(lambda x, y: torch.where(x <= y, x, y), map(number, ties(expr.args)))
            case sympy.Abs():
                return number(expr.args[0]).abs()
            case sympy.sign():
                return number(expr.args[0]).sign()
            case Where():
                return torch.where(self.value(expr.args[0]), *map(number, expr.args[1:]))
            case sympy.And():
                return reduce(operator.and_, map(self.value, expr.args))
            case sympy.Or():
                return reduce(operator.or_, map(self.value, expr.args))
            case sympy.Not():
                return ~self.value(expr.args[0])
            case _ if expr in (sympy.true, sympy.false):
                return torch.tensor(bool(expr), device=self._device)
            case _ if type(expr) in _COMPARE:
                both = self._int if all(map(is_int, expr.args)) else self._float
                return _COMPARE[type(expr)](*map(both, expr.args))
        return _UNARY[type(expr)](self._float(expr.args[0]))

    def _symbol(self, name: str) -> torch.Tensor:
        value = self._values[name]
        if value is None:
            raise InvalidProblem("expected an expression of indices only, got one of the score s")
        return value

    def _power(self, expr: sympy.Pow, number: Callable[[sympy.Basic], torch.Tensor]) -> Any:
        base, exponent = expr.args
        if exponent == sympy.Rational(1, 2):
            return self._float(base).sqrt()
        if exponent == sympy.Rational(-1, 2):
            return self._float(base).rsqrt()
        if exponent.is_Number:
            return number(base) ** (int(exponent) if exponent.is_Integer else float(exponent))
        return self._float(base) ** self._float(exponent)

    def _lookup(self, expr: Lookup) -> torch.Tensor:
        tensor = self._captured[int(expr.args[0].name[1:])]
        if tensor.ndim != len(expr.args) - 1:
            raise InvalidProblem(
                f"expected {len(expr.args) - 1} dimensions in {expr.args[0]}, got a tensor of "
                f"shape {tuple(tensor.shape)}"
            )
        inside = torch.tensor(True, device=self._device)
        index: list[torch.Tensor] = []
        for size, part in zip(tensor.shape, map(self._int, expr.args[1:]), strict=True):
            wrapped = torch.where(part < 0, part + size, part)
            inside = inside & (wrapped >= 0) & (wrapped < size)
            index.append(wrapped.clamp(0, max(size - 1, 0)))
        zero = torch.zeros((), dtype=tensor.dtype, device=self._device)
        if not tensor.numel():
            return zero.expand(inside.shape)
        found = torch.where(inside, tensor[tuple(index)] if index else tensor, zero)
        return found if tensor.is_floating_point() else found.to(torch.int64)
