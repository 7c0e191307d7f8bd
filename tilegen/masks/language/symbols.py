"""Symbols of mask and score expressions, and captured tensors inside them."""

from __future__ import annotations

from typing import Any

import sympy

from tilegen.errors import Unsupported

B, H, Q, K = sympy.symbols("b h q k", integer=True, nonnegative=True)
"""Batch, query head, query row, key-value column."""
SEQLEN_Q, SEQLEN_KV = sympy.symbols("seqlen_q seqlen_kv", integer=True, positive=True)
FIRST, LAST = sympy.symbols("first last", integer=True, nonnegative=True)
"""First and last index of a stationary tile."""
S = sympy.Symbol("s", real=True)
"""A score after scaling: what a score change starts from."""


class Lookup(sympy.Function):
    """`Lookup(t0, i, j)`: element [i, j] of the captured tensor that `t0` names.

    The name says what the elements are: `captured_name`.
    """

    nargs = None

    def _eval_is_real(self) -> bool:
        return True

    def _eval_is_integer(self) -> bool | None:
        return self.args[0].is_integer

    def _eval_is_nonnegative(self) -> bool | None:
        return self.args[0].is_nonnegative

    def fdiff(self, argindex: int = 1) -> Any:
        """An index has no derivative."""
        raise Unsupported(f"expected an index that does not depend on the score, got {self}")


def captured_name(slot: int, kind: str) -> sympy.Symbol:
    """Return the name of the captured tensor in a slot; `kind` is its elements': bool, int,
    int64, float or float64."""
    facts = {"real": True} if kind.startswith("float") else {"integer": True}
    if kind == "bool":
        facts["nonnegative"] = True
    return sympy.Symbol(f"t{slot}", **facts)
