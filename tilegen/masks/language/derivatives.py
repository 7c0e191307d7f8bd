"""Derivatives of scores, for the backward kernels.

Constant pieces (floor, sign, conditions) have derivative 0, as in PyTorch; at a kink the derivative
of abs is 0, and that of min and max the argument's that is no constant.
"""

from __future__ import annotations

import sympy

from tilegen.errors import Unsupported
from tilegen.masks.language.nodes import Where, normalise, ties
from tilegen.masks.language.symbols import Lookup
from tilegen.masks.language.texts import to_text


def derivative(expr: sympy.Expr, by: sympy.Symbol | Lookup) -> sympy.Expr:
    """Return the derivative of a score by s or by one element it reads. Raises Unsupported."""
    variable = sympy.Dummy("variable", real=True)
    pieces = _Pieces(by)
    found = sympy.diff(pieces.smooth(expr).xreplace({by: variable}), variable)
    if found.has(sympy.Derivative, sympy.Subs):
        raise Unsupported(f"expected a score that SymPy can differentiate, got {to_text(expr)}")
    found = found.xreplace({variable: by}).xreplace(pieces.extremes).xreplace(pieces.constants)
    return normalise(_select(found))


class _Pieces:
    """Replaces functions that SymPy would differentiate into distributions by equal ones."""

    def __init__(self, by: sympy.Basic) -> None:
        """`by` is what the derivative is by."""
        self._by = by
        self.constants: dict[sympy.Basic, sympy.Basic] = {}
        """What is constant between jumps, by the symbol that stands for it."""
        self.extremes: dict[sympy.Basic, sympy.Basic] = {}
        """Minima and maxima, by the choice that stands for each."""

    def smooth(self, expr: sympy.Basic) -> sympy.Basic:
        """Return an expression equal around most points."""
        if not expr.args or not expr.has(self._by):
            return expr
        match expr:
            case sympy.floor() | sympy.sign() | sympy.Mod():
                return self._constant(expr)
            case Where():
                return Where(expr.args[0], *map(self.smooth, expr.args[1:]))
            case sympy.Abs():
                return self._constant(sympy.sign(expr.args[0])) * self.smooth(expr.args[0])
            case sympy.Max() | sympy.Min():
                return self._extreme(expr)
            case _:
                return expr.func(*map(self.smooth, expr.args))

    def _constant(self, value: sympy.Basic) -> sympy.Dummy:
        symbol = sympy.Dummy("constant", real=True)
        self.constants[symbol] = value
        return symbol

    def _extreme(self, expr: sympy.Max | sympy.Min) -> sympy.Basic:
        keeps = sympy.Ge if isinstance(expr, sympy.Max) else sympy.Le
        first, *others = ties(expr.args)
        choice, so_far = self.smooth(first), first
        for other in others:
            choice = Where(keeps(so_far, other), choice, self.smooth(other))
            so_far = expr.func(so_far, other)
        self.extremes[choice] = expr
        return choice


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
