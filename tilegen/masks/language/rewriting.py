"""Rewriting: replace some nodes of an expression, and rebuild the nodes that depend on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilegen.masks.language import algebra, functions, remainders
from tilegen.masks.language.expr import ELEMENT_OF_KIND, B, Expr, H, K, Q, captured_slots, slot_of
from tilegen.masks.language.integers import BITS

if TYPE_CHECKING:
    from tilegen.masks.values import Table


_MADE: dict[str, Any] = {
    "neg": algebra.negative,
    "div": algebra.divide,
    "pow": functions.general_power,
    "floordiv": algebra.floor_divide,
    "mod": remainders.remainder,
    "abs": algebra.absolute,
    "sign": functions.sign,
    "floor": algebra.floor,
    "where": algebra.where,
    "lt": algebra.less,
    "le": algebra.at_most,
    "eq": algebra.equal,
    "not": algebra.opposite,
    "and": algebra.both,
    "or": algebra.either,
}


def made(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """Return the operation of a node on other arguments."""
    match node.op:
        case "load":
            return Expr("load", node.dtype, args, node.value)
        case "cast":
            return algebra.cast(args[0], node.dtype)
        case "power":
            return functions.power(args[0], node.value)
        case "max" | "min":
            return algebra.extreme(node.op, *args)
        case "add":
            return algebra.add(*args)
        case "mul":
            return algebra.multiply(*args)
        case op if op in BITS:
            return functions.bits(op, *args)
        case op if op in functions.ELEMENTARY:
            return functions.elementary(op, *args)
        case op:
            return _MADE[op](*args)


def replaced(expr: Expr, parts: Mapping[Expr, Expr]) -> Expr:
    """Return an expression with some nodes replaced, made again from there up."""
    return rewritten(expr, lambda node: parts.get(node))


def renamed(expr: Expr, slots: Mapping[int, tuple[int, str]]) -> Expr:
    """Return an expression with its captured tensors in other slots: the slot and kind by slot."""
    done: dict[Expr, Expr] = {}

    def change(node: Expr) -> Expr:
        if node not in done:
            args = tuple(map(change, node.args))
            if node.op == "load" and slot_of(node) in slots:
                slot, kind = slots[slot_of(node)]
                done[node] = Expr("load", ELEMENT_OF_KIND[kind], args, (slot, kind))
            elif args == node.args:
                done[node] = node
            else:
                done[node] = made(node, args)
        return done[node]

    return change(expr)


def rewritten(expr: Expr, change: Callable[[Expr], Expr | None]) -> Expr:
    """Replace each node for which `change` returns another node; rebuild other nodes from their
    rewritten arguments."""
    done: dict[Expr, Expr] = {}

    def inner(node: Expr) -> Expr:
        if node not in done:
            other = change(node)
            if other is None:
                args = tuple(map(inner, node.args))
                other = node if args == node.args else made(node, args)
            done[node] = other
        return done[node]

    return inner(expr)


# --------------------------------------------------------------------------------------------------
# Captured tensors: their kinds and slots


def free_parts(expr: Expr) -> frozenset[str]:
    """Return which of b, h, q and k an expression depends on."""
    return frozenset(str(symbol.value) for symbol in expr.free & {B, H, Q, K})


def rename(expr: Expr, slots: Sequence[int]) -> Expr:
    """Return the expression with captured tensor i in slot slots[i]."""
    loads = (node for node in expr.walk() if node.op == "load")
    return renamed(expr, {slot_of(one): (slots[slot_of(one)], one.value[1]) for one in loads})


def without(tables: Sequence[Table], others: Sequence[Table]) -> tuple[Table, ...]:
    """Return the tables that are not among others, without repetitions."""
    known = {one.identity for one in others}
    return tuple({one.identity: one for one in tables if one.identity not in known}.values())


def merge(
    parts: Sequence[tuple[Expr, Sequence[Table]]],
) -> tuple[list[Expr], tuple[Table, ...]]:
    """Return expressions over one tuple of tables: the same tensor has one slot, but where it has
    different axes, and unread ones have none."""
    merged: list[Table] = []
    moved: list[Expr] = []
    for expr, tables in parts:
        slots = [-1] * len(tables)
        for slot in captured_slots(expr):
            table = tables[slot]
            alike = (
                i
                for i, one in enumerate(merged)
                if one.identity == table.identity and len({one.axes, table.axes, None}) < 3
            )
            at = slots[slot] = next(alike, len(merged))
            if at == len(merged) or table.axes is not None:
                merged[at : at + 1] = [table]
        moved.append(rename(expr, slots))
    return moved, tuple(merged)
