"""Bounds of the integers in a kernel, which decide between 32 and 64 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tilegen.masks.language.elements import BOUNDS
from tilegen.masks.language.evaluation import Walk
from tilegen.masks.language.expr import FIRST, LAST, SEQLEN_KV, SEQLEN_Q, B, Expr, H, K, Q, slot_of
from tilegen.masks.language.limits import LARGEST, MAX_LENGTH, limits
from tilegen.masks.language.value_bounds import Interval, intervals, whole

Bounds = tuple[int, int]
"""Smallest and largest value, both inclusive."""

INT32: Bounds = BOUNDS["int32"]
ANYTHING: Bounds = (-LARGEST, LARGEST)
"""Bounds of integers of which nothing is known."""
REALS = (-math.inf, math.inf)
KNOWN: dict[Expr | int, Bounds] = {
    **{symbol: (0, MAX_LENGTH - 1) for symbol in (Q, K, FIRST, LAST)},
    **{symbol: (1, MAX_LENGTH) for symbol in (SEQLEN_Q, SEQLEN_KV)},
    **{symbol: (0, 2**31 - 1) for symbol in (B, H)},
}
"""Bounds of symbols."""


class Sizes:
    """Bounds of the integers in a kernel: those of one tile that holds all positions of the longest
    sequences."""

    def __init__(self, known: Mapping[Expr | int, Bounds], wide: set[int]) -> None:
        """`known` bounds symbols, and by slot the elements of captured tensors; those in `wide`
        slots have 64 bits."""
        self._known = KNOWN | dict(known)
        self._wide = wide
        self._bounds = Walk(intervals({}), (), self._of_leaf, torch.device("cpu"))

    def _of_leaf(self, expr: Expr) -> Interval:
        name = slot_of(expr) if expr.op == "load" else expr
        low, high = self._known.get(name, ANYTHING if expr.is_int else REALS)
        if expr.is_int:
            least, most = limits(expr)
            low, high = max(low, least), min(high, most)
        return Interval(*(torch.tensor(end, device="cpu") for end in (low, high)))

    def bounds(self, expr: Expr) -> Bounds:
        """Return the bounds of a number."""
        ends = whole(self._bounds(expr))
        return int(ends.lo), int(ends.hi)

    def is_natural(self, expr: Expr) -> bool:
        """Return whether an integer is surely not negative, as clipped indices are."""
        return limits(expr)[0] >= 0 or self.bounds(expr)[0] >= 0

    def is_positive(self, expr: Expr) -> bool:
        """Return whether an integer is surely above 0."""
        return limits(expr)[0] > 0 or self.bounds(expr)[0] > 0

    def fits(self, expr: Expr) -> bool:
        """Return whether an integer surely fits into 32 bits."""
        low, high = self.bounds(expr)
        return INT32[0] <= low and high <= INT32[1]

    def is_wide(self, expr: Expr) -> bool:
        """Return whether the source of an integer has 64 bits."""
        match expr.op:
            case "const":
                return not self.fits(expr)
            case "symbol":
                return expr in (B, H)
            case "load":
                return slot_of(expr) in self._wide
            case "add" | "mul" | "power" | "shl" if not self.fits(expr):
                return True
            case "where":
                return any(map(self.is_wide, expr.args[1:]))
            case "cast" if expr.dtype in BOUNDS:
                return False
            case "cast":  # of a float
                return True
            case _:
                return any(map(self.is_wide, expr.args))
