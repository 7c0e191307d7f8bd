"""Comparisons of floats that may be NaN, whose opposites are no comparisons: `~(a < b)` holds where
`a >= b` does not.

SymPy takes every value for a number. What it would simplify by that stays as it is: a comparison of
such floats is a node of its own, and an operation that would lose such a float is refused.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import sympy
from sympy.core.relational import Relational
from sympy.core.sorting import default_sort_key
from sympy.logic.boolalg import Boolean

from tilegen.errors import Unsupported
from tilegen.masks.language.integers import is_int, quotient
from tilegen.masks.language.nodes import Log1p, Where
from tilegen.masks.language.ordered import ORDERED, Ordered
from tilegen.masks.language.symbols import Lookup, is_condition

Sources = frozenset[tuple[str, Any]]
"""Parts of a value that may be NaN or infinite: a function, and what it is of."""


def compared(relation: type[Relational], left: Any, right: Any) -> Boolean:
    """Return a comparison of two numbers, one that SymPy leaves alone where either may be NaN."""
    if sources(left) or sources(right) or _may_overflow(left, right):
        return _ordered(relation, left, right)
    found = relation(left, right)
    is_known = found in (sympy.true, sympy.false) and (_reads_floats(left) or _reads_floats(right))
    return _ordered(relation, left, right) if is_known else found


def again(comparison: Any) -> Boolean:
    """Return a comparison whose sides have changed, as one that SymPy knows where that will do."""
    if not isinstance(comparison, Ordered):
        return comparison
    found = compared(comparison.relation, *comparison.args)
    return sympy.Not(found) if comparison.holds_for_nan else found


def opposite(condition: Any) -> Boolean:
    """Return the opposite of a condition, whose comparisons fail where a side is NaN."""
    return sympy.Not(_with_nan(sympy.sympify(condition)))


def either(left: Any, right: Any) -> Boolean:
    """Return whether one of two conditions holds, or both."""
    found = left | right
    is_known = found == sympy.true and sympy.true not in (left, right)
    return _with_nan(left) | _with_nan(right) if is_known else found


def _with_nan(condition: Any) -> Any:
    """Return a condition for tables of floats that may hold NaN, too."""
    atoms: dict[Any, Any] = {
        atom: _ordered(atom.func, *atom.args)
        for atom in condition.atoms(sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)
        if _reads_floats(atom)
    }
    return condition.xreplace(atoms) if atoms else condition


def _ordered(relation: type[Relational], left: Any, right: Any) -> Boolean:
    if relation in (sympy.Gt, sympy.Ge):
        relation, left, right = sympy.Lt if relation is sympy.Gt else sympy.Le, right, left
    if relation is sympy.Eq:
        left, right = sorted((left, right), key=lambda arg: (arg.is_number, default_sort_key(arg)))
    return ORDERED[relation](left, right)


def _reads_floats(expr: sympy.Basic) -> bool:
    return any(not one.is_integer for one in expr.atoms(Lookup))


def check_kept(name: str, operands: list[Any], result: Any) -> None:
    """Raise Unsupported where SymPy made a number of what may be NaN in an operation."""
    if is_condition(result):
        return
    before: Sources = frozenset().union(*map(sources, operands))
    if lost := before - sources(result):
        function, of = min(lost, key=str)
        raise Unsupported(
            f"expected an operation that keeps what is NaN, got {name}, which makes {result} of "
            f"{function} of {of}; clamp what is divided by, and the arguments of log and sqrt"
        )


@lru_cache(maxsize=4096)
def sources(expr: Any) -> Sources:
    """Return the parts of a number, not of conditions and indices in it, that may be NaN."""
    match expr:
        case Lookup() | sympy.Symbol() | sympy.Number() | Boolean():
            return frozenset()
        case Where():
            return sources(expr.args[1]) | sources(expr.args[2])
        case sympy.floor():
            parts = quotient(expr.args[0])
            if all(map(is_int, parts)):  # an integer divided by 0 is an integer
                return sources(parts[0]) | sources(parts[1])
        case _:
            pass
    found: Sources = frozenset().union(*map(sources, expr.args))
    match expr:
        case sympy.log() if not expr.args[0].is_positive:
            return found | {("log", expr.args[0])}
        case Log1p() if not expr.args[0].is_nonnegative:
            return found | {("log1p", expr.args[0])}
        case sympy.Pow(args=(base, exponent)):
            if not (exponent.is_nonnegative or base.is_positive or base.is_nonzero):
                found |= {("division", base)}
            if not (exponent.is_integer or base.is_nonnegative):
                found |= {("root", base)}
        case _:
            pass
    return found


def _may_overflow(*sides: Any) -> bool:
    """Return whether an exponential that may be infinite is computed with: infinity less itself, or
    times 0, is NaN."""
    for side in sides:
        for part in sympy.preorder_traversal(side):
            grows = isinstance(part, sympy.exp) or (
                isinstance(part, sympy.Pow) and not part.exp.is_number
            )
            if grows and not part.args[-1].is_nonpositive and part is not side:
                return True
    return False
