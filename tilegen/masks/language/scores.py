"""Scores as kernels compute them: in single precision, with constant factors joined."""

from __future__ import annotations

from tilegen.masks.language.algebra import cast, load, multiply
from tilegen.masks.language.expr import Expr, const, slot_of
from tilegen.masks.language.rewriting import made, rewritten
from tilegen.masks.language.texts import to_text


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
