"""Bounds of the integers in a kernel, which decide between 32 and 64 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sympy
import torch

from tilegen.masks.language.elements import BOUNDS
from tilegen.masks.language.evaluation import Walk
from tilegen.masks.language.integers import is_int
from tilegen.masks.language.nodes import ShiftLeft, Where
from tilegen.masks.language.symbols import (
    FIRST,
    LAST,
    SEQLEN_KV,
    SEQLEN_Q,
    B,
    H,
    K,
    Lookup,
    Q,
    slot_of,
)
from tilegen.masks.language.value_bounds import LARGEST, Interval, intervals, whole
from tilegen.masks.language.widths import Wrapped

Bounds = tuple[int, int]
"""Smallest and largest value, both inclusive."""

MAX_LENGTH = 2**28
"""Longest sequence of a call with a mask or score that computes with positions."""
INT32: Bounds = BOUNDS["int32"]
ANYTHING: Bounds = (-LARGEST, LARGEST)
"""Bounds of integers of which nothing is known."""
REALS = (-math.inf, math.inf)
KNOWN: dict[sympy.Basic, Bounds] = {
    **{symbol: (0, MAX_LENGTH - 1) for symbol in (Q, K, FIRST, LAST)},
    **{symbol: (1, MAX_LENGTH) for symbol in (SEQLEN_Q, SEQLEN_KV)},
    **{symbol: (0, 2**31 - 1) for symbol in (B, H)},
}
"""Bounds of symbols."""


class Sizes:
    """Bounds of the integers in a kernel: those of one tile that holds all positions of the longest
    sequences."""

    def __init__(self, known: Mapping[sympy.Basic, Bounds], wide: set[int]) -> None:
        """`known` bounds symbols, and by name the elements of captured tensors; those in `wide`
        slots have 64 bits."""
        self._known = KNOWN | dict(known)
        self._wide = wide
        device = torch.device("cpu")
        self._bounds = Walk(intervals({}), (), self._of_symbol, device, refined=_refined)

    def _of_symbol(self, expr: Any) -> Interval:
        name = expr.args[0] if isinstance(expr, Lookup) else expr
        low, high = self._known.get(name, ANYTHING if name.is_integer else REALS)
        return Interval(*(torch.tensor(end, device="cpu") for end in (low, high)))

    def bounds(self, expr: sympy.Basic) -> Bounds:
        """Return the bounds of a number in a prepared expression."""
        found = whole(self._bounds(expr))
        return int(found.lo), int(found.hi)

    def is_natural(self, expr: sympy.Basic) -> bool:
        """Whether a value is surely not negative, as clipped indices are."""
        return bool(expr.is_nonnegative) or (is_int(expr) and self.bounds(expr)[0] >= 0)

    def is_positive(self, expr: sympy.Basic) -> bool:
        """Whether an integer is surely above 0."""
        return bool(expr.is_positive) or self.bounds(expr)[0] > 0

    def fits(self, expr: sympy.Basic) -> bool:
        """Whether an integer surely fits into 32 bits."""
        low, high = self.bounds(expr)
        return INT32[0] <= low and high <= INT32[1]

    def is_wide(self, expr: sympy.Basic) -> bool:
        """Whether the source of an integer has 64 bits."""
        match expr:
            case sympy.Number():
                return not self.fits(expr)
            case sympy.Symbol():
                return expr in (B, H)
            case Lookup():
                return slot_of(expr) in self._wide
            case sympy.Add() | sympy.Mul() | sympy.Pow() | ShiftLeft() if not self.fits(expr):
                return True
            case Where():
                return any(map(self.is_wide, expr.args[1:]))
            case Wrapped():
                return False
            case _ if not is_int(expr):
                return True
            case _:
                return any(map(self.is_wide, expr.args))


def _refined(expr: Any, found: Any) -> Any:
    """Return bounds that hold no negative numbers where an expression has none."""
    if isinstance(found, Interval) and not is_int(expr) and expr.is_nonnegative:
        return Interval(found.lo.nan_to_num(0).clamp(min=0), found.hi)
    return found
