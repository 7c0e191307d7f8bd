"""Prints SymPy expressions over integer indices as Triton (or numpy) source."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

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

    # Triton divides as C does, towards zero; numpy, like Python, downwards.
    def _print_floor(self, expr: sympy.floor) -> str:
        numerator, denominator = sympy.fraction(sympy.together(expr.args[0]))
        top, bottom = self._print(numerator), self._print(denominator)
        if self._prefix and not numerator.is_nonnegative:
            return f"(({top}) - {self._remainder(top, bottom)}) // {bottom}"
        return f"({top}) // {bottom}"

    def _print_Mod(self, expr: sympy.Mod) -> str:  # noqa: N802
        value, step = expr.args
        top, bottom = self._print(value), self._print(step)
        if self._prefix and not value.is_nonnegative:
            return self._remainder(top, bottom)
        return f"({top}) % {bottom}"

    def _remainder(self, top: str, bottom: str) -> str:
        return f"((({top}) % {bottom} + {bottom}) % {bottom})"

    def _print_Piecewise(self, expr: sympy.Piecewise) -> Any:  # noqa: N802
        pairs: Any = expr.args
        *cases, (last, condition) = pairs
        if condition != True:  # noqa: E712 - SymPy's true
            raise ValueError(f"expected a last case that always holds in {expr}")
        text = self._print(last)
        for value, when in reversed(cases):
            text = f"{self._prefix}where({self._print(when)}, {self._print(value)}, {text})"
        return text

    def _print_Abs(self, expr: sympy.Abs) -> str:  # noqa: N802
        return f"{self._prefix}abs({self._print(expr.args[0])})"

    def _print_Lookup(self, expr: sympy.Function) -> str:  # noqa: N802
        return f"look_up({', '.join(map(self._print, expr.args))})"

    def _print_NoneType(self, expr: None) -> str:  # noqa: N802
        return "None"

    def _print_And(self, expr: sympy.And) -> str:  # noqa: N802
        return " & ".join(sorted(self._print(argument) for argument in expr.args))

    def _print_Or(self, expr: sympy.Or) -> str:  # noqa: N802
        return "(" + " | ".join(sorted(self._print(argument) for argument in expr.args)) + ")"

    def _print_Not(self, expr: sympy.Not) -> str:  # noqa: N802
        inner = self._print(expr.args[0])
        return f"~({inner})" if isinstance(expr.args[0], sympy.And) else f"~{inner}"


def to_triton(expr: sympy.Basic, names: Mapping[sympy.Symbol, str]) -> str:
    """Return Triton source of an index expression or predicate, symbols spelt as in `names`."""
    return str(IndexPrinter(names, "tl.").doprint(expr))
