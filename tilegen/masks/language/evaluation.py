"""Evaluates masks and scores: one walk over expressions, for the pairs of the reference and of tile
lists in torch's tensors, and for whole tiles in intervals.

Integers have 64 bits. float32 is single precision in masks, as in kernels, and in scores the
precision of the score. Floors and remainders are Python's; an integer divided by 0 is left as it
is, with remainder 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks.language.elements import BOUNDS
from tilegen.masks.language.expr import PAIR, Expr, S, slot_of
from tilegen.masks.language.functions import ELEMENTARY
from tilegen.masks.language.integers import BITS


def evaluate(
    expr: Expr,
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
    given: dict[Expr, Any] = dict(zip(PAIR, pair, strict=True))
    if s is not None:
        given[S] = s
    dtype = torch.float32 if s is None else s.dtype
    value: torch.Tensor = points(captured, given, q.device, dtype)(expr)
    return value if expr.is_condition else value.to(dtype)


Domain = Mapping[str, Callable[..., Any]]
"""The functions that compute expressions with the numbers and truths of a domain, by the operations
of nodes. Other keys are "constant" of a tensor, "read" of a table, "bits" and "wrap" with the name
of an operation or dtype first, "clamp_max" and "clamp_min" by a number, and "cast" to a dtype."""


class Walk:
    """Computes expressions in a domain. Every distinct subexpression is computed once and kept."""

    def __init__(
        self,
        domain: Domain,
        captured: Sequence[torch.Tensor],
        known: Callable[[Expr], Any],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`captured[i]` is what t<i> names. `known` returns the values of symbols and look-ups, or
        None where there are none. float32 is computed in `dtype`."""
        self._do = domain
        self._captured = captured
        self._known = known
        self._device = device
        self._dtypes = {"float32": dtype, "float64": torch.float64, "int64": torch.int64,
                        "float16": torch.float16, "bfloat16": torch.bfloat16}  # fmt: skip
        self._done: dict[Expr, Any] = {}

    def __call__(self, expr: Expr) -> Any:
        """Return the value of an expression. Raises Unsupported, naming the term."""
        if expr not in self._done:
            known = self._known(expr) if expr.op in ("symbol", "load") else None
            self._done[expr] = self._compute(expr) if known is None else known
        return self._done[expr]

    def _compute(self, expr: Expr) -> Any:
        do, op = self._do, expr.op
        match op:
            case "symbol":
                raise InvalidProblem(f"expected an expression without {expr}, which has no value")
            case "const":
                dtype = torch.bool if expr.is_condition else self._dtypes[expr.dtype]
                return do["constant"](filled(expr.value, dtype, self._device))
            case "load":
                value = do["read"](self._tensor(expr), [self(arg) for arg in expr.args])
                return value if expr.is_int else do["cast"](value, self._dtypes[expr.dtype])
            case "cast" if expr.dtype in BOUNDS:
                return do["wrap"](expr.dtype, self(expr.args[0]))
            case "cast":
                return do["cast"](self(expr.args[0]), self._dtypes[expr.dtype])
            case "power":
                return do[op](self(expr.args[0]), expr.value)
            case "pow" if expr.args[1].is_const:
                return do[op](self(expr.args[0]), expr.args[1].value)
            case "max" | "min":
                *others, last = expr.args
                if not last.is_const:
                    return reduce(do[op], map(self, expr.args))
                bound = do["clamp_min" if op == "max" else "clamp_max"]
                return bound(reduce(do[op], map(self, others)), self(last))
            case "add" | "mul" | "and" | "or":
                return reduce(do[op], map(self, expr.args))
            case _ if op in BITS:
                return do["bits"](op, *map(self, expr.args))
            case _:
                return do[op](*map(self, expr.args))

    def _tensor(self, load: Expr) -> torch.Tensor:
        tensor = self._captured[slot_of(load)]
        if tensor.dim() != len(load.args):
            raise Unsupported(
                f"expected one index for each of the {tensor.dim()} dimensions of a captured "
                f"tensor, got {load}"
            )
        return tensor


def points(
    captured: Sequence[torch.Tensor],
    values: Mapping[Expr, Any],
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


# At a bound an argument keeps its gradient, as in torch.clamp.
def clamp_max(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the smaller of a value and a number; NaN for NaN."""
    return torch.where((left <= right) | left.isnan(), left, right)


def clamp_min(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the larger of a value and a number; NaN for NaN."""
    return torch.where((left >= right) | left.isnan(), left, right)


def wrapped(dtype: str, value: torch.Tensor) -> torch.Tensor:
    """Return an integer as a narrow dtype holds it."""
    return value.to(getattr(torch, dtype)).long()


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


def bits_of(operation: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute an operation on the bits of integers."""
    return _BITS[operation](left, right)


def nonzero(divisor: torch.Tensor) -> torch.Tensor:
    """Return a divisor with 1 for 0."""
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)


_BITS: dict[str, Callable[..., torch.Tensor]] = {
    "bitand": torch.bitwise_and,
    "bitor": torch.bitwise_or,
    "bitxor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
}
TORCH: Domain = {
    "constant": lambda value: value,
    "cast": torch.Tensor.to,
    "wrap": wrapped,
    "read": read,
    "bits": bits_of,
    "add": torch.add,
    "neg": torch.neg,
    "mul": torch.mul,
    "div": torch.div,
    "power": power,
    "pow": torch.pow,
    "floordiv": floor_divide,
    "mod": remainder,
    "max": torch.maximum,
    "min": torch.minimum,
    "clamp_max": clamp_max,
    "clamp_min": clamp_min,
    "abs": torch.abs,
    "sign": torch.sign,
    "floor": torch.floor,
    "where": torch.where,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "lt": torch.lt,
    "le": torch.le,
    "eq": torch.eq,
    **{name: getattr(torch, name) for name in ELEMENTARY},
}
"""Tensors, one element for each pair."""
