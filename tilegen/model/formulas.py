"""Formulas as text, each written once: numpy computes them, and SymPy reads them for reports.

A table of formulas is computed from top to bottom; a formula may use the names above it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, reduce
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import sympy as sp

Formulas = Mapping[str, str]


def _whole(number: Any) -> Any:
    """Return whole floats as Python integers, which do not overflow."""
    return np.asarray(number, dtype=np.int64).astype(object)[()]


FUNCTIONS: dict[str, Any] = {
    "Min": lambda *numbers: reduce(np.minimum, numbers),  # type: ignore
    "Max": lambda *numbers: reduce(np.maximum, numbers),  # type: ignore
    "Gcd": np.gcd,
    "floor": lambda number: _whole(np.floor(np.asarray(number, dtype=float))),  # type: ignore
    "ceiling": lambda number: _whole(np.ceil(np.asarray(number, dtype=float))),  # type: ignore
    "sqrt": np.sqrt,
    "where": np.where,
}
"""The functions of formulas, for numbers and arrays. `symbols.FUNCTIONS` has those of SymPy."""


def computed(formulas: Formulas, values: Mapping[str, Any], **functions: Any) -> dict[str, Any]:
    """Compute a table of formulas; return its names with the values that they were given."""
    names = dict(values)
    exec(_compiled(tuple(formulas.items())), FUNCTIONS | functions, names)
    return names


@lru_cache(maxsize=256)
def _compiled(formulas: tuple[tuple[str, str], ...]) -> CodeType:
    text = "\n".join(f"{name} = {formula}" for name, formula in formulas)
    return compile(text, "<formulas>", "exec")


def expression(formula: str, before: Formulas | None = None, **names: Any) -> sp.Expr:
    """Return a formula as SymPy reads it, after the formulas `before` it. `names` have expressions
    of their own."""
    from tilegen.model.symbols import read  # loads SymPy, which choices do not need

    for name, text in (before or {}).items():
        names[name] = read(text, names)
    return read(formula, names)
