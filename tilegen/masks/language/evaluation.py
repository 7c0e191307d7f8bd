"""Evaluates masks and scores: one walk over expressions, for the pairs of the reference and of tile
lists in torch's tensors, and for whole tiles in intervals.

Integers have 64 bits; floats are single precision in masks, as in kernels, and in scores have the
precision of the score; a comparison that reads a float64 table is made in double. Floors and
remainders are Python's; an integer divided by 0 is left as it is, with remainder 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import reduce
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks.language.integers import Exact, FloorDiv, is_int, prepared
from tilegen.masks.language.nodes import ELEMENTARY, Bits, Where, ties
from tilegen.masks.language.ordered import Ordered
from tilegen.masks.language.symbols import PAIR, Lookup, S, is_condition, reads, slot_of
from tilegen.masks.language.widths import Wrapped


def evaluate(
    expr: sympy.Basic,
    captured: Sequence[torch.Tensor],
    *,
    b: torch.Tensor | int,
    h: torch.Tensor | int,
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

    def whole(value: torch.Tensor | int) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.long()
        return filled(value, torch.int64, q.device)

    pair = map(whole, (b, h, q, k, seqlen_q, seqlen_kv))
    given: dict[sympy.Symbol, Any] = dict(zip(PAIR, pair, strict=True))
    if s is not None:
        given[S] = s
    dtype = torch.float32 if s is None else s.dtype
    found = points(captured, given, q.device, dtype)(prepared(expr))
    return found if is_condition(expr) else found.to(dtype)


Domain = Mapping[Any, Callable[..., Any]]
"""The functions that compute expressions with the numbers and truths of a domain.

A node's function has its class as a key; Bits and Wrapped take the exact class first. Other keys
are names: "constant" of a tensor, "real" and "whole" to convert, "divide", "power" by a positive
integer, "root", and "read" of a table.
"""


class Walk:
    """Computes prepared expressions in a domain. Every distinct subexpression is computed once and
    kept."""

    def __init__(
        self,
        domain: Domain,
        captured: Sequence[torch.Tensor],
        known: Callable[[Any], Any],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        refined: Callable[[Any, Any], Any] = lambda _, value: value,
    ) -> None:
        """`captured[i]` is what `Lookup(t<i>, ...)` reads. `known` returns the values of symbols
        and look-ups, or None where there are none; `refined` tells of an expression and its value a
        closer one. Floats are computed in `dtype`."""
        self._do = domain
        self._captured = captured
        self._known = known
        self._device = device
        self._dtype = dtype
        self._refined = refined
        self._done: dict[sympy.Basic, Any] = {}
        self._in_double: Any = None
        self._doubles = {i for i, one in enumerate(captured) if one.dtype == torch.float64}

    def __call__(self, expr: sympy.Basic) -> Any:
        """Return the value of a prepared expression. Raises Unsupported, naming the term."""
        if expr not in self._done:
            known = self._known(expr) if isinstance(expr, sympy.Symbol | Lookup) else None
            if known is None:
                known = self._refined(expr, self._compute(expr))
            self._done[expr] = known
        return self._done[expr]

    def _compute(self, expr: Any) -> Any:
        do, number = self._do, self if is_int(expr) else self._float
        match expr:
            case sympy.Symbol():
                raise InvalidProblem(f"expected an expression without {expr}, which has no value")
            case sympy.Integer():
                return self._number(int(expr))
            case sympy.Number():
                return self._number(float(expr))
            case sympy.Add() | sympy.Mul():
                return reduce(do[expr.func], map(number, expr.args))
            case sympy.Max() | sympy.Min():
                return reduce(do[expr.func], map(number, ties(expr.args)))
            case sympy.Pow():
                return self._power(expr.base, expr.exp, number)
            case FloorDiv() | sympy.Mod():
                return do[expr.func](*map(self._integer, expr.args))
            case Bits() | Wrapped():
                kind = Bits if isinstance(expr, Bits) else Wrapped
                return do[kind](type(expr), *map(self._integer, expr.args))
            case Exact():
                return self._float(expr.args[0])
            case sympy.Abs() | sympy.sign():
                return do[expr.func](number(expr.args[0]))
            case Where():
                return do[Where](self(expr.args[0]), *map(number, expr.args[1:]))
            case sympy.And() | sympy.Or():
                return reduce(do[expr.func], map(self, expr.args))
            case sympy.Not():
                return do[sympy.Not](self(expr.args[0]))
            case _ if expr in (sympy.true, sympy.false):
                return do["constant"](torch.full((), bool(expr), device=self._device))
            case sympy.Ne():
                return do[sympy.Not](self(sympy.Eq(*expr.args, evaluate=False)))
            case sympy.Gt() | sympy.Ge():
                return self(expr.reversed)
            case Ordered() if expr.holds_for_nan:
                return do[sympy.Not](self(expr.negated))
            case Relational():
                return self._comparison(expr)
            case Lookup():
                return do["read"](self._tensor(expr), list(map(self._integer, expr.args[1:])))
            case _ if expr.func is sympy.floor or expr.func in ELEMENTARY.values():
                return do[expr.func](self._float(expr.args[0]))
            case _:
                raise Unsupported(
                    "expected arithmetic, comparisons and the functions of masks, of b, h, q, k, "
                    f"the lengths and captured tensors; got the term {expr}"
                )

    def _float(self, expr: sympy.Basic) -> Any:
        return self._do["real"](self(expr), self._dtype)

    def _integer(self, expr: sympy.Basic) -> Any:
        value = self(expr)
        # Others are floats that were rounded.
        return value if is_int(expr) else self._do["whole"](value)

    def _power(self, base: sympy.Expr, exponent: sympy.Expr, number: Callable[..., Any]) -> Any:
        if exponent.is_Integer and exponent > 0:
            return self._do["power"](number(base), int(exponent))
        if exponent.is_Rational and exponent < 0:
            below = self._power(base, -exponent, self._float)
            return self._do["divide"](self._number(1.0), below)
        if exponent == sympy.Rational(1, 2):
            return self._do["root"](self._float(base))
        raised = float(exponent) if exponent.is_Number else self._float(exponent)
        return self._do[sympy.Pow](self._float(base), raised)

    def _comparison(self, expr: Relational) -> Any:
        if self._dtype != torch.float64 and reads(expr, self._doubles):
            if self._in_double is None:
                self._in_double = copy(self)
                self._in_double._done, self._in_double._dtype = {}, torch.float64
            return self._in_double(expr)
        left, right = map(self if all(map(is_int, expr.args)) else self._float, expr.args)
        relation = expr.relation if isinstance(expr, Ordered) else type(expr)
        return self._do[relation](left, right)

    def _tensor(self, expr: Lookup) -> torch.Tensor:
        tensor = self._captured[slot_of(expr)]
        if tensor.dim() != len(expr.args) - 1:
            raise Unsupported(
                f"expected one index for each of the {tensor.dim()} dimensions of a captured "
                f"tensor, got {expr}"
            )
        return tensor

    def _number(self, value: float) -> Any:
        dtype = torch.int64 if isinstance(value, int) else self._dtype
        return self._do["constant"](filled(value, dtype, self._device))


def points(
    captured: Sequence[torch.Tensor],
    values: Mapping[sympy.Symbol, Any],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Walk:
    """Return the walk that computes tensors of the values at pairs, which broadcast; `values`
    stands for the symbols."""
    return Walk(TORCH, captured, values.get, device, dtype)


def filled(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a number as a tensor that is filled where it is: a copy onto a GPU waits for it, and
    cannot be captured in a graph."""
    return torch.full((), value, dtype=dtype, device=device)


# The first of equal arguments takes the gradient, which torch's own share; as with torch's own
# what is not a number wins.
def minimum(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the smaller of two values."""
    return torch.where((left <= right) | left.isnan(), left, right)


def maximum(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the larger of two values."""
    return torch.where((left >= right) | left.isnan(), left, right)


def wrapped(kind: type[Wrapped], value: torch.Tensor) -> torch.Tensor:
    """Return an integer as narrow ones hold it."""
    return value.to(getattr(torch, kind.element)).long()


def remainder(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute the remainder of floor division, 0 where the divisor is 0."""
    return torch.remainder(left, nonzero(right))


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


TORCH: Domain = {
    "constant": lambda value: value,
    "real": torch.Tensor.to,
    "whole": torch.Tensor.long,
    "divide": torch.div,
    "power": power,
    "root": torch.sqrt,
    "read": read,
    sympy.Add: torch.add,
    sympy.Mul: torch.mul,
    FloorDiv: floor_divide,
    sympy.Mod: remainder,
    Bits: lambda operation, left, right: operation.of(left, right),
    Wrapped: wrapped,
    sympy.Max: maximum,
    sympy.Min: minimum,
    sympy.Abs: torch.abs,
    sympy.sign: torch.sign,
    sympy.floor: torch.floor,
    sympy.Pow: torch.pow,
    Where: torch.where,
    sympy.And: torch.logical_and,
    sympy.Or: torch.logical_or,
    sympy.Not: torch.logical_not,
    sympy.Lt: torch.lt,
    sympy.Le: torch.le,
    sympy.Eq: torch.eq,
    **{node: getattr(torch, name) for name, node in ELEMENTARY.items()},
}
"""Tensors, one element for each pair."""
