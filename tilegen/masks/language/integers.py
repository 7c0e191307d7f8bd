"""Keeps integer arithmetic exact where an expression mixes integers and floats.

SymPy treats `s + q - k` as one sum and `0.1*(q - k)` as two products; in fp32 both would round at
the size of q. `exact` puts the integers back together, and makes integer division of `floor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sympy
from sympy.core.relational import Relational

from tilegen.masks.language.nodes import Bits, Where, normalise
from tilegen.masks.language.symbols import Lookup
from tilegen.masks.language.widths import Wrapped

MAX_RATIO = 2**20


class FloorDiv(sympy.Function):
    """`FloorDiv(n, d)`: n / d of two integers, rounded down."""

    nargs = 2
    is_integer = True

    def _eval_is_nonnegative(self) -> bool | None:
        numerator, denominator = self.args
        return True if numerator.is_nonnegative and denominator.is_positive else None


class Exact(sympy.Function):
    """`Exact(e)`: the integer e, computed as one, then used as a float."""

    nargs = 1
    is_real = True

    def _eval_is_nonnegative(self) -> bool | None:
        return self.args[0].is_nonnegative


def is_int(expr: sympy.Basic) -> bool:
    """Whether an expression is computed in integers all the way (`floor(s)` is not)."""
    match expr:
        case sympy.Symbol() | Lookup() | sympy.Number():
            return bool(expr.is_integer)
        case FloorDiv() | sympy.Mod() | Bits() | Wrapped():
            return True
        case sympy.Add() | sympy.Mul() | sympy.Max() | sympy.Min() | sympy.Abs() | sympy.sign():
            return all(map(is_int, expr.args))
        case sympy.Pow():
            return is_int(expr.base) and expr.exp.is_Integer and expr.exp > 0
        case Where():
            return all(map(is_int, expr.args[1:]))
        case _:
            return False


@lru_cache(maxsize=4096)
def prepared(expr: Any) -> Any:
    """Return the one form that kernels, the reference and tile lists compute.

    Raises Unsupported for what masks and scores cannot hold.
    """
    return exact(normalise(expr))


def quotient(expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Split a value into numerator and denominator, so that both are integers where that is
    possible.

    Only rational coefficients and factors are taken apart: nothing is expanded.
    """
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(expr)]
    scale = sympy.ilcm(1, 1, *(factor.q for factor, _ in terms if factor.is_Rational))
    if len(terms) > 1:
        return sympy.Add(*(scale * factor * rest for factor, rest in terms)), sympy.Integer(scale)
    below = sympy.Mul(
        *(
            1 / factor
            for factor in sympy.Mul.make_args(terms[0][1])
            if isinstance(factor, sympy.Pow) and factor.exp.is_Integer and factor.exp < 0
        )
    )
    return scale * expr * below, scale * below


def exact(expr: sympy.Basic) -> sympy.Basic:
    """Return an equal expression whose integer parts are computed as integers."""
    if isinstance(expr, sympy.floor):
        numerator, denominator = map(exact, quotient(expr.args[0]))
        if is_int(numerator) and is_int(denominator):
            return FloorDiv(numerator, denominator)
        return sympy.floor(exact(expr.args[0]), evaluate=False)
    if isinstance(expr, Relational):
        return _relation(expr)
    if not expr.args:
        return expr
    if isinstance(expr, sympy.Add) and not is_int(expr):
        return _sum(expr)
    args = [exact(arg) for arg in expr.args]
    if args == list(expr.args) and not isinstance(expr, (sympy.Mul, sympy.Pow)):
        return expr  # SymPy takes long to make maxima again
    if isinstance(expr, (sympy.Mul, sympy.Pow)) and not is_int(expr.func(*args)):
        # Squares of distances would leave 32 bits: multiply them as floats.
        integers = [arg for arg in args if not arg.is_Number and is_int(arg)]
        if len(integers) > 1 or any(isinstance(arg, (sympy.Pow, sympy.Mul)) for arg in integers):
            args = [_floating(arg) for arg in args]
    if isinstance(expr, sympy.Abs):
        return sympy.Abs(*args, evaluate=False)
    return expr.func(*args)


def _relation(expr: Relational) -> sympy.Basic:
    """Compare integers where both sides are rational multiples of integers."""
    terms = [term.as_coeff_Mul()[0] for side in expr.args for term in sympy.Add.make_args(side)]
    scale = sympy.ilcm(1, 1, *(factor.q for factor in terms if factor.is_Rational))
    if scale > 1:
        scaled = (sympy.Add(*(scale * one for one in sympy.Add.make_args(s))) for s in expr.args)
        whole = list(map(exact, scaled))
        if all(map(is_int, whole)):
            return expr.func(*whole)
    return expr.func(*map(exact, expr.args))


def _sum(expr: sympy.Add) -> sympy.Basic:
    terms = list(map(exact, expr.args))
    if all(map(is_int, terms)):
        return sympy.Add(*terms)
    whole: list[sympy.Expr] = []
    scaled: list[tuple[sympy.Expr, sympy.Expr]] = []
    rest: list[sympy.Expr] = []
    for term in expr.args:
        coefficient, value = term.as_coeff_Mul()
        value = exact(value)
        linear = is_int(value) and not isinstance(value, (sympy.Mul, sympy.Pow))
        if linear and coefficient.is_Integer:
            whole.append(coefficient * value)
        elif linear and coefficient.is_finite and not term.is_Number:
            scaled.append((coefficient, value))
        else:
            rest.append(_floating(exact(term)))
    if len(whole) > 1:
        whole = [Exact(sympy.Add(*whole))]
    return sympy.Add(*whole, *_grouped(scaled), *rest)


def _grouped(scaled: Sequence[tuple[sympy.Expr, sympy.Expr]]) -> list[sympy.Expr]:
    """Return 0.1*q - 0.1*k as 0.1 times the integer q - k."""
    groups: dict[sympy.Expr, list[sympy.Expr]] = {}
    for coefficient, value in sorted(scaled, key=lambda pair: abs(pair[0])):
        for unit, values in groups.items():
            ratio = float(coefficient / unit)
            if ratio.is_integer() and abs(ratio) <= MAX_RATIO:
                values.append(int(ratio) * value)
                break
        else:
            groups[coefficient] = [value]
    return [
        unit * (Exact(sympy.Add(*values)) if len(values) > 1 else values[0])
        for unit, values in groups.items()
    ]


def _floating(expr: sympy.Expr) -> sympy.Expr:
    if expr.is_Number or not is_int(expr):
        return expr
    if isinstance(expr, (sympy.Mul, sympy.Pow)):
        return expr.func(*map(_floating, expr.args))
    return Exact(expr)
