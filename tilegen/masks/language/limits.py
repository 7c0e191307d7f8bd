"""Smallest and largest values of integer expressions, as Python numbers. They simplify
comparisons, and show which floats are exact."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product

from tilegen.masks.language.elements import BOUNDS
from tilegen.masks.language.expr import FIRST, LAST, SEQLEN_KV, SEQLEN_Q, B, Expr, H, K, Q

Ends = tuple[float, float]
"""Smallest and largest value: integers, or infinite."""

ANYTHING: Ends = (-math.inf, math.inf)
LARGEST = 2**62
"""Largest integer that is bounded: beyond it sums and products may wrap around."""
MAX_LENGTH = 2**28
"""Longest sequence of a call with a mask or score that computes with positions."""
LENGTH = 2**22
"""Longest sequence for which floats of positions are taken for exact: PyTorch rounds them at
2**24."""
_OF_KIND: dict[str, Ends] = {"bool": (0, 1), "natural": (0, BOUNDS["int32"][1])}


def limits(expr: Expr) -> Ends:
    """Return the smallest and the largest value of an integer, for sequences of any length."""
    if expr.limits is None:
        ends = _limits(expr)
        if any(LARGEST < abs(end) < math.inf for end in ends):
            ends = ANYTHING  # it may wrap around
        object.__setattr__(expr, "limits", ends)
    known: Ends = expr.limits
    return known


def _limits(expr: Expr) -> Ends:
    match expr.op:
        case "const":
            return expr.value, expr.value
        case "symbol":
            return (1 if expr in (SEQLEN_Q, SEQLEN_KV) else 0), math.inf
        case "load":
            return _OF_KIND.get(expr.value[1], BOUNDS.get(expr.dtype, ANYTHING))
        case "cast":
            return BOUNDS.get(expr.dtype, ANYTHING)
        case "where":
            return _hull(map(limits, expr.args[1:]))
        case "sign":
            return -1, 1
        case _:
            return _of_ends(expr, [limits(arg) for arg in expr.args])


def _of_ends(expr: Expr, ends: list[Ends]) -> Ends:
    match expr.op:
        case "add":
            return sum(low for low, _ in ends), sum(high for _, high in ends)
        case "mul" | "power":
            total = ends[0]
            for factor in ends[1:] if expr.op == "mul" else ends * (expr.value - 1):
                values = [_times(a, b) for a, b in product(total, factor)]
                total = min(values), max(values)
            is_even = expr.op == "power" and expr.value % 2 == 0
            return (max(0, total[0]), total[1]) if is_even else total
        case "max":
            return max(low for low, _ in ends), max(high for _, high in ends)
        case "min":
            return min(low for low, _ in ends), min(high for _, high in ends)
        case "abs":
            low, high = ends[0]
            return max(0, low, -high), max(-low, high)
        case "floordiv":
            (low, high), (least, most) = ends
            if 0 < least == most < math.inf:
                return _divided(low, least), _divided(high, least)
            return (0, high) if low >= 0 and least >= 0 else ANYTHING
        case "mod":
            (low, high), (least, most) = ends
            if least < 0:
                return ANYTHING
            return 0, min(max(most - 1, 0), high if low >= 0 else math.inf)
        case "bitand" if ends[0][0] >= 0 or ends[1][0] >= 0:
            return 0, min(high for low, high in ends if low >= 0)
        case "bitor" | "bitxor" | "shr" if ends[0][0] >= 0 and ends[1][0] >= 0:
            if expr.op == "shr":
                return 0, ends[0][1]
            most = max(ends[0][1], ends[1][1])
            return 0, most if math.isinf(most) else 2 ** int(most).bit_length() - 1
        case _:
            return ANYTHING


def _divided(end: float, by: float) -> float:
    return end if math.isinf(end) else end // by


def _times(a: float, b: float) -> float:
    return 0 if a == 0 or b == 0 else a * b


def _hull(ends: Iterable[Ends]) -> Ends:
    lows, highs = zip(*ends, strict=True)
    return min(lows), max(highs)


def bounded(expr: Expr, length: int = LENGTH) -> Ends:
    """Return the smallest and the largest value of an integer, for sequences of up to `length`."""
    return _bounded(expr, length, {})


def _bounded(expr: Expr, length: int, known: dict[Expr, Ends]) -> Ends:
    if expr not in known:
        if expr in (B, H, Q, K, FIRST, LAST, SEQLEN_Q, SEQLEN_KV):
            ends: Ends = (0, length)
        elif expr.op in ("const", "symbol", "load", "cast", "sign"):
            ends = limits(expr)
        elif expr.op == "where":
            ends = _hull([_bounded(arg, length, known) for arg in expr.args[1:]])
        else:
            ends = _of_ends(expr, [_bounded(arg, length, known) for arg in expr.args])
        known[expr] = ends
    return known[expr]
