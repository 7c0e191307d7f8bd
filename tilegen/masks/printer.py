"""Prints SymPy expressions over integer indices as Triton (or numpy) source."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import sympy
from sympy.printing.pycode import PythonCodePrinter


class IndexPrinter(PythonCodePrinter):
    """Integer arithmetic, minima, maxima and comparisons; anything else is an error, never silent
    text."""

    def __init__(self, names: Mapping[sympy.Symbol, str], prefix: str) -> None:
        """`names` spells symbols; `prefix` stands before `minimum` and `maximum` (`tl.` in
        kernels)."""
        super().__init__({"strict": True})
        self._names = names
        self._prefix = prefix

    # SymPy looks these methods up by class name.
    def _print_Symbol(self, expr: sympy.Symbol) -> str:  # noqa: N802
        return self._names.get(expr, expr.name)

    def _nested(self, function: str, expr: sympy.Expr) -> str:
        # Numbers first, then by name: the same text on every run.
        arguments = sorted(
            map(self._print, expr.args), key=lambda text: (not text[-1:].isdigit(), text)
        )
        return reduce(lambda left, right: f"{self._prefix}{function}({left}, {right})", arguments)

    def _print_Max(self, expr: sympy.Max) -> str:  # noqa: N802
        return self._nested("maximum", expr)

    def _print_Min(self, expr: sympy.Min) -> str:  # noqa: N802
        return self._nested("minimum", expr)

    def _print_floor(self, expr: sympy.floor) -> str:
        numerator, denominator = sympy.fraction(sympy.together(expr.args[0]))
        return f"({self._print(numerator)}) // {self._print(denominator)}"

    def _print_And(self, expr: sympy.And) -> str:  # noqa: N802
        return " & ".join(sorted(self._print(argument) for argument in expr.args))

    def _print_Or(self, expr: sympy.Or) -> str:  # noqa: N802
        return "(" + " | ".join(sorted(self._print(argument) for argument in expr.args)) + ")"

    def _print_Not(self, expr: sympy.Not) -> str:  # noqa: N802
        return f"~{self._print(expr.args[0])}"


def to_triton(expr: sympy.Basic, names: Mapping[sympy.Symbol, str]) -> str:
    """Return Triton source of an index expression or predicate, symbols spelt as in `names`."""
    return str(IndexPrinter(names, "tl.").doprint(expr))
