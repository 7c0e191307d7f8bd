"""Symbols of mask and score expressions, and captured tensors inside them."""

from __future__ import annotations

from typing import Any

import sympy
from sympy.logic.boolalg import Boolean

from tilegen.masks.language.sympy_repair import repair

repair()  # before anything is made of the symbols below

B, H, Q, K = sympy.symbols("b h q k", integer=True, nonnegative=True)
"""Batch, query head, query row, key-value column."""
SEQLEN_Q, SEQLEN_KV = sympy.symbols("seqlen_q seqlen_kv", integer=True, positive=True)
PAIR = (B, H, Q, K, SEQLEN_Q, SEQLEN_KV)
"""The symbols that a mask may depend on: a pair's indices and the lengths of its sequences."""
FIRST, LAST = sympy.symbols("first last", integer=True, nonnegative=True)
"""First and last index of a stationary tile."""
S = sympy.Symbol("s", real=True)
"""A score after scaling, which a score change starts from."""


class Lookup(sympy.Function):
    """`Lookup(t0, i, j)`: element [i, j] of the captured tensor that `t0` names.

    The assumptions of the name say what the elements are; see `captured_name`.
    """

    nargs = None
    is_real = True

    def _eval_is_integer(self) -> bool | None:
        return self.args[0].is_integer

    def _eval_is_nonnegative(self) -> bool | None:
        return self.args[0].is_nonnegative


def is_condition(expr: Any) -> bool:
    """Whether an expression is true or false rather than a number."""
    return isinstance(expr, Boolean) and not isinstance(expr, sympy.Symbol)


def is_captured(symbol: sympy.Basic) -> bool:
    """Whether a symbol names a captured tensor (`t0`, `t1`, ...)."""
    return isinstance(symbol, sympy.Symbol) and symbol.name[:1] == "t" and symbol.name[1:].isdigit()


def captured_slots(expr: sympy.Basic) -> list[int]:
    """Return the slots of the captured tensors an expression reads, in order."""
    return sorted(int(str(symbol)[1:]) for symbol in expr.free_symbols if is_captured(symbol))


def reads(expr: sympy.Basic, slots: set[int]) -> bool:
    """Whether an expression reads a captured tensor in one of these slots."""
    return bool(slots) and not slots.isdisjoint(captured_slots(expr))


def slot_of(lookup: Any) -> int:
    """Return the slot of the captured tensor that a look-up reads, but for its indices."""
    return int(lookup.args[0].name[1:])


def captured_name(slot: int, kind: str) -> sympy.Symbol:
    """Return the name of the captured tensor in a slot; `kind` is its elements': bool, int,
    int64, float or float64."""
    facts = {"real": True} if kind.startswith("float") else {"integer": True}
    if kind == "bool":
        facts["nonnegative"] = True
    return sympy.Symbol(f"t{slot}", **facts)
