"""A repair of SymPy, whose wrong answer would make a mask wrong.

SymPy 1.14 takes an even expression divided by twice an odd number for an integer, such as
`Abs(4*k - 4*q)/18`, of which `floor` then leaves nothing off, and one divided by an odd number for
none, such as `Abs(4*k - 4*q)/3`, which then equals no integer. Neither can be told. Nothing else of
SymPy is changed.
"""

from __future__ import annotations

from typing import Any

import sympy

Mul: Any = sympy.Mul
_eval_is_integer = Mul._eval_is_integer


def _is_integer(product: Any) -> bool | None:
    """Return SymPy's answer about a product, but None where an odd number divides it."""
    found: bool | None = _eval_is_integer(product)
    denominator = product.args[0].q if product.args[0].is_Rational else 1
    return None if denominator & (denominator - 1) and len(product.args) > 1 else found


def repair() -> None:
    """Have SymPy say of no product that it is an integer, or none, where it cannot be told."""
    Mul._eval_is_integer = Mul._prop_handler["integer"] = _is_integer
