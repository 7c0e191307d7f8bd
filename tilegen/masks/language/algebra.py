"""Operations that build expressions: each returns the unique node for its arguments. Operands
may be Python numbers, and have any dtypes: they are promoted as PyTorch promotes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from tilegen.errors import Unsupported
from tilegen.masks.language import expr as nodes
from tilegen.masks.language import floats, integers
from tilegen.masks.language.bounds import limits
from tilegen.masks.language.elements import BOUNDS
from tilegen.masks.language.expr import (
    ELEMENT_OF_KIND,
    FALSE,
    ONE,
    TRUE,
    ZERO,
    Expr,
    const,
    order,
)
from tilegen.masks.language.floats import is_converted, quotient

FEW = 16
"""Most floats that are added from left to right."""


def as_expr(value: Any) -> Expr:
    """Return a number of Python as an expression; an expression as it is."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, bool | int | float):
        return const(value)
    raise Unsupported(f"expected a number or an expression, got {value!r}")


def load(slot: int, kind: str, *indices: Any) -> Expr:
    """Return element [indices] of the captured tensor in a slot, by the kind of its elements."""
    return Expr("load", ELEMENT_OF_KIND[kind], tuple(map(as_expr, indices)), (slot, kind))


def number_of(value: float, dtype: str) -> Expr:
    """Return a number of Python as a float of a dtype."""
    return const(floats.rounded(value, dtype), dtype)


def number(value: Any) -> Expr:
    """Return an expression as a number: a condition as 1 or 0."""
    expr = as_expr(value)
    if not expr.is_condition:
        return expr
    if expr.op == "not" and (of := expr.args[0]).op == "eq":
        load, zero = of.args
        if load.op == "load" and load.value[1] == "bool" and zero is ZERO:
            return load  # an element of a bool tensor is 1 or 0
    return where(expr, ONE, ZERO)


# --------------------------------------------------------------------------------------------------
# Dtypes


def cast(value: Any, dtype: str) -> Expr:
    """Return a number in another dtype, rounded or wrapped around as PyTorch does. Integers become
    int64 as they are."""
    expr = as_expr(value)
    if dtype == "bool":
        return expr if expr.is_condition else opposite(equal(expr, 0))
    expr = number(expr)
    if expr.dtype == dtype:
        return expr
    if dtype in BOUNDS or dtype == "int64":
        whole = truncate(expr)
        # PyTorch leaves open what becomes of a float that no int32 holds.
        is_free = dtype == "int64" or (dtype == "int32" and expr.is_float)
        return whole if is_free else integers.wrapped(whole, dtype)
    if expr.is_const:
        value = np.float32(expr.value) if expr.dtype == "float32" else expr.value
        return number_of(float(value), dtype)
    if expr.op == "cast" and _holds(expr.dtype, expr.args[0].dtype):
        return cast(expr.args[0], dtype)  # which lost nothing
    return Expr("cast", dtype, (expr,))


_DIGITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}


def _holds(wide: str, narrow: str) -> bool:
    """Check whether every value of one float dtype is a value of another."""
    if narrow not in _DIGITS or wide not in _DIGITS:
        return False
    return _DIGITS[wide] >= _DIGITS[narrow] and (wide, narrow) != ("float16", "bfloat16")


def real(value: Any, dtype: str = "float32") -> Expr:
    """Return a number as a float of a dtype, which a float of 16 bits becomes too."""
    return cast(value, dtype)


def promoted(*values: Any) -> list[Expr]:
    """Return numbers in the dtype that they are computed in: integers as they are if all are."""
    numbers = [number(value) for value in values]
    if all(one.is_int for one in numbers):
        return numbers
    dtype = "float64" if any(one.dtype == "float64" for one in numbers) else "float32"
    return [cast(one, dtype) for one in numbers]


# --------------------------------------------------------------------------------------------------
# Arithmetic


def add(*values: Any) -> Expr:
    """Return a sum; of floats, computed from left to right."""
    terms = promoted(*values)
    return integers.total(terms) if terms[0].is_int else reduce(floats.add, terms)


def subtract(left: Any, right: Any) -> Expr:
    """Return left - right."""
    first, second = promoted(left, right)
    return add(first, negative(second))


def negative(value: Any) -> Expr:
    """Return a number with the other sign."""
    (expr,) = promoted(value)
    return integers.negative(expr) if expr.is_int else floats.negative(expr)


def multiply(*values: Any) -> Expr:
    """Return a product; of floats, computed from left to right."""
    factors = promoted(*values)
    return integers.product(factors) if factors[0].is_int else reduce(floats.multiply, factors)


def in_halves(function: Callable[..., Expr], values: Sequence[Any]) -> Expr:
    """Return the sum or product of many numbers; of floats, each half by itself, so that the
    expression nests little."""
    if len(values) <= FEW or promoted(*values)[0].is_int:
        return function(*values)
    half = len(values) // 2
    return function(in_halves(function, values[:half]), in_halves(function, values[half:]))


def divide(left: Any, right: Any) -> Expr:
    """Return a quotient, as a float."""
    top, below = promoted(left, right)
    return floats.divide(real(top), real(below)) if top.is_int else floats.divide(top, below)


# --------------------------------------------------------------------------------------------------
# Functions


def floor_divide(left: Any, right: Any) -> Expr:
    """Return a quotient rounded down. An integer divided by 0 is left as it is."""
    top, below = promoted(left, right)
    return integers.floor_divide(top, below) if top.is_int else floor(divide(top, below))


def extreme(op: str, *values: Any) -> Expr:
    """Return the largest ("max") or the smallest ("min") of numbers; NaN if one is NaN."""
    numbers = promoted(*values)
    if numbers[0].is_int:
        return integers.extreme(op, numbers)
    dtype = numbers[0].dtype
    parts = [part for one in numbers for part in (one.args if one.op == op else (one,))]
    others = list(dict.fromkeys(one for one in parts if not one.is_const))
    if bounds := [one.value for one in parts if one.is_const]:
        bound = math.nan if any(map(math.isnan, bounds)) else (max if op == "max" else min)(bounds)
        others.append(const(bound, dtype))
    if all(map(is_converted, others)):  # rounding leaves the order
        return real(extreme(op, *(one.args[0] for one in others)), dtype)
    others.sort(key=order)
    return others[0] if len(others) == 1 else Expr(op, dtype, tuple(others))


def maximum(*values: Any) -> Expr:
    """Return the largest of numbers."""
    return extreme("max", *values)


def minimum(*values: Any) -> Expr:
    """Return the smallest of numbers."""
    return extreme("min", *values)


def absolute(value: Any) -> Expr:
    """Return a number without its sign."""
    (expr,) = promoted(value)
    if expr.is_int:
        return integers.absolute(expr)
    if expr.is_const:
        return const(abs(expr.value), expr.dtype)
    if is_converted(expr):
        return real(integers.absolute(expr.args[0]), expr.dtype)
    return Expr("abs", expr.dtype, expr.args if expr.op == "neg" else (expr,))


def floor(value: Any) -> Expr:
    """Return a number rounded down, in its own dtype."""
    expr = promoted(value)[0]
    if expr.is_int:
        return expr
    if expr.is_const and math.isfinite(expr.value):
        return const(float(math.floor(expr.value)), expr.dtype)
    if (parts := quotient(expr)) is not None:
        return real(floor_divide(*parts), expr.dtype)
    return Expr("floor", expr.dtype, (expr,))


def ceiling(value: Any) -> Expr:
    """Return a number rounded up, in its own dtype."""
    return negative(floor(negative(value)))


def truncate(value: Any) -> Expr:
    """Return a number rounded towards zero, as an integer."""
    expr = number(value)
    if expr.is_int:
        return expr
    if expr.is_const:
        if not math.isfinite(expr.value):
            raise Unsupported(f"expected a number that an integer can hold, got {expr}")
        return const(int(expr.value))
    if (parts := quotient(expr)) is not None:
        top, below = parts
        down = floor_divide(top, below)
        if below == 1 or limits(top)[0] >= 0:
            return down
        return where(less(top, 0), negative(floor_divide(negative(top), below)), down)
    return Expr("cast", "int64", (expr,))


def where(condition: Any, then: Any, otherwise: Any) -> Expr:
    """Return a value where a condition holds, and another elsewhere: two numbers or two
    conditions."""
    keep, first, second = map(as_expr, (condition, then, otherwise))
    if first.is_condition and second.is_condition:
        return either(both(keep, first), both(opposite(keep), second))
    first, second = promoted(first, second)
    if keep is TRUE or first is second:
        return first
    if keep is FALSE:
        return second
    if is_converted(first) and is_converted(second):
        return real(where(keep, first.args[0], second.args[0]), first.dtype)
    return Expr("where", "int64" if first.is_int else first.dtype, (keep, first, second))


# --------------------------------------------------------------------------------------------------
# Conditions


def less(left: Any, right: Any) -> Expr:
    """Return whether a number is below another; false for NaN."""
    return _compared("lt", *promoted(left, right))


def at_most(left: Any, right: Any) -> Expr:
    """Return whether a number is at most another; false for NaN."""
    return _compared("le", *promoted(left, right))


def equal(left: Any, right: Any) -> Expr:
    """Return whether two numbers, or two conditions, are equal; false for NaN."""
    first, second = as_expr(left), as_expr(right)
    if first.is_condition and second.is_condition:
        return either(both(first, second), both(opposite(first), opposite(second)))
    return _compared("eq", *promoted(first, second))


def unequal(left: Any, right: Any) -> Expr:
    """Return whether two numbers, or two conditions, differ; true for NaN."""
    return opposite(equal(left, right))


def _compared(op: str, left: Expr, right: Expr) -> Expr:
    if left.is_int:
        return integers.compared(op, left, right)
    if left.is_const and right.is_const:
        a, b = left.value, right.value
        if left.dtype == "float32":
            a, b = np.float32(a), np.float32(b)
        return const(bool(a < b if op == "lt" else a <= b if op == "le" else a == b))
    first, second = quotient(left), quotient(right)
    if first and second and _is_exact(first[1], second[1]):
        common = math.gcd(first[1], second[1])
        sides = multiply(first[0], second[1] // common), multiply(second[0], first[1] // common)
        return integers.compared(op, *sides)
    if (first and _is_infinite(right)) or (second and _is_infinite(left)):
        return const(op != "eq" and (right.value > 0 if first else left.value < 0))
    if op == "eq":
        left, right = sorted((left, right), key=order)
    return Expr(op, "bool", (left, right))


def _is_exact(below: int, under: int) -> bool:
    """Return whether rounded quotients by such divisors compare as the quotients do."""
    dyadic = not (below & (below - 1) or under & (under - 1))
    return dyadic or below == under or 1 in (below, under)


def _is_infinite(expr: Expr) -> bool:
    return bool(expr.is_const and math.isinf(expr.value))


def opposite(condition: Any) -> Expr:
    """Return the condition that holds where another fails, be it for a NaN."""
    keep = as_expr(condition)
    if keep.is_const:
        return const(not keep.value)
    if keep.op == "not":
        return keep.args[0]
    if keep.op in ("lt", "le") and keep.args[0].is_int:
        return Expr("le" if keep.op == "lt" else "lt", "bool", keep.args[::-1])
    return Expr("not", "bool", (keep,))


def both(*conditions: Any) -> Expr:
    """Return whether all conditions hold."""
    return _joined("and", conditions, TRUE, FALSE)


def either(*conditions: Any) -> Expr:
    """Return whether any condition holds."""
    return _joined("or", conditions, FALSE, TRUE)


def _joined(op: str, conditions: Iterable[Any], neutral: Expr, decides: Expr) -> Expr:
    parts: dict[Expr, None] = {}
    for condition in map(as_expr, conditions):
        if not condition.is_condition:
            raise Unsupported(f"expected conditions joined by & and |, got {condition}")
        for part in condition.args if condition.op == op else (condition,):
            if part is not neutral:
                parts[part] = None
    if decides in parts or any(opposite(part) in parts for part in parts):
        return decides
    if not parts:
        return neutral
    ordered = sorted(parts, key=order)
    return ordered[0] if len(ordered) == 1 else Expr(op, "bool", tuple(ordered))


def conjuncts(condition: Expr) -> tuple[Expr, ...]:
    """Split a condition into the conditions of which it is the conjunction; the empty list for
    True."""
    if condition is TRUE:
        return ()
    return condition.args if condition.op == "and" else (condition,)


nodes.OPERATORS.update(
    {
        "add": add,
        "sub": subtract,
        "mul": multiply,
        "truediv": divide,
        "floordiv": floor_divide,
        "neg": negative,
        "abs": absolute,
        "lt": less,
        "le": at_most,
        "and": both,
        "or": either,
        "invert": opposite,
    }
)
