"""Quotients of floats that are rounded down, and their remainders, exact as PyTorch's are.

A rounded quotient may reach an integer that the quotient does not: in single precision 1 / 0.1 is
10, and 1 % 0.1 is almost 0.1. Products with the integer are compared in fp64, where those of single
precision are exact.
"""

from __future__ import annotations

import math
from typing import Any

from tilegen.masks.language import expr as nodes
from tilegen.masks.language import integers
from tilegen.masks.language.algebra import (
    absolute,
    add,
    at_most,
    both,
    divide,
    either,
    equal,
    floor,
    less,
    multiply,
    negative,
    opposite,
    promoted,
    real,
    subtract,
    where,
)
from tilegen.masks.language.expr import Expr, const
from tilegen.masks.language.floats import is_converted


def whole_quotient(left: Any, right: Any) -> Expr:
    """Return a quotient rounded down, in the dtype of the operands. An integer divided by 0 is left
    as it is; a float divided by 0 is infinite or NaN."""
    top, below = promoted(left, right)
    if top.is_int:
        return integers.floor_divide(top, below)
    plain = floor(divide(top, below))
    if plain.op != "floor":
        return plain  # of integers
    if not _is_inexact(below):
        return _nan_of_infinite(plain, top, below)
    top, below = _with_positive_divisor(top, below)
    rough = floor(divide(top, below))
    wide, by = real(top, "float64"), real(below, "float64")

    def times(quotient: Expr) -> Expr:
        return multiply(real(quotient, "float64"), by)

    above = add(rough, 1.0)
    is_over = less(wide, times(rough))
    if not (below.is_const and math.isfinite(below.value)):  # 0 times infinity is NaN
        is_over = either(is_over, both(_is_infinite(below), less(top, 0)))
    exact = where(at_most(times(above), wide), above, rough)
    return _nan_of_infinite(where(is_over, subtract(rough, 1.0), exact), top, below)


def remainder(left: Any, right: Any) -> Expr:
    """Return left modulo right, with right's sign; 0 for an integer modulo 0."""
    top, below = promoted(left, right)
    if top.is_int:
        return integers.remainder(top, below)
    if below.is_const and math.isinf(below.value):
        return _by_infinity(top, below)
    whole = whole_quotient(top, below)
    if not _is_inexact(below):
        return subtract(top, multiply(below, whole))
    wide, by, times = (real(one, "float64") for one in (top, below, whole))
    rest = real(subtract(wide, multiply(by, times)), top.dtype)
    return rest if below.is_const else where(_is_infinite(below), _by_infinity(top, below), rest)


def truncated_remainder(left: Any, right: Any) -> Expr:
    """Return the remainder of a quotient that is rounded towards zero, of floats."""
    top, below = promoted(left, right)
    size = absolute(below)
    return where(less(top, 0), negative(remainder(negative(top), size)), remainder(top, size))


def _is_inexact(below: Expr) -> bool:
    """Check whether quotients by a float are rounded: unless the float is a power of two."""
    return not (below.is_const and math.frexp(abs(below.value))[0] == 0.5)


def _with_positive_divisor(top: Expr, below: Expr) -> tuple[Expr, Expr]:
    """Return operands of the same quotient, of which the divisor is not negative."""
    if below.is_const:
        return (negative(top), negative(below)) if below.value < 0 else (top, below)
    return where(less(below, 0), negative(top), top), absolute(below)


def _nan_of_infinite(quotient: Expr, top: Expr, below: Expr) -> Expr:
    """Return a quotient, NaN where the dividend is infinite and so has no remainder. Divided by 0
    it stays infinite."""
    if is_converted(top) or top.is_const:
        return quotient
    has_none = both(_is_infinite(top), opposite(equal(below, 0)))
    return where(has_none, const(math.nan, quotient.dtype), quotient)


def _by_infinity(top: Expr, below: Expr) -> Expr:
    """Return the remainder of a division by infinity: the dividend, or infinity if the signs
    differ."""
    crosses = either(both(less(top, 0), less(0, below)), both(less(0, top), less(below, 0)))
    return add(where(crosses, below, top), multiply(0.0, top))


def _is_infinite(expr: Expr) -> Expr:
    return equal(absolute(expr), math.inf)


nodes.OPERATORS.update({"mod": remainder})
