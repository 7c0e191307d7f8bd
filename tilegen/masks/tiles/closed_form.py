"""The mask compiler: from a predicate to the tiles it leaves, in closed form.

A kernel keeps one tile of rows (or columns) on chip and streams tiles of the other axis past it.
For a stationary tile
[first, last], a streamed index is *live* if some stationary index is kept with it, *dropped* if
some is not. A streamed tile that misses the live set is empty, one that misses the dropped set
is full, all others are partial.

Both sets are unions of intervals and come from the predicate by Fourier-Motzkin elimination of the
stationary index: the live set from the predicate, the dropped set from its negation. With unit
coefficients the result is exact over the integers; otherwise both sets may come out too large,
which costs time but never correctness. Numbers looked up per row or column can be eliminated where
they never fall.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from tilegen.errors import Unsupported
from tilegen.masks.form import Side
from tilegen.masks.language.algebra import (
    add,
    at_most,
    both,
    conjuncts,
    either,
    floor_divide,
    less,
    maximum,
    minimum,
    multiply,
    negative,
    opposite,
    subtract,
)
from tilegen.masks.language.expr import (
    FALSE,
    FIRST,
    LAST,
    SEQLEN_KV,
    SEQLEN_Q,
    TRUE,
    ZERO,
    B,
    Expr,
    H,
    K,
    Q,
    slot_of,
)
from tilegen.masks.language.integers import combined, linear
from tilegen.masks.language.limits import limits
from tilegen.masks.language.rewriting import made, replaced
from tilegen.masks.mask import Mask
from tilegen.masks.pairs import AT, named
from tilegen.masks.remembered import by_mask
from tilegen.masks.tiles.containment import outermost
from tilegen.masks.tiles.intervals import Edges
from tilegen.masks.usual import UNLISTED

MAX_CONJUNCTIONS = 16
"""Most conjunctions of a predicate in disjunctive normal form; one with more goes to tile lists."""
MAX_EXPANDED = 256
"""Most conjunctions before equal ones are joined: more are not even written down."""

MAX_RANGES = 3
"""Most live, and most dropped, intervals away from the ends of the sequence that a kernel merges;
masks with more go to lists."""


@dataclass(frozen=True)
class Interval:
    """Half-open range [lo, hi) of a streamed index: expressions in FIRST, LAST and the lengths, or
    None where the range has no end."""

    lo: Expr | None
    hi: Expr | None
    guards: tuple[Expr, ...] = ()
    """Expressions that must all be >= 0, else the interval is empty: two bottom-right masks may
    never meet."""

    @property
    def nonempty(self) -> Expr:
        """The condition under which the interval holds anything."""
        holds = TRUE if self.lo is None or self.hi is None else less(self.lo, self.hi)
        return both(holds, *(at_most(0, guard) for guard in self.guards))

    @property
    def ends(self) -> tuple[Expr, Expr]:
        """Both ends of an interval that has two."""
        assert self.lo is not None
        assert self.hi is not None
        return self.lo, self.hi

    @property
    def is_bounded(self) -> bool:
        """Whether the interval has two ends."""
        return self.lo is not None and self.hi is not None


@dataclass(frozen=True)
class StreamSets:
    """The streamed indices of one stationary tile: those in no `live` interval are dropped for all
    of the tile, those in no `dropped` interval kept for all of it. The end of the sequence bounds
    `live`; indices beyond it are not in `dropped`."""

    live: tuple[Interval, ...]
    dropped: tuple[Interval, ...]
    length: Expr
    """The number of streamed indices: a length of the call."""

    @property
    def bounds(self) -> list[Expr]:
        """The expressions that bound the intervals."""
        intervals = (*self.live, *self.dropped)
        ends = [end for one in intervals for end in (one.lo, one.hi, *one.guards)]
        return [end for end in ends if end is not None]

    @property
    def is_short(self) -> bool:
        """Whether a kernel can visit the intervals one after the other."""
        return all(
            sum(one.is_bounded for one in part) <= MAX_RANGES for part in (self.live, self.dropped)
        )

    @cached_property
    def full(self) -> Interval | None:
        """The indices that are kept for all of the tile, where these and the live ones are one
        interval each."""
        lo: list[Expr] = []
        hi: list[Expr] = [self.length]
        for interval in self.dropped:
            if interval.guards or interval.is_bounded:
                return None
            if interval.hi is not None:
                lo.append(interval.hi)
            else:  # without ends, nothing is kept for certain
                hi.append(ZERO if interval.lo is None else interval.lo)
        if len(self.live) != 1:
            return None
        return Interval(maximum(*lo) if lo else None, minimum(*hi))


def edges(interval: Interval, length: Expr | None = None) -> Edges:
    """Return the edges of an interval, as expressions. A live one is unbounded where it touches an
    end of the `length` indices."""
    is_live = length is not None
    lo = None if is_live and interval.lo is ZERO else interval.lo
    hi = None if is_live and interval.hi is length else interval.hi
    nonempty = interval.nonempty
    return Edges(lo, hi, None if nonempty is TRUE else nonempty)


@by_mask(256)
def depends_on(mask: Mask) -> frozenset[Expr]:
    """Return which of B and H the predicate depends on."""
    return mask.predicate().free & {B, H}


def stream_sets(mask: Mask, side: Side) -> StreamSets:
    """Return the live and the dropped intervals of a stationary tile [FIRST, LAST], in closed form.

    Raises Unsupported for what is not a combination of affine comparisons, naming the term.
    """
    solved = _solved(mask, side)
    if isinstance(solved, str):
        raise Unsupported(solved)
    return solved


@by_mask(512)
def _solved(mask: Mask, side: Side) -> StreamSets | str:
    """Return the sets, or the reason why there are none. The result is cached: every tile needs
    it."""
    try:
        return _solve_sets(mask, side)
    except Unsupported as refusal:
        return str(refusal)


def _solve_sets(mask: Mask, side: Side) -> StreamSets:
    stationary, streamed, length = (Q, K, SEQLEN_KV) if side == "rows" else (K, Q, SEQLEN_Q)
    most, sure = (named(mask.values, one) for one in mask.enclosing(AT, side))
    rising = {slot for slot, value in enumerate(mask.values) if value.rising}
    inside = [streamed, length - 1 - streamed]

    def solved(conjunction: list[Expr]) -> Interval:
        return _solve(_eliminate(conjunction, stationary, rising), streamed)

    def sets(most: Expr, sure: Expr) -> StreamSets:
        live = [solved([*one, *inside]) for one in _disjunctive_normal_form(most)]
        dropped = [solved(one) for one in _disjunctive_normal_form(opposite(sure))]
        return StreamSets(_some(live), _some(dropped), length)

    return _enclosing(most, sure, sets) if mask.form is UNLISTED else sets(most, sure)


def _enclosing(most: Expr, sure: Expr, sets: Callable[[Expr, Expr], StreamSets]) -> StreamSets:
    """Return the sets of the conditions without the terms that have no closed form: of one that
    holds wherever `most` does, and of one that holds only where `sure` does."""

    def is_short(*conditions: Expr) -> bool:
        try:
            return sets(*conditions).is_short
        except Unsupported:
            return False

    def without(terms: Expr, other: Expr) -> Expr:
        if terms.op in ("and", "or"):
            return made(terms, tuple(without(one, other) for one in terms.args))
        return terms if is_short(terms, terms) else other

    weaker, stronger = without(_normal(most), TRUE), without(_normal(sure), FALSE)
    return sets(weaker, stronger) if is_short(weaker, stronger) else sets(TRUE, FALSE)


def _normal(keep: Expr) -> Expr:
    """Push negations inwards until only comparisons are negated."""
    inner = keep.args[0] if keep.op == "not" else keep
    if inner.op not in ("and", "or"):
        return keep
    if keep.op != "not":
        return made(keep, tuple(map(_normal, keep.args)))
    join = either if inner.op == "and" else both
    return join(*(_normal(opposite(part)) for part in inner.args))


def _some(intervals: list[Interval]) -> tuple[Interval, ...]:
    """Return the intervals that can be non-empty and lie in no other interval, in the same order
    in every process."""
    possible = [one for one in intervals if one.nonempty is not FALSE]
    return tuple(outermost(sorted(possible, key=str)))


def _disjunctive_normal_form(keep: Expr) -> list[list[Expr]]:
    """Return conjunctions of integer expressions, each meaning `expression >= 0`."""
    keep = _in_comparisons(_normal(keep))
    too_many = f"expected a mask of at most {MAX_CONJUNCTIONS} conjunctions, got {keep}"
    if _conjunctions(keep) > MAX_EXPANDED:
        raise Unsupported(too_many)
    normal = list(dict.fromkeys(one for one in _expanded(keep) if one is not FALSE))
    if len(normal) > MAX_CONJUNCTIONS:
        raise Unsupported(too_many)
    return [
        [expression for atom in conjuncts(one) for expression in _at_least_zero(atom)]
        for one in normal
    ]


def _conjunctions(keep: Expr) -> int:
    """Return how many conjunctions a predicate is expanded to."""
    if keep.op not in ("and", "or"):
        return 1
    counts = [_conjunctions(part) for part in keep.args]
    return sum(counts) if keep.op == "or" else math.prod(counts)


def _expanded(keep: Expr) -> list[Expr]:
    if keep.op == "or":
        return [one for part in keep.args for one in _expanded(part)]
    if keep.op == "and":
        return [both(*parts) for parts in product(*map(_expanded, keep.args))]
    return [] if keep is FALSE else [keep]


def _in_comparisons(keep: Expr) -> Expr:
    """Return a predicate whose comparisons are of affine expressions, without `!=`, absolute
    values, minima and maxima. Raises Unsupported for any other."""
    if keep.op in ("and", "or"):
        return made(keep, tuple(map(_in_comparisons, keep.args)))
    if keep.is_const:
        return keep
    comparison = keep.args[0] if keep.op == "not" else keep
    if comparison.op not in ("lt", "le", "eq") or not comparison.args[0].is_int:
        raise Unsupported(f"expected a comparison of affine expressions in a mask, got {keep}")
    left, right = comparison.args
    if keep.op == "not":
        return either(_in_comparisons(less(left, right)), _in_comparisons(less(right, left)))
    room = subtract(right, left)
    terms, _ = linear(room)
    choices = [term for term in terms if term.op in ("abs", "max", "min")]
    if choices and comparison.op == "eq":
        return both(_in_comparisons(at_most(left, right)), _in_comparisons(at_most(right, left)))
    for term in terms:
        _check_term(term)
    if not choices:
        return comparison
    choice = min(choices, key=lambda term: term.key)
    factor = terms[choice]
    rest = subtract(room, multiply(factor, choice))
    of = (choice.args[0], negative(choice.args[0])) if choice.op == "abs" else choice.args
    join = either if (choice.op == "min") == (factor < 0) else both
    least = int(comparison.op == "lt")
    return join(*(_in_comparisons(at_most(least, add(rest, multiply(factor, one)))) for one in of))


def _check_term(term: Expr) -> None:
    """Raise Unsupported for a position in a term that is not linear."""
    if term in (Q, K) or term.op == "load" or any(_step(term, one) for one in (Q, K)):
        return
    if term.op in ("abs", "max", "min"):
        for arg in term.args:
            for part in linear(arg)[0]:
                _check_term(part)
    elif term.has(Q, K):
        raise Unsupported(f"expected sums of positions in a mask, got the term {term}")


def _at_least_zero(atom: Expr) -> list[Expr]:
    left, right = atom.args
    room = subtract(right, left)
    if atom.op == "eq":
        return [room, negative(room)]
    return [room - 1 if atom.op == "lt" else room]


def _coefficient(expression: Expr, symbol: Expr) -> tuple[int, Expr]:
    """Split `expression` into (integer coefficient of symbol, rest)."""
    terms, constant = linear(expression)
    coefficient = terms.pop(symbol, 0)
    rest = combined(terms, constant)
    if rest.has(symbol):
        raise Unsupported(
            f"expected an integer multiple of {symbol} in a mask, got the term {expression}"
        )
    return coefficient, rest


def _eliminate(inequalities: Iterable[Expr], symbol: Expr, rising: set[int]) -> list[Expr]:
    """Return inequalities without the symbol that hold where some FIRST <= symbol <= LAST satisfies
    all `inequalities` (each >= 0).

    Fourier-Motzkin: every lower bound on the symbol must not exceed any upper bound. Look-ups in
    `rising` values count with the largest value that they can add.
    """
    free: list[Expr] = []
    lower: list[tuple[int, Expr]] = []
    upper: list[tuple[int, Expr]] = []
    for inequality in inequalities:
        coefficient, rest = _coefficient(_largest(inequality, symbol, rising), symbol)
        if coefficient == 0:
            free.append(rest)
        else:
            (lower if coefficient > 0 else upper).append((abs(coefficient), rest))
    pairs = [(a, low, b, high) for a, low in lower for b, high in [*upper, (1, LAST)]]
    pairs += [(1, -FIRST, b, high) for b, high in upper]  # FIRST <= LAST holds anyway
    return free + [add(multiply(b, low), multiply(a, high)) for a, low, b, high in pairs]


def _step(term: Expr, symbol: Expr) -> int:
    """Return n of `symbol // n`, 0 for any other term."""
    is_step = term.op == "floordiv" and term.args[0] is symbol and term.args[1].is_const
    return max(0, term.args[1].value) if is_step else 0


def _largest(expression: Expr, symbol: Expr, rising: set[int]) -> Expr:
    """Return `expression` with what rises with `symbol`, look-ups and quotients, replaced by its
    values at the ends of the stationary tile."""
    terms, constant = linear(expression)
    parts: list[Expr] = []
    for term, factor in terms.items():
        rises = _step(term, symbol) or (
            term.op == "load" and slot_of(term) in rising and term.args[-1] is symbol
        )
        if rises:
            term = replaced(term, {symbol: FIRST if factor < 0 else LAST})
        parts.append(multiply(factor, term))
    return add(*parts, constant)


def _solve(inequalities: Iterable[Expr], symbol: Expr) -> Interval:
    """Return the interval of integers `symbol` that satisfies all inequalities (each >= 0)."""
    lo: list[Expr] = []
    hi: list[Expr] = []
    guards: list[Expr] = []
    for inequality in inequalities:
        terms, constant = linear(inequality)
        steps = [term for term in terms if _step(term, symbol)]
        others = {term: factor for term, factor in terms.items() if term not in steps[:1]}
        n, rest = 1, combined(others, constant)
        if steps and not rest.has(symbol):
            n, coefficient = _step(steps[0], symbol), terms[steps[0]]
        else:
            coefficient, rest = _coefficient(inequality, symbol)
        if coefficient > 0:
            lo.append(multiply(-n, floor_divide(rest, coefficient)))
        elif coefficient < 0:
            hi.append(multiply(n, add(floor_divide(rest, -coefficient), 1)))
        elif limits(rest)[0] < 0:
            guards.append(rest)
    return Interval(
        lo=maximum(*lo) if lo else None,
        hi=minimum(*hi) if hi else None,
        guards=tuple(sorted(guards, key=str)),
    )
