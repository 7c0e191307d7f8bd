"""The mask compiler: from a predicate to the tiles it leaves, in closed form.

A kernel keeps one tile of rows (or columns) on chip and streams tiles of the other axis past it.
For a stationary tile
[first, last], a streamed index is *live* if some stationary index is kept with it, *spoiled* if
some is dropped. A streamed tile that misses the live set is empty, one that misses the spoiled set
is full, all others are partial.

Both sets come from the predicate by Fourier-Motzkin elimination of the stationary index: the live
set from the predicate, the spoiled set from its negation. With unit coefficients, which all masks
here have, the result is exact over the integers; otherwise both sets may come out too large, which
costs time but never correctness.
"""

# SymPy is typed only in part, and where it is, too narrowly:
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportReturnType=false, reportCallIssue=false, reportAssignmentType=false
# pyright: reportMatchNotExhaustive=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import sympy
from numpy.typing import NDArray
from sympy.logic.boolalg import Boolean, to_dnf

from tilegen.errors import Unsupported
from tilegen.masks.mask import And, Mask, SlidingWindow
from tilegen.masks.printer import IndexPrinter

Side = Literal["rows", "columns"]
"""What stays on chip: a tile of query rows (KV tiles stream), or a tile of KV columns (query tiles
stream)."""

Q, K = sympy.symbols("q k", integer=True, nonnegative=True)
SEQLEN_Q, SEQLEN_KV = sympy.symbols("seqlen_q seqlen_kv", integer=True, positive=True)
FIRST, LAST = sympy.symbols("first last", integer=True, nonnegative=True)


@dataclass(frozen=True)
class Interval:
    """Half-open range [lo, hi) of a streamed index; expressions in FIRST, LAST and the lengths, or
    infinite."""

    lo: sympy.Expr
    hi: sympy.Expr
    guards: tuple[sympy.Expr, ...] = ()
    """The interval is empty unless all of these are >= 0 (two bottom-right masks may never
    meet)."""

    @property
    def nonempty(self) -> Boolean:
        """The condition under which the interval holds anything."""
        return sympy.And(sympy.Lt(self.lo, self.hi), *(sympy.Ge(guard, 0) for guard in self.guards))


@dataclass(frozen=True)
class StreamBounds:
    """What one stationary tile sees: streamed indices outside `live` are all dropped, those inside
    `full` all kept."""

    live: Interval
    full: Interval


@dataclass(frozen=True)
class TileRanges:
    """The streamed tiles of every stationary tile (one array element each).

    Tiles [lo, full_lo) and [full_hi, hi) are partial, [full_lo, full_hi) are full, all others
    empty.
    """

    lo: NDArray[np.int64]
    full_lo: NDArray[np.int64]
    full_hi: NDArray[np.int64]
    hi: NDArray[np.int64]
    visited_rows: int
    """Streamed rows inside the sequence, added up over all visited tiles: what the loads of a
    kernel read."""

    @property
    def visited_tiles(self) -> int:
        """Non-empty tiles: `A(block_m, block_n)`."""
        return int((self.hi - self.lo).sum())

    @property
    def full_tiles(self) -> int:
        """Tiles that run without mask code."""
        return int((self.full_hi - self.full_lo).sum())

    @property
    def partial_tiles(self) -> int:
        """Tiles crossed by the mask's edge or by the end of the sequence."""
        return self.visited_tiles - self.full_tiles


def predicate(mask: Mask) -> Boolean:
    """Return the mask as a SymPy Boolean in Q, K, SEQLEN_Q and SEQLEN_KV."""
    return sympy.sympify(mask.keep(Q, K, SEQLEN_Q, SEQLEN_KV))


@lru_cache(maxsize=256)
def stream_bounds(mask: Mask, side: Side) -> StreamBounds:
    """Return the live and the full interval of a stationary tile [FIRST, LAST], in closed form.

    Raises Unsupported for predicates that are not a conjunction of affine comparisons, naming the
    term.
    """
    stationary, streamed, length = (Q, K, SEQLEN_KV) if side == "rows" else (K, Q, SEQLEN_Q)
    keep = predicate(mask)
    inside = [streamed, length - 1 - streamed]
    live = [
        _solve(_eliminate([*conjunction, *inside], stationary), streamed)
        for conjunction in _disjunctive_normal_form(keep)
    ]
    if len(live) != 1:
        raise Unsupported(
            f"expected a conjunction of comparisons, got {keep}; combine masks with & only"
        )
    past_the_end = streamed - length
    spoiled = [
        _solve(_eliminate(conjunction, stationary), streamed)
        for conjunction in [*_disjunctive_normal_form(sympy.Not(keep)), [past_the_end]]
    ]
    return StreamBounds(live=live[0], full=_complement(spoiled))


def tile_ranges(
    mask: Mask, side: Side, *, seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int
) -> TileRanges:
    """Return the tiles every stationary tile visits, at given lengths; the same arithmetic as the
    emitted kernels'."""
    if side == "rows":
        stationary_length, stationary_block, length, block = seqlen_q, block_m, seqlen_kv, block_n
    else:
        stationary_length, stationary_block, length, block = seqlen_kv, block_n, seqlen_q, block_m
    first = np.arange(0, stationary_length, stationary_block, dtype=np.int64)
    last = np.minimum(first + stationary_block, stationary_length) - 1
    live_lo, live_hi, nonempty, full_lo, full_hi = (
        _one_each(bound, first)
        for bound in _evaluator(mask, side)(first, last, seqlen_q, seqlen_kv)
    )
    lo = live_lo // block
    hi = np.where(nonempty, -(-live_hi // block), lo)
    # np.clip would do, in three times the time: tiles are few, but model and tuner ask often.
    full_lo = np.minimum(np.maximum(-(-full_lo // block), lo), hi)
    full_hi = np.minimum(np.maximum(full_hi // block, full_lo), hi)
    visited_rows = int((np.minimum(hi * block, length) - lo * block)[hi > lo].sum())
    return TileRanges(lo=lo, full_lo=full_lo, full_hi=full_hi, hi=hi, visited_rows=visited_rows)


def _one_each(bound: Any, like: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a bound as an array with one element per stationary tile."""
    if isinstance(bound, np.ndarray) and bound.shape == like.shape:
        return bound
    return np.full_like(like, bound)


@lru_cache(maxsize=1024)
def _evaluator(mask: Mask, side: Side) -> Any:
    """Return the bounds of a mask as a function of FIRST, LAST and the lengths."""
    alike, sides = _with_symbols(mask)
    evaluate = _evaluator_of(alike, side)
    return lambda *arguments: evaluate(*arguments, *sides.values())


@dataclass(frozen=True)
class _AnyWindow(SlidingWindow):
    """A window whose sides are symbols: SymPy solves it once, for windows of all widths."""

    def __post_init__(self) -> None:
        """Symbols need no check."""


def _with_symbols(mask: Mask) -> tuple[Mask, dict[sympy.Symbol, int]]:
    """Return a mask with symbols for the sides of its windows, and what these stand for."""
    sides: dict[sympy.Symbol, int] = {}

    def symbol(value: int | None) -> Any:
        if value is None:
            return None
        name = sympy.Symbol(f"side_{len(sides)}", integer=True, nonnegative=True)
        sides[name] = value
        return name

    parts = [
        _AnyWindow(symbol(part.left), symbol(part.right), part.alignment)
        if isinstance(part, SlidingWindow)
        else part
        for part in (mask.parts if isinstance(mask, And) else (mask,))
    ]
    return (And(tuple(parts)) if len(parts) > 1 else parts[0]), sides


@lru_cache(maxsize=256)
def _evaluator_of(alike: Mask, side: Side) -> Any:
    _, sides = _with_symbols(alike)
    bounds = stream_bounds(alike, side)
    # A full.lo of minus infinity is one that never cuts; full.hi is finite, since full tiles end
    # with the sequence.
    full_lo = sympy.S.Zero if bounds.full.lo.is_infinite else bounds.full.lo
    expressions = [bounds.live.lo, bounds.live.hi, bounds.live.nonempty, full_lo, bounds.full.hi]
    return sympy.lambdify(
        [FIRST, LAST, SEQLEN_Q, SEQLEN_KV, *sides],
        expressions,
        modules=[{"maximum": np.maximum, "minimum": np.minimum}],
        printer=IndexPrinter({}, ""),
    )


def _disjunctive_normal_form(keep: Boolean) -> list[list[sympy.Expr]]:
    """Return conjunctions of integer expressions, each meaning `expression >= 0`."""
    keep = keep.replace(
        lambda node: isinstance(node, sympy.Ne),
        lambda node: sympy.Or(node.lhs < node.rhs, node.lhs > node.rhs),
    )
    normal = to_dnf(keep, simplify=False)
    if normal == sympy.false:
        return []
    return [
        [
            expression
            for atom in sympy.And.make_args(conjunction)
            for expression in _at_least_zero(atom)
        ]
        for conjunction in sympy.Or.make_args(normal)
    ]


def _at_least_zero(atom: Boolean) -> list[sympy.Expr]:
    match atom:
        case sympy.logic.boolalg.BooleanTrue():
            return []
        case sympy.Le(args=(low, high)) | sympy.Ge(args=(high, low)):
            return [high - low]
        case sympy.Lt(args=(low, high)) | sympy.Gt(args=(high, low)):
            return [high - low - 1]
        case sympy.Eq(args=(left, right)):
            return [left - right, right - left]
    raise Unsupported(f"expected a comparison of affine expressions in a mask, got {atom}")


def _coefficient(expression: sympy.Expr, symbol: sympy.Symbol) -> tuple[int, sympy.Expr]:
    """Split `expression` into (integer coefficient of symbol, rest)."""
    expression = sympy.expand(expression)
    coefficient = expression.coeff(symbol)
    rest = expression - coefficient * symbol
    if not coefficient.is_Integer or rest.has(symbol):
        raise Unsupported(
            f"expected an integer multiple of {symbol} in a mask, got the term {expression}"
        )
    return int(coefficient), rest


def _eliminate(inequalities: Iterable[sympy.Expr], symbol: sympy.Symbol) -> list[sympy.Expr]:
    """Return what `inequalities` (each >= 0) say once some FIRST <= symbol <= LAST satisfies them
    all.

    Fourier-Motzkin: every lower bound on the symbol must not exceed any upper bound.
    """
    free: list[sympy.Expr] = []
    lower: list[tuple[int, sympy.Expr]] = []
    upper: list[tuple[int, sympy.Expr]] = []
    for inequality in inequalities:
        coefficient, rest = _coefficient(inequality, symbol)
        if coefficient == 0:
            free.append(rest)
        else:
            (lower if coefficient > 0 else upper).append((abs(coefficient), rest))
    pairs = [(a, low, b, high) for a, low in lower for b, high in [*upper, (1, LAST)]]
    pairs += [(1, -FIRST, b, high) for b, high in upper]  # FIRST <= LAST holds anyway
    return free + [sympy.expand(b * low + a * high) for a, low, b, high in pairs]


def _solve(inequalities: Iterable[sympy.Expr], symbol: sympy.Symbol) -> Interval:
    """Return the interval of integers `symbol` that satisfies all inequalities (each >= 0)."""
    lo: list[sympy.Expr] = []
    hi: list[sympy.Expr] = []
    guards: list[sympy.Expr] = []
    for inequality in inequalities:
        coefficient, rest = _coefficient(inequality, symbol)
        if coefficient > 0:
            lo.append(-sympy.floor(rest / coefficient))
        elif coefficient < 0:
            hi.append(sympy.floor(rest / -coefficient) + 1)
        elif not rest.is_nonnegative:
            guards.append(rest)
    return Interval(
        lo=sympy.Max(*lo) if lo else sympy.S.NegativeInfinity,
        hi=sympy.Min(*hi) if hi else sympy.S.Infinity,
        guards=tuple(guards),
    )


def _complement(spoiled: list[Interval]) -> Interval:
    """Return the indices that no spoiled interval contains, all of which must be unbounded on one
    side."""
    lo: list[sympy.Expr] = []
    hi: list[sympy.Expr] = []
    for interval in spoiled:
        if interval.guards:
            raise Unsupported(
                f"expected mask conditions that involve both q and k, got {interval.guards[0]} >= 0"
            )
        if interval.lo == sympy.S.NegativeInfinity:
            lo.append(interval.hi)
        elif interval.hi == sympy.S.Infinity:
            hi.append(interval.lo)
        else:
            raise Unsupported(
                "expected a mask that keeps one interval per row and column; combine with & only"
            )
    return Interval(
        lo=sympy.Max(*lo) if lo else sympy.S.NegativeInfinity,
        hi=sympy.Min(*hi) if hi else sympy.S.Infinity,
    )
