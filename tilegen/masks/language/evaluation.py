"""Evaluates masks and scores with torch: one walk for pairs, in the reference and in tile lists,
and for the intervals of whole tiles.

Integers have 64 bits; floats are single precision in masks, as in kernels, and in scores have the
precision of the score; a comparison that reads a float64 table is made in double. Floors and
remainders are Python's; an integer divided by 0 is left as it is, with remainder 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial, reduce
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

_HALF = sympy.Rational(1, 2)
_ELEMENTARY: dict[type, Callable[[torch.Tensor], torch.Tensor]] = {
    node: getattr(torch, name) for name, node in ELEMENTARY.items()
}
_COMPARE: dict[type, Callable[..., torch.Tensor]] = {
    sympy.Lt: torch.lt,
    sympy.Le: torch.le,
    sympy.Eq: torch.eq,
}


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
    points = Points(captured, given, q.device, dtype)
    found = points(prepared(expr))
    return found if is_condition(expr) else found.to(dtype)


class Points:
    """Walks a prepared expression for pairs (b, h, q, k): numbers and truths are tensors that
    broadcast. Every distinct subexpression is computed once and kept."""

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
                return self._number(int(expr))
            case sympy.Number():
                return self._number(float(expr))
            case sympy.Add():
                return self._all(torch.add, map(number, expr.args))
            case sympy.Mul():
                return self._all(torch.mul, map(number, expr.args))
            case sympy.Pow():
                return self._power(expr.base, expr.exp, number)
            case FloorDiv():
                return self.apply(floor_divide, *map(self._integer, expr.args))
            case sympy.Mod():
                return self.apply(remainder, *map(self._integer, expr.args))
            case Bits():
                return self.apply(bits, type(expr), *map(self._integer, expr.args))
            case Wrapped():
                return self.apply(wrapped, type(expr), self._integer(expr.args[0]))
            case Exact():
                return self._float(expr.args[0])
            case sympy.Max():
                return self._all(maximum, map(number, ties(expr.args)))
            case sympy.Min():
                return self._all(minimum, map(number, ties(expr.args)))
            case sympy.Abs():
                return self.apply(torch.abs, number(expr.args[0]))
            case sympy.sign():
                return self.apply(torch.sign, number(expr.args[0]))
            case sympy.floor():
                return self.apply(torch.floor, self._float(expr.args[0]))
            case Where():
                return self.apply(torch.where, self(expr.args[0]), *map(number, expr.args[1:]))
            case sympy.And():
                return self._all(torch.logical_and, map(self, expr.args))
            case sympy.Or():
                return self._all(torch.logical_or, map(self, expr.args))
            case sympy.Not():
                return self.apply(torch.logical_not, self(expr.args[0]))
            case _ if expr in (sympy.true, sympy.false):
                return self.constant(torch.full((), bool(expr), device=self._device))
            case sympy.Ne():
                return self.apply(torch.logical_not, self(sympy.Eq(*expr.args, evaluate=False)))
            case sympy.Gt() | sympy.Ge():
                return self(expr.reversed)
            case Ordered() if expr.holds_for_nan:
                return self.apply(torch.logical_not, self(expr.negated))
            case Relational():
                return self._comparison(expr)
            case Lookup():
                return self.apply(read, self._tensor(expr), list(map(self._integer, expr.args[1:])))
            case _ if expr.func in _ELEMENTARY:
                return self.apply(_ELEMENTARY[expr.func], self._float(expr.args[0]))
            case _:
                raise Unsupported(
                    "expected arithmetic, comparisons and the functions of masks, of b, h, q, k, "
                    f"the lengths and captured tensors; got the term {expr}"
                )

    def _all(self, function: Callable[..., torch.Tensor], values: Iterable[Any]) -> Any:
        return reduce(partial(self.apply, function), values)

    def _float(self, expr: sympy.Basic) -> Any:
        return self.apply(torch.Tensor.to, self(expr), self._dtype)

    def _integer(self, expr: sympy.Basic) -> Any:
        value = self(expr)
        # Others are floats that were rounded.
        return value if is_int(expr) else self.apply(torch.Tensor.long, value)

    def _power(self, base: sympy.Expr, exponent: sympy.Expr, number: Callable[..., Any]) -> Any:
        if exponent.is_Integer and exponent > 0:
            return self.apply(power, number(base), int(exponent))
        if exponent.is_Rational and exponent < 0:
            below = self._power(base, -exponent, self._float)
            return self.apply(torch.div, self._number(1.0), below)
        if exponent == _HALF:
            return self.apply(torch.sqrt, self._float(base))
        if exponent.is_Number:
            fixed = float(exponent)
            return self.apply(lambda value: value**fixed, self._float(base))
        return self.apply(torch.pow, self._float(base), self._float(exponent))

    def _comparison(self, expr: Relational) -> Any:
        if self._dtype != torch.float64 and reads(expr, self._doubles):
            if self._in_double is None:
                self._in_double = copy(self)
                self._in_double._done, self._in_double._dtype = dict(self._values), torch.float64
            return self._in_double(expr)
        left, right = map(self if all(map(is_int, expr.args)) else self._float, expr.args)
        relation = expr.relation if isinstance(expr, Ordered) else type(expr)
        return self.apply(_COMPARE[relation], left, right)

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
        return self.constant(filled(value, dtype, self._device))

    def constant(self, value: torch.Tensor) -> Any:
        """Return the stand-in for a number or a truth that is the same everywhere."""
        return value

    def apply(self, function: Callable[..., torch.Tensor], *args: Any) -> Any:
        """Apply a function of tensors to their stand-ins."""
        return function(*args)


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


def bits(operation: type[Bits], left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Apply an operation to the bits of two integers."""
    return operation.of(left, right)


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
