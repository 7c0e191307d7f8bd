"""Parts of an expression whose last bit matters, since a condition or an integer depends on it."""

from __future__ import annotations

from collections.abc import Iterable

from tilegen.masks.language.expr import Expr
from tilegen.masks.language.functions import ELEMENTARY

_SMOOTH = frozenset(
    ("add", "neg", "mul", "div", "power", "pow", "max", "min", "abs", "where", "cast", *ELEMENTARY)
)
"""Operations whose result changes little if an operand changes little."""


def exact_parts(exprs: Iterable[Expr]) -> frozenset[Expr]:
    """Return the parts that a comparison, a rounding or an index depends on."""
    seen: set[tuple[Expr, bool]] = set()
    waiting = [(expr, expr.is_condition) for expr in exprs]
    while waiting:
        expr, is_exact = waiting.pop()
        if (expr, is_exact) in seen:
            continue
        seen.add((expr, is_exact))
        jumps = expr.op not in _SMOOTH or not expr.is_float
        for place, part in enumerate(expr.args):
            is_choice = expr.op == "where" and place == 0
            waiting.append((part, is_exact or jumps or is_choice))
    return frozenset(expr for expr, is_exact in seen if is_exact)


def separate_products(exact: Iterable[Expr]) -> frozenset[Expr]:
    """Return the products that must be rounded before they are added to anything.

    Compilers fuse `a * b + c`, which rounds once where PyTorch rounds twice.
    """
    products: set[Expr] = set()
    for expr in exact:
        for term in expr.args if expr.op == "add" and expr.is_float else ():
            while term.op in ("neg", "cast") and term.args[0].is_float:
                term = term.args[0]  # fused all the same
            if term.op in ("mul", "power"):
                products.add(term)
    return frozenset(products)
