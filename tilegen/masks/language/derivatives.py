"""Derivatives of scores, for the backward kernels.

Constant pieces (floor, sign, conditions) have derivative 0, as in PyTorch; at a kink the derivative
of abs is 0, and that of min and max the argument's that is no constant.
"""

from __future__ import annotations

from typing import Any

import sympy

from tilegen.errors import Unsupported
from tilegen.masks.language.nodes import Where, normalise, ties
from tilegen.masks.language.symbols import Lookup


def derivative(expr: sympy.Expr, by: sympy.Symbol | Lookup) -> sympy.Expr:
    """Return the derivative of a score by s or by one element it reads. Raises Unsupported."""
    return normalise(_select(_derivative(expr, by)))


def _derivative(expr: Any, by: sympy.Basic) -> Any:
    """Return the derivative around most points, by the chain rule."""
    if expr == by:
        return sympy.S.One
    if not expr.has(by):
        return sympy.S.Zero
    match expr:
        case Lookup():
            raise Unsupported(f"expected an index that does not depend on the score, got {expr}")
        case sympy.floor() | sympy.sign() | sympy.Mod():
            return sympy.S.Zero
        case Where():
            return Where(expr.args[0], *(_derivative(arg, by) for arg in expr.args[1:]))
        case sympy.Abs():
            return sympy.sign(expr.args[0]) * _derivative(expr.args[0], by)
        case sympy.Max() | sympy.Min():
            keeps = sympy.Ge if isinstance(expr, sympy.Max) else sympy.Le
            so_far, *others = ties(expr.args)
            found = _derivative(so_far, by)
            for other in others:
                found = Where(keeps(so_far, other), found, _derivative(other, by))
                so_far = expr.func(so_far, other)
            return found
        case _:
            parts = {sympy.Dummy("part", real=True): arg for arg in expr.args}
            outer = expr.func(*parts)
            return sympy.Add(
                *(
                    outer.diff(part).xreplace(parts) * _derivative(arg, by)
                    for part, arg in parts.items()
                    if arg.has(by)
                )
            )


def _select(expr: sympy.Basic) -> sympy.Basic:
    """Return the expression with products inside choices: 0 is chosen even where a factor is
    infinite."""
    if not expr.args or isinstance(expr, Lookup):
        return expr
    args = [_select(arg) for arg in expr.args]
    if isinstance(expr, sympy.Mul):
        for choice in args:
            if isinstance(choice, Where) and 0 in choice.args[1:]:
                others = [arg for arg in args if arg is not choice]
                branches = (_select(sympy.Mul(part, *others)) for part in choice.args[1:])
                return Where(choice.args[0], *branches)
    return expr.func(*args)
