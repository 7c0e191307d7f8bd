"""Floats that are quotients of integers. They are compared as integers, since comparisons of floats
have no closed form."""

from __future__ import annotations

import math

from tilegen.masks.language import integers
from tilegen.masks.language.expr import Expr, const
from tilegen.masks.language.limits import bounded

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
