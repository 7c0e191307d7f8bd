"""Functions of numbers beyond arithmetic: powers, bits, and those of one float."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tilegen.errors import Unsupported
from tilegen.masks.language import expr as nodes
from tilegen.masks.language import floats, integers
from tilegen.masks.language.algebra import (
    both,
    divide,
    either,
    multiply,
    number,
    opposite,
    promoted,
    real,
)
from tilegen.masks.language.expr import ONE, Expr, const

MAX_EXPONENT = 64
"""Largest integer exponent: powers are printed as products."""
ELEMENTARY = ("exp", "log", "log1p", "tanh", "sin", "cos", "erf", "sigmoid", "sqrt")
"""Functions of one float; PyTorch has them by the same names."""


def power(base: Any, exponent: Any) -> Expr:
    """Return base ** exponent; powers of integers by natural numbers are integers. Raises
    Unsupported for an exponent that is too large, and for a base that may be negative under an
    exponent that is not a number."""
    expr, raised = number(base), number(exponent)
    value = raised.value if raised.is_const else math.inf
    if not float(2 * value).is_integer():
        return general_power(expr, raised)
    if abs(value) > MAX_EXPONENT:
        raise Unsupported(f"expected an exponent up to {MAX_EXPONENT}, got {base}**{exponent}")
    if raised.is_float or value < 0 or not expr.is_int:
        expr = promoted(expr, 1.0)[0]
    if value < 0:
        return divide(const(1.0, expr.dtype), power(expr, -value))
    whole = int(value)
    if whole != value:
        root = elementary("sqrt", expr)
        return multiply(power(expr, whole), root) if whole else root
    if whole == 0:
        return ONE if expr.is_int else const(1.0, expr.dtype)
    if whole == 1:
        return expr
    return integers.product([expr] * whole) if expr.is_int else floats.power(expr, whole)


def general_power(base: Expr, exponent: Expr) -> Expr:
    base, exponent, _ = promoted(base, exponent, 1.0)
    if base.is_const and exponent.is_const and base.value > 0:
        return const(float(base.value) ** float(exponent.value), base.dtype)
    if not exponent.is_const and not floats.is_nonnegative(base):
        raise Unsupported(
            f"expected a base that is never negative or a constant exponent, got {base}**{exponent}"
        )
    return Expr("pow", base.dtype, (base, exponent))


def sign(value: Any) -> Expr:
    """Return 1, 0 or -1 with the sign of a number, in its own dtype."""
    (expr,) = promoted(value)
    if expr.is_int:
        return integers.sign(expr)
    if expr.is_const and expr.value == expr.value:
        return const(float((expr.value > 0) - (expr.value < 0)), expr.dtype)
    if floats.is_converted(expr):
        return real(integers.sign(expr.args[0]), expr.dtype)
    return Expr("sign", expr.dtype, (expr,))


def bits(op: str, left: Any, right: Any) -> Expr:
    """Return an operation on the bits of two integers. Raises Unsupported for other numbers."""
    first, second = number(left), number(right)
    for operand in (first, second):
        if not operand.is_int:
            raise Unsupported(f"expected integers in an operation on bits, got {operand}")
    return integers.bits(op, first, second)


def elementary(name: str, value: Any) -> Expr:
    """Return a function of one float, by PyTorch's name."""
    expr = promoted(value, 1.0)[0]
    if expr.is_const and (number := _of_number(name, expr.value)) is not None:
        return const(number, expr.dtype)
    return Expr(name, expr.dtype, (expr,))


def _of_number(name: str, value: float) -> float | None:
    try:
        if name == "sigmoid":
            return 0.5 * (1 + math.tanh(value / 2))
        result: float = getattr(math, name)(value)
    except (ValueError, OverflowError):
        return None
    return result


def exclusive_or(left: Any, right: Any) -> Expr:
    """Return whether one of two conditions holds and the other fails."""
    return either(both(left, opposite(right)), both(opposite(left), right))


nodes.OPERATORS.update({"pow": power})


# --------------------------------------------------------------------------------------------------
# Their names in Triton


Name = Callable[[str], str]
"""Makes a source a statement of its own and returns its name."""

# tanh(x) = x + x z (c0 + c1 z + ...) with z = x*x, interpolated at Chebyshev's points of |x| < 0.6;
# in fp32 1.4 units in the last place, as 1 - 2 / (exp(2x) + 1) is beyond.
TANH_SMALL = 0.6
TANH_SERIES = (-0.33333330333, 0.13332915367, -0.053873948849, 0.021110959049, -0.0062691197187)


def tanh(name: Name, source: str, *, precise: bool) -> str:
    """Return the name of a hyperbolic tangent; unless `precise`, it errs by up to 1e-7 also where
    it is smaller than that."""
    x = name(source)
    if not precise:
        return name(f"1.0 - 2.0 / (tl.exp(2.0 * {x}) + 1.0)")
    square = name(f"{x} * {x}")
    size = name(f"tl.abs({x})")
    series = repr(TANH_SERIES[-1])
    for factor in reversed(TANH_SERIES[:-1]):
        series = name(f"{series} * {square} {'-' if factor < 0 else '+'} {abs(factor)!r}")
    small = name(f"{x} + {x} * {square} * {series}")
    large = name(f"1.0 - 2.0 / (tl.exp(2.0 * {size}) + 1.0)")
    signed = f"tl.where({x} < 0, -{large}, {large})"
    return name(f"tl.where({size} < {TANH_SMALL}, {small}, {signed})")


def log1p(
    name: Name, source: str, quotient: Callable[[str, str], tuple[str, int]], *, precise: bool
) -> str:
    """Return the name of log(1 + x). If `precise`, a factor puts back what 1 + x rounds away
    (Goldberg 1991, theorem 4)."""
    if not precise:
        return f"tl.log({source} + 1.0)"
    x = name(source)
    above = name(f"{x} + 1.0")
    ratio = quotient(x, f"{above} - 1.0")[0]
    plain = f"({above} == 1.0) | ({above} == float('inf'))"
    return name(f"tl.where({plain}, {x}, tl.log({above}) * ({ratio}))")
