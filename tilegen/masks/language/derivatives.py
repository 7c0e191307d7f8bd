"""Derivatives of scores, by reverse differentiation, with PyTorch's conventions: at a bound a
clamped value keeps its derivative, equal operands of a maximum share it, and |x| has 0 at 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilegen.errors import Unsupported
from tilegen.masks.language.algebra import (
    add,
    at_most,
    cast,
    divide,
    equal,
    extreme,
    in_halves,
    less,
    load,
    multiply,
    negative,
    subtract,
    where,
)
from tilegen.masks.language.expr import Expr, const, slot_of
from tilegen.masks.language.functions import elementary, power, sign
from tilegen.masks.language.rewriting import made, rewritten
from tilegen.masks.language.texts import to_text


def derivatives(expr: Expr, leaves: Sequence[Expr]) -> list[Expr]:
    """Return the derivatives of a score by some of its symbols and look-ups. Raises Unsupported
    where such a leaf is an index of another."""
    parts: dict[Expr, list[Expr]] = {expr: [const(1.0, expr.dtype)]}
    order = _in_order(expr, frozenset(leaves))
    gradients: dict[Expr, Expr] = {}
    for node in reversed(order):
        if (given := parts.get(node)) is None:
            continue
        total = in_halves(add, given)
        if node in leaves:
            gradients[node] = merged(total)
            continue
        if node.op == "load":
            raise Unsupported(f"expected an index that does not depend on the score, got {node}")
        for arg, part in _shares(node, total):
            if arg in order:
                parts.setdefault(arg, []).append(part)
    return [gradients.get(leaf, const(0.0, expr.dtype)) for leaf in leaves]


def _in_order(expr: Expr, leaves: frozenset[Expr]) -> dict[Expr, None]:
    """Return the nodes through which leaves reach a score, arguments first."""
    order: dict[Expr, None] = {}
    seen: dict[Expr, bool] = {}

    def visit(node: Expr) -> bool:
        if node not in seen:
            if node in leaves:
                seen[node] = True
            elif not node.is_float:
                seen[node] = node.op == "load" and any(map(visit, node.args))
            else:
                inner = [visit(arg) for arg in node.args]
                seen[node] = any(inner)
            if seen[node]:
                order[node] = None
        return seen[node]

    visit(expr)
    return order


def _shares(node: Expr, total: Expr) -> list[tuple[Expr, Expr]]:
    """Return the arguments of a node, each with the part of the derivative that reaches it."""
    args = node.args
    match node.op:
        case "add":
            return [(arg, total) for arg in args]
        case "neg":
            return [(args[0], negative(total))]
        case "mul":
            left, right = args
            return [(left, _times(total, right)), (right, _times(total, left))]
        case "div":
            top, below = args
            over = divide(const(1.0, node.dtype), below)
            return [
                (top, _over(total, below)),
                (below, negative(_times(total, multiply(node, over)))),
            ]
        case "power":
            inner = power(args[0], node.value - 1)
            return [(args[0], _times(total, multiply(float(node.value), inner)))]
        case "pow":
            return _of_power(node, total)
        case "max" | "min":
            return _of_extreme(node, total)
        case "where":
            keep, then, otherwise = args
            return [(then, where(keep, total, 0.0)), (otherwise, where(keep, 0.0, total))]
        case "cast":
            return [(args[0], total)]  # a gradient is a float of single precision
        case "floor" | "sign":
            return []
        case "log":
            return [(args[0], _over(total, args[0]))]
        case "log1p":
            return [(args[0], _over(total, add(args[0], 1)))]
        case "sqrt":
            return [(args[0], _over(total, multiply(2.0, node)))]
        case _:
            return [(args[0], _times(total, _slope(node)))]


def _slope(node: Expr) -> Expr:
    """Return the derivative of a function of one number by that number."""
    x = node.args[0]
    match node.op:
        case "abs":
            return sign(x)
        case "exp":
            return node
        case "tanh":
            return subtract(1, power(node, 2))
        case "sin":
            return elementary("cos", x)
        case "cos":
            return negative(elementary("sin", x))
        case "erf":
            return multiply(2 / math.sqrt(math.pi), elementary("exp", negative(power(x, 2))))
        case "sigmoid":
            return multiply(node, subtract(1, node))
        case _:
            raise Unsupported(f"expected a function with a derivative, got {node}")


def _of_power(node: Expr, total: Expr) -> list[tuple[Expr, Expr]]:
    base, exponent = node.args
    shares: list[tuple[Expr, Expr]] = []
    if not base.is_const:
        inner = power(base, subtract(exponent, 1))
        shares.append((base, _times(total, multiply(exponent, inner))))
    if not exponent.is_const:
        shares.append((exponent, _times(total, multiply(elementary("log", base), node))))
    return shares


def _of_extreme(node: Expr, total: Expr) -> list[tuple[Expr, Expr]]:
    """Return the shares of numbers of which the extreme is taken one after the other."""
    *others, last = node.args
    below = less if node.op == "max" else lambda left, right: less(right, left)
    shares: list[tuple[Expr, Expr]] = []
    if last.is_const:
        so_far = extreme(node.op, *others)
        is_inside = at_most(last, so_far) if node.op == "max" else at_most(so_far, last)
        total = where(is_inside, total, 0.0)
    else:
        others.append(last)
    while len(others) > 1:
        right = others.pop()
        left = extreme(node.op, *others)
        shared = where(equal(left, right), multiply(0.5, total), total)
        shares.append((right, where(below(right, left), 0.0, shared)))
        total = where(below(left, right), 0.0, shared)
    return [*shares, (others[0], total)]


def _times(total: Expr, factor: Expr) -> Expr:
    """Return a product that is 0 where a choice makes it 0, even by an infinite factor."""
    return _chosen(total, lambda part: multiply(part, factor))


def _over(total: Expr, below: Expr) -> Expr:
    return _chosen(total, lambda part: divide(part, below))


def _chosen(total: Expr, change: object) -> Expr:
    if total.op == "where":
        keep, *branches = total.args
        return where(keep, *(_chosen(part, change) for part in branches))
    if total.op == "add" and any(part.op == "where" for part in total.args):
        return add(*(_chosen(part, change) for part in total.args))
    if total.is_const and total.value == 0:
        return total
    changed: Expr = change(total)  # type: ignore[operator]
    return changed


# --------------------------------------------------------------------------------------------------
# Scores in single precision


def in_single(expr: Expr) -> Expr:
    """Return a score in which doubles are rounded where they are read, but for comparisons and
    indices."""

    def single(node: Expr) -> Expr | None:
        if not node.is_float:
            return node
        if node.op == "cast" and node.args[0].dtype == "float64":
            return cast(rewritten(node.args[0], single), node.dtype)
        if node.dtype != "float64":
            return None
        match node.op:
            case "load":
                return cast(node, "float32")
            case "const":
                return const(node.value, "float32")
            case "cast":
                return cast(rewritten(node.args[0], single), "float32")
            case _:
                return made(node, tuple(rewritten(arg, single) for arg in node.args))

    return rewritten(expr, single)


def text_of(expr: Expr) -> str:
    """Return the text of a score in single precision. It does not show that doubles are rounded
    where they are read: `in_single` rounds them again."""

    def plain(node: Expr) -> Expr | None:
        if node.op != "cast" or node.dtype != "float32" or node.args[0].op != "load":
            return None
        element = node.args[0]
        slot = slot_of(element)
        return load(slot, "float", *element.args) if element.dtype == "float64" else None

    return to_text(rewritten(expr, plain))


def merged(expr: Expr) -> Expr:
    """Return a score that divides by no number and multiplies by one number at a time, which may
    change its last bit."""

    def joined(node: Expr) -> Expr | None:
        if not node.is_float:
            return None
        if node.op == "div" and (by := node.args[1]).is_const and by.value:
            factor = const(1 / by.value, node.dtype)
            return _scaled(factor, rewritten(node.args[0], joined))
        if node.op == "mul" and node.args[0].is_const:
            return _scaled(node.args[0], rewritten(node.args[1], joined))
        return None

    return rewritten(expr, joined)


def _scaled(factor: Expr, value: Expr) -> Expr:
    if value.op == "neg":
        return -_scaled(factor, value.args[0])
    if value.op == "mul" and value.args[0].is_const:
        factor = const(factor.value * value.args[0].value, factor.dtype)
        value = value.args[1]
    return multiply(factor, value)
