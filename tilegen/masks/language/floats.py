"""Floats in expressions, computed in the order in which they are written. What is simplified
changes no bit but the sign of zero. All arguments are floats of one dtype already."""

from __future__ import annotations

import math

import numpy as np

from tilegen.masks.language import integers
from tilegen.masks.language.bounds import bounded
from tilegen.masks.language.expr import Expr, const


def rounded(value: float, dtype: str) -> float:
    """Return a number as a float of 16 bits holds it; others keep the digits they are written
    with."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return float(np.float16(value))
    if dtype != "bfloat16" or not math.isfinite(value):
        return value
    bits = int(np.float32(value).view(np.uint32))  # to the nearest upper half, ties to even
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))


def is_converted(expr: Expr) -> bool:
    """Return whether a float is an integer that was converted, perhaps rounded."""
    return expr.op == "cast" and expr.args[0].is_int


def add(left: Expr, right: Expr) -> Expr:
    """Return a sum."""
    if left.is_const and right.is_const:
        return _folded("add", left, right)
    if _is_zero(left) or _is_zero(right):
        return right if _is_zero(left) else left
    if has_sign(left) and has_sign(right):
        return negative(add(negative(left), negative(right)))
    parts = sorted(
        (left, right), key=lambda one: (one.is_const, one.op != "add", _unsigned(one).key)
    )
    return Expr("add", left.dtype, tuple(parts))


def negative(expr: Expr) -> Expr:
    """Return a float with the other sign."""
    if expr.is_const:
        return const(-expr.value, expr.dtype)
    if is_converted(expr):
        return Expr("cast", expr.dtype, (integers.negative(expr.args[0]),))
    return expr.args[0] if expr.op == "neg" else Expr("neg", expr.dtype, (expr,))


def has_sign(expr: Expr) -> bool:
    """Return whether a float is written with a minus."""
    return expr.op == "neg" or (expr.is_const and expr.value < 0)


def _unsigned(expr: Expr) -> Expr:
    return expr.args[0] if expr.op == "neg" else expr


def _is_zero(expr: Expr) -> bool:
    return bool(expr.is_const and expr.value == 0)


def _is_power_of_two(value: float) -> bool:
    return math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5


def multiply(left: Expr, right: Expr) -> Expr:
    """Return a product."""
    if left.is_const and right.is_const:
        return _folded("mul", left, right)
    if has_sign(left) or has_sign(right):
        size = multiply(*(negative(one) if has_sign(one) else one for one in (left, right)))
        return size if has_sign(left) and has_sign(right) else negative(size)
    if right.is_const:
        left, right = right, left
    if left.is_const:
        if left.value == 1:
            return right
        inner = right.args[0] if right.op == "mul" else left
        is_exact = any(_is_power_of_two(one.value) for one in (left, inner) if one.is_const)
        if right.op == "mul" and inner.is_const and is_exact:
            return multiply(_folded("mul", left, inner), right.args[1])
        return Expr("mul", right.dtype, (left, right))
    if left is right:
        return power(left, 2)
    parts = sorted((left, right), key=lambda one: (one.op != "mul", one.key))
    return Expr("mul", left.dtype, tuple(parts))


def divide(top: Expr, below: Expr) -> Expr:
    """Return a quotient."""
    if top.is_const and below.is_const and below.value != 0:
        return _folded("div", top, below)
    if has_sign(top) or has_sign(below):
        size = divide(*(negative(one) if has_sign(one) else one for one in (top, below)))
        return size if has_sign(top) and has_sign(below) else negative(size)
    if below.is_const and below.value == 0:
        return multiply(const(math.copysign(math.inf, below.value), below.dtype), top)
    if below.is_const and _is_power_of_two(below.value):
        return multiply(const(1 / below.value, below.dtype), top)
    return Expr("div", top.dtype, (top, below))


def _folded(op: str, left: Expr, right: Expr) -> Expr:
    """Return the value of an operation on numbers, rounded as the dtype rounds it."""
    kind = np.float64 if left.dtype == "float64" else np.float32
    if op != "add" and _is_power_of_two(right.value):
        kind = np.float64  # which rounds nothing, and keeps the digits that were written
    with np.errstate(all="ignore"):
        a, b = kind(left.value), kind(right.value)
        value = a + b if op == "add" else a * b if op == "mul" else a / b
    return const(float(value), left.dtype)


def power(base: Expr, exponent: int) -> Expr:
    """Return a power by an exponent of at least 2, which is computed by multiplication."""
    if base.is_const:
        return const(float(base.value) ** exponent, base.dtype)
    if base.op == "power":
        return power(base.args[0], base.value * exponent)
    return Expr("power", base.dtype, (base,), exponent)


def is_nonnegative(expr: Expr) -> bool:
    """Return whether a number is surely not negative, unless it is NaN."""
    if expr.is_int:
        return integers.limits(expr)[0] >= 0
    match expr.op:
        case "const":
            return bool(expr.value >= 0)
        case "exp" | "sqrt" | "abs" | "sigmoid" | "pow":
            return True
        case "power":
            return expr.value % 2 == 0 or is_nonnegative(expr.args[0])
        case "add" | "mul" | "div" | "min" | "cast" | "floor" | "log1p":
            return all(map(is_nonnegative, expr.args))
        case "max":
            return any(map(is_nonnegative, expr.args))
        case "where":
            return all(map(is_nonnegative, expr.args[1:]))
        case _:
            return False


# --------------------------------------------------------------------------------------------------
# Quotients of integers as floats


MAX_DENOMINATOR = 2**20
EXACT = 2**24
"""Integers up to this size are floats of single precision, each."""


def quotient(expr: Expr) -> tuple[Expr, int] | None:
    """Return numerator and denominator of a float that is a quotient of integers, computed
    without error or with a rounding that no comparison with an integer can detect; None for
    other floats."""
    parts = _quotient(expr)
    return None if parts is None or max(map(abs, bounded(parts[0]))) > EXACT else parts


def _quotient(expr: Expr) -> tuple[Expr, int] | None:
    match expr.op:
        case "const" if expr.is_float:
            if not math.isfinite(expr.value):
                return None
            top, below = float(expr.value).as_integer_ratio()
            return None if below > MAX_DENOMINATOR or abs(top) > EXACT else (const(top), below)
        case "cast" if expr.args[0].is_int:
            return expr.args[0], 1
        case "neg":
            part = _quotient(expr.args[0])
            return None if part is None else (integers.negative(part[0]), part[1])
        case "add" | "max" | "min":
            parts = [_dyadic(arg) for arg in expr.args]
            if None in parts:
                return None
            below = math.lcm(*(part[1] for part in parts if part))
            tops = [_scaled(part, below) for part in parts if part]
            if expr.op == "add":
                return integers.total(tops), below
            return integers.extreme(expr.op, tops), below
        case "mul":
            left, right = map(_dyadic, expr.args)
            if left is None or right is None:
                return None
            return integers.product((left[0], right[0])), left[1] * right[1]
        case "div" if expr.args[1].is_const:
            left, right = map(_dyadic, expr.args)
            if left is None or right is None or right[1] != 1 or right[0].value <= 0:
                return None
            return left[0], left[1] * right[0].value
        case "abs":
            part = _quotient(expr.args[0])
            return None if part is None else (integers.absolute(part[0]), part[1])
        case "where":
            then, otherwise = map(_dyadic, expr.args[1:])
            if then is None or otherwise is None:
                return None
            below = math.lcm(then[1], otherwise[1])
            tops = [_scaled(part, below) for part in (then, otherwise)]
            same = tops[0] is tops[1]
            return tops[0] if same else Expr("where", "int64", (expr.args[0], *tops)), below
        case _:
            return None


def _scaled(part: tuple[Expr, int], below: int) -> Expr:
    return integers.product((part[0], const(below // part[1])))


def _dyadic(expr: Expr) -> tuple[Expr, int] | None:
    part = _quotient(expr)
    return None if part is None or part[1] & (part[1] - 1) else part
