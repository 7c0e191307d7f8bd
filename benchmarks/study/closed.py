"""Closed forms to compare tiles with: bounds, and the words that the best real-valued tiles move.

All in words / N^2 of one head with d = head_dim, at M words of fast memory; `element_bytes` says
what a word is, and so what an fp32 accumulator weighs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import sympy as sp

from tilegen.kernels.spec import Direction
from tilegen.model import bounds
from tilegen.model import symbols as s
from tilegen.model.traffic import ACCUMULATOR_BYTES, total_bytes
from tilegen.theory.optimum import exact_tiles, leading_words, narrow_words
from tilegen.theory.schedules import SCHEDULES

LARGE: dict[Direction, str] = {"forward": "fwd_q_stationary", "backward": "bwd_two_pass"}
SMALL: dict[Direction, str] = {"forward": "fwd_small_cache", "backward": "bwd_small_cache"}
ROWS_IN = 16
"""Fewest rows that an emitted tile streams at a time, `c` of the model."""
COLUMNS_IN = 32
"""Fewest columns that a slice of a head dim has."""


def accumulator_words(element_bytes: int) -> float:
    """Return alpha, the words that an accumulator weighs."""
    return ACCUMULATOR_BYTES / element_bytes


def lower_bounds(
    direction: Direction, seqlen: int, head_dim: int, memory: float, element_bytes: int
) -> dict[str, float]:
    """Return LB1, LB2 and the floor, in words / N^2; the best of them is the bound."""
    values = (seqlen, head_dim, memory, element_bytes)
    return {name: one(*values) / seqlen**2 for name, one in _bounds(direction).items()}


@cache
def _bounds(direction: Direction) -> dict[str, Callable[..., float]]:
    floor = total_bytes(bounds.floor_terms(direction)) / s.e
    lengths = dict.fromkeys((s.N_q, s.N_kv, s.n_q, s.n_kv, s.w), s.N)
    dense = lengths | {s.nnz: s.N**2, s.d_qk: s.d, s.d_v: s.d}
    single_head = {s.H_kv: 1, s.g: 1, s.P: 1}
    formulas: dict[str, Callable[..., float]] = {}
    for name, expression in (
        ("lb1", bounds.partition_bound()),
        ("lb2", bounds.product_bound()),
        ("floor", floor),
    ):
        plain = expression.subs(dense).subs(single_head)
        evaluate: Any = sp.lambdify((s.N, s.d, s.M, s.e), plain, modules="math")
        formulas[name] = evaluate
    return formulas


def ideal(direction: Direction, memory: float, head_dim: int, element_bytes: int) -> float:
    """Return the best known schedule's words / N^2 where chunks and streamed rows take no room."""
    return min(
        ideal_large(direction, memory, head_dim, element_bytes),
        ideal_small(direction, memory, head_dim, element_bytes),
    )


def ideal_large(direction: Direction, memory: float, head_dim: int, element_bytes: int) -> float:
    """Return the words / N^2 of FlashAttention's schedule: 4 x^2 forward, 14 x^2 backward for
    alpha = 1."""
    at = head_dim / math.sqrt(memory)
    return _in_x(leading_words(LARGE[direction]))(at, accumulator_words(element_bytes))


def ideal_small(direction: Direction, memory: float, head_dim: int, element_bytes: int) -> float:
    """Return the words / N^2 of the small-cache schedule: 1 + 4 x forward, 3 + 10 x backward for
    alpha = 1, and a little less where the best B_e would be wider than d."""
    at, weight = head_dim / math.sqrt(memory), accumulator_words(element_bytes)
    narrow, below = narrow_words(SMALL[direction])
    chosen = narrow if at < _in_x(below)(at, weight) else leading_words(SMALL[direction])
    return _in_x(chosen)(at, weight)


@cache
def _in_x(expression: sp.Expr) -> Callable[[float, float], float]:
    evaluate: Any = sp.lambdify((s.x, s.alpha), expression, modules="math")
    return evaluate


def chunked_large(
    direction: Direction, memory: float, head_dim: int, element_bytes: int
) -> float | None:
    """Return the words / N^2 of FlashAttention's schedule with tiles of any size, where what
    streams comes in ROWS_IN rows; None if not even that fits."""
    total = 0.0
    for kernel in ("fwd_q_stationary",) if direction == "forward" else ("bwd_dkdv", "bwd_dq"):
        tile, words = _streaming(kernel)
        rows = tile(memory, head_dim, accumulator_words(element_bytes))
        if rows < 1:
            return None
        total += words(rows, head_dim, accumulator_words(element_bytes))
    return total


@cache
def _streaming(kernel: str) -> tuple[Callable[..., float], Callable[..., float]]:
    """Return the rows that stay, of M, d and alpha, and words / N^2, of those rows, d and alpha."""
    side = s.B_c if kernel == "bwd_dkdv" else s.B_r
    rows: Any = exact_tiles(kernel)[side].subs({s.d_qk: s.d, s.d_v: s.d, s.c: ROWS_IN, s.n: 1})
    tile: Any = sp.lambdify((s.M, s.d, s.alpha), rows, modules="math")
    words: Any = sp.lambdify((side, s.d, s.alpha), SCHEDULES[kernel].per_score(), modules="math")
    return tile, words


def chunked_small(direction: Direction, memory: float, head_dim: int, element_bytes: int) -> float:
    """Return the words / N^2 of the emitted small-cache kernels with tiles of any size, where
    slices are COLUMNS_IN wide and rows come ROWS_IN at a time."""
    weight = accumulator_words(element_bytes)
    product = product_words(memory, head_dim, weight)
    if direction == "forward":
        return 1 + 2 * head_dim / square_tile(memory, weight, COLUMNS_IN) + product
    return 2 + 4 * head_dim / square_tile(memory, 2 * weight, COLUMNS_IN) + 3 * product


def product_words(memory: float, head_dim: int, weight: float) -> float:
    """Return d / B_e + d / B_p of a product that sums over rows: a square tile, or B_e = d where
    that would be wider."""
    side = square_tile(memory, weight, ROWS_IN)
    if side <= head_dim:
        return 2 * head_dim / side
    rows = (memory - ROWS_IN * head_dim) / (weight * head_dim + ROWS_IN)
    return 1 + head_dim / rows


def square_tile(memory: float, weight: float, chunk: int) -> float:
    """Return the side B of a tile with chunks, weight B^2 + 2 chunk B = M; see
    `optimum.product_tiles` for weight 1."""
    return (math.sqrt(chunk**2 + weight * memory) - chunk) / weight
