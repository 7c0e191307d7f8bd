"""How large integers in an expression can become: what decides between 32 and 64 bits."""

# SymPy is typed only in part, and where it is, too narrowly:
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from functools import reduce
from itertools import product
from typing import Any

import sympy

from tilegen.masks.language.integers import FloorDiv, is_int
from tilegen.masks.language.nodes import MAX_SHIFT, BitAnd, Bits, ShiftLeft, ShiftRight, Where
from tilegen.masks.language.symbols import (
    FIRST,
    LAST,
    SEQLEN_KV,
    SEQLEN_Q,
    B,
    H,
    K,
    Lookup,
    Q,
    slot_of,
)

Bounds = tuple[int, int]
"""Smallest and largest value, both inclusive."""

MAX_LENGTH = 2**28
"""Longest sequence of a call with a mask or score that computes with positions."""
INT32: Bounds = (-(2**31), 2**31 - 1)
ANYTHING: Bounds = (-(2**63), 2**63 - 1)
KNOWN: dict[sympy.Basic, Bounds] = {
    **{symbol: (0, MAX_LENGTH - 1) for symbol in (Q, K, FIRST, LAST)},
    **{symbol: (1, MAX_LENGTH) for symbol in (SEQLEN_Q, SEQLEN_KV)},
    **{symbol: (0, 2**31 - 1) for symbol in (B, H)},
}
"""Bounds of symbols."""


class Sizes:
    """What is known of the integers that a kernel computes with."""

    def __init__(self, elements: dict[sympy.Basic, Bounds], wide: set[int]) -> None:
        """`elements` bounds those of captured tensors, by name; those in `wide` slots have 64
        bits."""
        self._known: dict[sympy.Basic, Bounds] = KNOWN | elements
        self._wide = wide

    def bounds(self, expr: sympy.Basic) -> Bounds:
        """Return the bounds of an integer expression."""
        return bounds(expr, self._known)

    def is_natural(self, expr: sympy.Basic) -> bool:
        """Whether a value is surely not negative, as clipped indices are."""
        return bool(expr.is_nonnegative) or (is_int(expr) and self.bounds(expr)[0] >= 0)

    def is_positive(self, expr: sympy.Basic) -> bool:
        """Whether an integer is surely above 0."""
        return bool(expr.is_positive) or self.bounds(expr)[0] > 0

    def fits(self, expr: sympy.Basic) -> bool:
        """Whether an integer surely fits into 32 bits."""
        low, high = self.bounds(expr)
        return INT32[0] <= low and high <= INT32[1]

    def is_wide(self, expr: sympy.Basic) -> bool:
        """Whether the source of an integer has 64 bits."""
        match expr:
            case sympy.Number():
                return not self.fits(expr)
            case sympy.Symbol():
                return expr in (B, H)
            case Lookup():
                return slot_of(expr) in self._wide
            case sympy.Add() | sympy.Mul() | sympy.Pow() | ShiftLeft() if not self.fits(expr):
                return True
            case Where():
                return any(map(self.is_wide, expr.args[1:]))
            case _ if not is_int(expr):
                return True
            case _:
                return any(map(self.is_wide, expr.args))


def bounds(expr: Any, known: dict[Any, Bounds]) -> Bounds:
    """Return bounds of a prepared integer expression; `known` are those of symbols, and by name
    those of captured tensors' elements. What is found is added to it."""
    if expr not in known:
        known[expr] = _bounds(expr, known)
    return known[expr]


def _bounds(expr: Any, known: dict[Any, Bounds]) -> Bounds:
    parts = [bounds(arg, known) for arg in expr.args] if _is_arithmetic(expr) else []
    match expr:
        case sympy.Integer():
            return int(expr), int(expr)
        case Lookup():
            return known.get(expr.args[0], (0, 1) if expr.is_nonnegative else ANYTHING)
        case sympy.Add():
            return sum(low for low, _ in parts), sum(high for _, high in parts)
        case sympy.Mul():
            return reduce(_times, parts)
        case sympy.Pow(exp=sympy.Integer(p=exponent)) if exponent > 0:
            low, high = reduce(_times, [bounds(expr.base, known)] * exponent)
            return (max(0, low), high) if exponent % 2 == 0 else (low, high)
        case FloorDiv():
            return _quotient(*parts)
        case sympy.Mod():
            return _remainder(*parts)
        case sympy.Max():
            return max(low for low, _ in parts), max(high for _, high in parts)
        case sympy.Min():
            return min(low for low, _ in parts), min(high for _, high in parts)
        case sympy.Abs():
            ((low, high),) = parts
            return max(0, low, -high), max(high, -low)
        case sympy.sign():
            return -1, 1
        case Where():
            (a, b), (c, d) = (bounds(arg, known) for arg in expr.args[1:])
            return min(a, c), max(b, d)
        case Bits():
            return _bits(type(expr), *parts)
        case _:
            return (0, ANYTHING[1]) if expr.is_nonnegative else ANYTHING


def _is_arithmetic(expr: Any) -> bool:
    kinds = (sympy.Add, sympy.Mul, FloorDiv, sympy.Mod, sympy.Max, sympy.Min, sympy.Abs, Bits)
    return isinstance(expr, kinds)


def _times(left: Bounds, right: Bounds) -> Bounds:
    ends = [a * b for a, b in product(left, right)]
    return min(ends), max(ends)


def _quotient(number: Bounds, divisor: Bounds) -> Bounds:
    ends = [end for end in (*divisor, -1, 1) if divisor[0] <= end <= divisor[1] and end]
    ends += [1] if divisor[0] <= 0 <= divisor[1] else []  # a divisor 0 counts as 1
    quotients = [a // b for a, b in product(number, ends)]
    return min(quotients), max(quotients)


def _remainder(number: Bounds, divisor: Bounds) -> Bounds:
    low, high = min(0, divisor[0] + 1), max(0, divisor[1] - 1)
    if low == 0 and number[0] >= 0:
        high = min(high, number[1])
    return low, high


def _bits(operation: type[Bits], left: Bounds, right: Bounds) -> Bounds:
    if operation in (ShiftLeft, ShiftRight):
        shifts = [min(max(end, 0), MAX_SHIFT) for end in right]
        ends = [operation.of(a, b) for a, b in product(left, shifts)]
        return min(ends), max(ends)
    ones = (1 << max(abs(end) for end in (*left, *right)).bit_length()) - 1
    if left[0] >= 0 and right[0] >= 0:
        return 0, min(left[1], right[1]) if operation is BitAnd else ones
    if operation is BitAnd and max(left[0], right[0]) >= 0:
        return 0, left[1] if left[0] >= 0 else right[1]
    return -ones - 1, ones
