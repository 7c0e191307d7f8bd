"""Spelling of expressions with Python's operators, which canonical texts and Triton share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import sympy

from tilegen.masks.language.integers import FloorDiv

LOWEST, COMPARISON, OR, AND, SUM, PRODUCT, UNARY, POWER, ATOM = range(9)
"""Python's operators in the order in which they bind, the loosest first."""

RELATIONS = {sympy.Eq: "==", sympy.Ne: "!=", sympy.Le: "<=", sympy.Lt: "<"}

Spell = Callable[[sympy.Expr, int], str]
"""Returns the text of an operand, in brackets unless it binds at least as tightly as asked."""


def spelt_sum(terms: Iterable[sympy.Expr], spell: Spell, space: str) -> str:
    """Return the text of a sum: positive terms first, numbers last of each sign, else by text."""
    parts: list[tuple[bool, bool, str]] = []
    for term in terms:
        negative = bool(term.as_coeff_Mul()[0] < 0)
        size = -term if negative else term
        # -a % b would be (-a) % b.
        rounded = negative and isinstance(size, (sympy.floor, FloorDiv, sympy.Mod))
        parts.append((negative, term.is_number, spell(size, UNARY if rounded else PRODUCT)))
    text = "".join(
        f"{space}{'-' if negative else '+'}{space}{part}" for negative, _, part in sorted(parts)
    )
    sign, rest = text[len(space)], text[2 * len(space) + 1 :]
    return rest if sign == "+" else f"-{rest}"


def factors(product: sympy.Mul) -> tuple[sympy.Number, list[sympy.Expr], list[sympy.Expr]]:
    """Return the coefficient of a product, its factors, and those it is divided by."""
    coefficient, rest = product.as_coeff_Mul()
    above: list[sympy.Expr] = []
    below: list[sympy.Expr] = []
    for factor in sympy.Mul.make_args(rest):
        base, exponent = factor.as_base_exp()
        if isinstance(factor, sympy.Pow) and exponent.is_Rational and exponent < 0:
            below.append(sympy.Pow(base, -exponent))
        elif factor != 1:
            above.append(factor)
    return coefficient, above, below
