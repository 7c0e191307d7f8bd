"""Derive the best tiles of every schedule, and the words that it moves with them.

A schedule moves words(tiles) and must hold held(tiles) <= M. By the Karush-Kuhn-Tucker conditions,
a tile side that takes room and saves no words is at its lower bound `c`; the others make the
Lagrangian stationary with all of M in use. Only the conditions are stated here: words and
footprints come from `schedules`, and SymPy solves. Words are words of the inputs; an fp32 word
counts as `alpha` of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import sympy as sp

from tilegen.model.symbols import (
    UNMASKED,
    B,
    B_c,
    B_d,
    B_e,
    B_k,
    B_p,
    B_r,
    M,
    N_kv,
    N_q,
    alpha,
    c,
    d,
    d_qk,
    d_v,
    s,
    x,
)
from tilegen.theory.schedules import SCHEDULES, Schedule, smooth

SIDES = (B_r, B_c, B_p, B_e, B_d, B_k, B)
"""All sides that a tile can have."""

PASSES: dict[str, tuple[str, ...]] = {"bwd_two_pass": ("bwd_dkdv", "bwd_dq")}
"""Schedules made of several kernels, each with its own tiles. The preprocess, and the kernel that
rounds dQ, move O(N d) words, which leading terms ignore."""


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The solution of a tile problem."""

    tiles: Mapping[sp.Symbol, sp.Expr]
    prices: tuple[sp.Expr, ...]
    """Words that one more word of memory would save, for each phase; positive."""


def optimal_tiles(
    words: sp.Expr, held: Sequence[sp.Expr], sides: Sequence[sp.Symbol], memory: sp.Expr = M
) -> Optimum:
    """Return the tiles that minimise `words` with every `held` <= `memory` and sides >= `c`.

    `words` and `held` must be polynomials in the sides and their inverses, with all other symbols
    positive. Raises ValueError unless exactly one solution is positive.
    """
    lowest, free = _split_sides(words, sides)
    limits = [limit.subs(lowest) for limit in held]
    limits = [limit for limit in limits if limit.free_symbols & set(free)]
    multipliers = [sp.Dummy("lambda", positive=True) for _ in limits]
    saved = sp.Add(*(price * limit for price, limit in zip(multipliers, limits, strict=True)))
    stationary = [sp.diff(words.subs(lowest) + saved, side) for side in free]
    tight = [limit - memory for limit in limits]
    tiles, prices = _solve(stationary, tight, free, multipliers)
    return Optimum(tiles={**lowest, **tiles}, prices=prices)


# --------------------------------------------------------------------------------------------------
# Exact tiles, and the constants of section "leading terms"


@cache
def exact_tiles(schedule: str) -> Mapping[sp.Symbol, sp.Expr]:
    """Return the best tiles of a schedule that streams along one side, without dropping small
    terms.

    For the Q-stationary forward B_c = c and B_r = (M - n c (d_qk + d_v)) / (...): memory goes to
    B_r, and B_c is as large as latency and matrix instructions require. Tiles are real numbers that
    need not divide anything. Raises ValueError for schedules with several phases or more free
    sides.
    """
    record = SCHEDULES[schedule]
    if len(record.phases) != 1:
        raise ValueError(f"expected a schedule of one phase, got {schedule}")
    words = smooth(record.weighted_words().subs(UNMASKED))
    return optimal_tiles(words, record.weighted_phases(), _sides(record)).tiles


@cache
def product_tiles() -> Mapping[sp.Symbol, sp.Expr]:
    """Return the tiles of a matrix product that sums over chunks of c: sqrt(M + c^2) - c each.

    They minimise N_q N_kv d (1 / B_r + 1 / B_c) with B_r B_c + c (B_r + B_c) words on chip.
    """
    words = N_q * N_kv * d_qk * (1 / B_r + 1 / B_c)
    return optimal_tiles(words, [B_r * B_c + c * (B_r + B_c)], (B_r, B_c)).tiles


@cache
def leading_tiles(schedule: str) -> Mapping[sp.Symbol, sp.Expr]:
    """Return the best tiles for M to infinity at a fixed x = d / sqrt(M), in units of sqrt(M).

    Sides at their lower bound are 0 in these units, and are left out.
    """
    return _leading_tiles(SCHEDULES[schedule])


@cache
def leading_words(schedule: str) -> sp.Expr:
    """Return words / N^2 of a schedule at its best tiles, in x = d / sqrt(M), alpha and kappa.

    The limit for N and M to infinity, where chunks and streamed rows need no room. The papers use
    alpha = 1. If M > d^2 / alpha, B_e may be wider than d: see `narrow_words`.
    """
    if schedule in PASSES:
        return sp.factor(sp.Add(*(leading_words(part) for part in PASSES[schedule])))
    return words_at(schedule, leading_tiles(schedule))


@cache
def narrow_words(schedule: str) -> tuple[sp.Expr, sp.Expr]:
    """Return (words / N^2 with B_e = d, the x below which the best B_e is wider than d).

    Raises ValueError for schedules without a free B_e.
    """
    wide = leading_tiles(schedule).get(B_e)
    if wide is None:
        raise ValueError(f"{schedule} has no free B_e")
    (below,) = sp.solve(wide - x, x)
    tiles = _leading_tiles(SCHEDULES[schedule], {B_e: x})
    return words_at(schedule, tiles), below


def words_at(schedule: str, tiles: Mapping[sp.Symbol, sp.Expr]) -> sp.Expr:
    """Return words / N^2 for tiles in units of sqrt(M)."""
    return _tidy(_scaled_words(SCHEDULES[schedule]).subs(tiles))


@cache
def crossover(large_cache: str, small_cache: str, *, narrow: bool = False) -> sp.Expr:
    """Return the x = d / sqrt(M) above which the small-cache schedule moves fewer words.

    The theorems (Saha and Ye, 3.1; Li et al., 1.1) place it at M = Theta(d^2). `narrow` limits B_e
    to d (see `narrow_words`), which matters if the result is below 1 / sqrt(alpha). The backward
    with equal words then crosses at M = 1.126 d^2 instead of 1.127.
    """
    small = narrow_words(small_cache)[0] if narrow else leading_words(small_cache)
    difference = leading_words(large_cache) - small
    (at,) = (root for root in sp.solve(difference, x) if _positive(root))
    return at


def _leading_tiles(
    schedule: Schedule, fixed: Mapping[sp.Symbol, sp.Expr] | None = None
) -> Mapping[sp.Symbol, sp.Expr]:
    fixed = fixed or {}
    words = _scaled_words(schedule)
    scaled = [side for side in _sides(schedule) if not sp.diff(words, side).is_nonnegative]
    limits = [limit.subs(fixed) for limit in _scaled_held(schedule, scaled)]
    free = [side for side in scaled if side not in fixed]
    best = optimal_tiles(words.subs(fixed), list(dict.fromkeys(limits)), free, memory=sp.Integer(1))
    return {side: _tidy(value) for side, value in best.tiles.items()} | dict(fixed)


def _sides(schedule: Schedule) -> list[sp.Symbol]:
    held = sp.Tuple(*schedule.weighted_phases()).free_symbols
    return [side for side in SIDES if side in held]


_m = sp.Symbol("m", positive=True)  # sqrt(M)


def _scaled_words(schedule: Schedule) -> sp.Expr:
    """Return words / N^2 with d = x and all sides in units of sqrt(M), for M to infinity."""
    words = schedule.per_score()
    scale = {side: _m * side for side in _sides(schedule)} | {d: _m * x}
    return sp.expand(words.subs(scale, simultaneous=True)).coeff(_m, 0)


def _scaled_held(schedule: Schedule, sides: Sequence[sp.Symbol]) -> list[sp.Expr]:
    """Return words held / M in the same units; sides not in `sides` stay finite, so they vanish."""
    scale = {side: _m * side for side in sides} | {d_qk: _m * x, d_v: _m * x}
    return [
        sp.expand(phase.subs(scale, simultaneous=True)).coeff(_m, 2)
        for phase in schedule.weighted_phases()
    ]


def _tidy(value: sp.Expr) -> sp.Expr:
    """Simplify an expression, cancelling roots in denominators."""
    roots = {symbol: sp.Dummy(symbol.name, positive=True) ** 2 for symbol in (alpha, s)}
    back = {square.base: sp.sqrt(symbol) for symbol, square in roots.items()}
    plain = sp.factor(sp.simplify(value.subs(roots)), deep=True)
    plain = sp.simplify(sp.cancel(plain, extension=True))
    return sp.collect(sp.expand(plain), x, sp.factor).subs(back)


# --------------------------------------------------------------------------------------------------
# Conditions of Karush, Kuhn and Tucker


def _split_sides(
    words: sp.Expr, sides: Sequence[sp.Symbol]
) -> tuple[dict[sp.Symbol, sp.Expr], list[sp.Symbol]]:
    """Separate the sides at their lower bound from the free sides.

    Every footprint grows with every side. If words do not decrease with a side, the multiplier of
    `side >= c` is positive, so the side is c by complementary slackness.
    """
    lowest: dict[sp.Symbol, sp.Expr] = {}
    free: list[sp.Symbol] = []
    for side in sides:
        if sp.diff(words, side).is_nonnegative:
            lowest[side] = c
        else:
            free.append(side)
    return lowest, free


def _solve(
    stationary: Sequence[sp.Expr],
    tight: Sequence[sp.Expr],
    free: Sequence[sp.Symbol],
    multipliers: Sequence[sp.Dummy],
) -> tuple[dict[sp.Symbol, sp.Expr], tuple[sp.Expr, ...]]:
    """Return the positive sides and multipliers that satisfy all equations."""
    real = {side: sp.Dummy(side.name, positive=True) for side in free}  # reals, not integers
    back = {dummy: side for side, dummy in real.items()}
    equations = [equation.subs(real) for equation in (*stationary, *tight)]
    unknowns = [*back, *multipliers]
    solutions = [
        {key: sp.simplify(value) for key, value in solution.items()}
        for solution in sp.solve(equations, unknowns, dict=True)
    ]
    solutions = [x for x in solutions if all(_positive(x[key]) for key in unknowns)]
    if len(solutions) != 1:
        raise ValueError(f"expected one positive solution of {equations}, found {solutions}")
    tiles = {back[dummy]: solutions[0][dummy] for dummy in back}
    return tiles, tuple(solutions[0][price] for price in multipliers)


def _positive(value: sp.Expr) -> bool:
    """Check whether a solution is positive for an M that is large beside the squared head dims."""
    sample = {symbol: sp.Integer(3) for symbol in value.free_symbols} | {M: sp.Integer(10) ** 6}
    at = sp.N(value.subs(sample))
    return bool(at.is_real and at > 0)
