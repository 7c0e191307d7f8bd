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
from typing import Any

import sympy
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean, to_dnf

from tilegen.errors import Unsupported
from tilegen.masks.language.integers import exact, is_int
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
    captured_name,
)
from tilegen.masks.mask import Mask, Side
from tilegen.masks.pairs import AT, named
from tilegen.masks.remembered import by_mask
from tilegen.masks.tiles.containment import outermost
from tilegen.masks.tiles.intervals import Edges
from tilegen.masks.usual import Unlisted

MAX_CONJUNCTIONS = 16
"""Most conjunctions of a predicate in disjunctive normal form; one with more goes to tile lists."""
MAX_EXPANDED = 256
"""Most conjunctions before equal ones are joined: more are not even written down."""

MAX_RANGES = 3
"""Most live, and most dropped, intervals away from the ends of the sequence that a kernel merges;
masks with more go to lists."""


@dataclass(frozen=True)
class Interval:
    """Half-open range [lo, hi) of a streamed index; expressions in FIRST, LAST and the lengths, or
    infinite."""

    lo: sympy.Expr
    hi: sympy.Expr
    guards: tuple[sympy.Expr, ...] = ()
    """Expressions that must all be >= 0, else the interval is empty: two bottom-right masks may
    never meet."""

    @property
    def nonempty(self) -> Boolean:
        """The condition under which the interval holds anything."""
        return sympy.And(sympy.Lt(self.lo, self.hi), *(sympy.Ge(guard, 0) for guard in self.guards))


@dataclass(frozen=True)
class StreamSets:
    """The streamed indices of one stationary tile: those in no `live` interval are dropped for all
    of the tile, those in no `dropped` interval kept for all of it. The end of the sequence bounds
    `live`; indices beyond it are not in `dropped`."""

    live: tuple[Interval, ...]
    dropped: tuple[Interval, ...]
    length: sympy.Symbol
    """The number of streamed indices: a length of the call."""

    @property
    def bounds(self) -> list[sympy.Expr]:
        """The expressions that bound the intervals."""
        intervals = (*self.live, *self.dropped)
        return [bound for one in intervals for bound in (one.lo, one.hi, *one.guards)]

    @property
    def is_short(self) -> bool:
        """Whether a kernel can visit the intervals one after the other."""
        return all(
            sum(not (one.lo.is_infinite or one.hi.is_infinite) for one in part) <= MAX_RANGES
            for part in (self.live, self.dropped)
        )

    @cached_property
    def full(self) -> Interval | None:
        """The indices that are kept for all of the tile, where these and the live ones are one
        interval each."""
        lo: list[sympy.Expr] = []
        hi: list[sympy.Expr] = [self.length]
        for one in self.dropped:
            if one.lo.is_infinite and one.hi.is_infinite and not one.guards:
                hi.append(sympy.S.Zero)  # nothing is kept for certain
                continue
            (lo if one.lo.is_infinite else hi).append(one.hi if one.lo.is_infinite else one.lo)
            if one.guards or not (one.lo.is_infinite or one.hi.is_infinite):
                return None
        if len(self.live) != 1:
            return None
        return Interval(sympy.Max(*lo) if lo else sympy.S.NegativeInfinity, sympy.Min(*hi))


def edges(interval: Interval, length: sympy.Expr | None = None) -> Edges:
    """Return the edges of an interval, as expressions. A live one is unbounded where it touches an
    end of the `length` indices."""
    live = length is not None
    lo = None if interval.lo.is_infinite or (live and interval.lo == 0) else interval.lo
    hi = None if interval.hi.is_infinite or (live and interval.hi == length) else interval.hi
    nonempty = interval.nonempty
    return Edges(lo, hi, None if nonempty == True else nonempty)  # noqa: E712 - SymPy's true


@by_mask(256)
def depends_on(mask: Mask) -> frozenset[sympy.Symbol]:
    """Return which of B and H the predicate depends on."""
    return frozenset(mask.predicate().free_symbols & {B, H})


def stream_sets(mask: Mask, side: Side) -> StreamSets:
    """Return the live and the dropped intervals of a stationary tile [FIRST, LAST], in closed form.

    Raises Unsupported for what is not a combination of affine comparisons, naming the term.
    """
    found = _solved(mask, side)
    if isinstance(found, str):
        raise Unsupported(found)
    return found


@by_mask(512)
def _solved(mask: Mask, side: Side) -> StreamSets | str:
    """Return the sets, or why there are none: asked for every tile, found out once."""
    try:
        return _solve_sets(mask, side)
    except Unsupported as refusal:
        return str(refusal)


def _solve_sets(mask: Mask, side: Side) -> StreamSets:
    stationary, streamed, length = (Q, K, SEQLEN_KV) if side == "rows" else (K, Q, SEQLEN_Q)
    most, sure = (named(mask.values, one) for one in mask.for_side(side).enclosing(AT))
    rising = {captured_name(slot, "bool") for slot, value in enumerate(mask.values) if value.rising}
    inside = [streamed, length - 1 - streamed]

    def solved(conjunction: list[sympy.Expr]) -> Interval:
        return _solve(_eliminate(conjunction, stationary, rising), streamed)

    def sets(most: Boolean, sure: Boolean) -> StreamSets:
        live = [solved([*one, *inside]) for one in _disjunctive_normal_form(most)]
        dropped = [solved(one) for one in _disjunctive_normal_form(sympy.Not(sure))]
        for edge in (edge for one in (*live, *dropped) for edge in (one.lo, one.hi)):
            if not edge.is_infinite and not is_int(exact(edge)):
                raise Unsupported(f"expected bounds that are computed in integers, got {edge}")
        return StreamSets(_some(live), _some(dropped), length)

    return _enclosing(most, sure, sets) if isinstance(mask, Unlisted) else sets(most, sure)


def _enclosing(
    most: Boolean, sure: Boolean, sets: Callable[[Boolean, Boolean], StreamSets]
) -> StreamSets:
    """Return the sets of the conditions without the terms that have no closed form: of one that
    holds wherever `most` does, and of one that holds only where `sure` does."""

    def is_short(*conditions: Boolean) -> bool:
        try:
            return sets(*conditions).is_short
        except Unsupported:
            return False

    def without(terms: Boolean, other: Boolean) -> Boolean:
        if isinstance(terms, sympy.And | sympy.Or):
            return terms.func(*(without(one, other) for one in terms.args))
        return terms if is_short(terms, terms) else other

    weaker, stronger = (
        without(sympy.to_nnf(one, simplify=False), other)
        for one, other in ((most, sympy.true), (sure, sympy.false))
    )
    return sets(weaker, stronger) if is_short(weaker, stronger) else sets(sympy.true, sympy.false)


def _some(intervals: list[Interval]) -> tuple[Interval, ...]:
    """Return the intervals that can hold anything and lie in no other one, in an order that SymPy's
    hashes do not change."""
    found = [one for one in intervals if one.nonempty != False]  # noqa: E712 - SymPy's false
    return tuple(outermost(sorted(found, key=str)))


def _disjunctive_normal_form(keep: Boolean) -> list[list[sympy.Expr]]:
    """Return conjunctions of integer expressions, each meaning `expression >= 0`."""
    _check_terms(keep)
    keep = keep.replace(lambda node: isinstance(node, Relational), _without_choices)
    for atom in keep.atoms(Relational):  # before anything is expanded
        for expression in _at_least_zero(atom):
            for symbol in (Q, K):  # in integer multiples, look-ups and quotients alone
                known = [*expression.atoms(Lookup), *_steps(expression, symbol)]
                _coefficient(expression.xreplace({found: sympy.Dummy() for found in known}), symbol)
    too_many = f"expected a mask of at most {MAX_CONJUNCTIONS} conjunctions, got {keep}"
    if _conjunctions(keep, True) > MAX_EXPANDED:
        raise Unsupported(too_many)
    normal = to_dnf(keep, simplify=False)
    if normal == sympy.false:
        return []
    if len(sympy.Or.make_args(normal)) > MAX_CONJUNCTIONS:
        raise Unsupported(too_many)
    return [
        [
            expression
            for atom in sympy.And.make_args(conjunction)
            for expression in _at_least_zero(atom)
        ]
        for conjunction in sympy.Or.make_args(normal)
    ]


def _conjunctions(keep: Boolean, holds: bool) -> int:
    """Return how many conjunctions a predicate, or its negation, is expanded to."""
    match keep:
        case sympy.Not():
            return _conjunctions(keep.args[0], not holds)
        case sympy.And() | sympy.Or():
            counts = [_conjunctions(part, holds) for part in keep.args]
            return sum(counts) if isinstance(keep, sympy.Or) == holds else math.prod(counts)
        case _:
            return 1


def _check_terms(expression: Any) -> None:
    """Raise Unsupported, before anything is expanded, for a position in a term that is not
    linear."""
    if isinstance(expression, Lookup):
        return
    if isinstance(expression, sympy.floor) and any(_step(expression, one) for one in (Q, K)):
        return
    if not isinstance(expression, _LINEAR) and expression.args and expression.has(Q, K):
        raise Unsupported(f"expected sums of positions in a mask, got the term {expression}")
    for part in expression.args:
        _check_terms(part)


_LINEAR = (sympy.Add, sympy.Mul, sympy.Abs, sympy.Min, sympy.Max, sympy.logic.boolalg.Boolean)


def _without_choices(atom: Boolean) -> Boolean:
    """Return a comparison as several without `!=`, absolute values, minima and maxima."""
    both_ways = atom.args, atom.args[::-1]
    if isinstance(atom, sympy.Ne):  # `<` as an operator would take floors off
        return sympy.Or(*(_without_choices(sympy.Lt(*sides)) for sides in both_ways))
    if isinstance(atom, sympy.Eq) and atom.has(sympy.Abs, sympy.Min, sympy.Max):
        return sympy.And(*(_without_choices(sympy.Le(*sides)) for sides in both_ways))
    if isinstance(atom, sympy.Eq) or not isinstance(atom, Relational):  # true and false are none
        return atom
    [expression] = _at_least_zero(atom)
    for choice in sympy.expand(expression).atoms(sympy.Abs, sympy.Min, sympy.Max):
        factor = sympy.expand(expression).coeff(choice)
        rest = sympy.expand(expression - factor * choice)
        if not factor.is_Integer or rest.has(choice):
            continue
        of = choice.args
        if isinstance(choice, sympy.Abs):
            of = (choice.args[0], -choice.args[0])
        largest = isinstance(choice, sympy.Abs | sympy.Max)
        join = sympy.Or if largest == bool(factor > 0) else sympy.And
        return join(*(_without_choices(rest + factor * one >= 0) for one in of))
    return atom


def _at_least_zero(atom: Boolean) -> list[sympy.Expr]:
    match atom:
        case sympy.logic.boolalg.BooleanTrue():
            return []
        case sympy.Le(args=(low, high)) | sympy.Ge(args=(high, low)):
            return [_whole(high - low, sympy.floor)]
        case sympy.Lt(args=(low, high)) | sympy.Gt(args=(high, low)):
            return [_whole(high - low, sympy.ceiling) - 1]
        case sympy.Eq(args=(left, right)) if not (left - right).atoms(sympy.Float):
            return [_whole(left - right, sympy.floor), _whole(right - left, sympy.floor)]
        case _:
            raise Unsupported(f"expected a comparison of affine expressions in a mask, got {atom}")


def _whole(expression: sympy.Expr, rounded: Callable[[sympy.Expr], sympy.Expr]) -> sympy.Expr:
    """Return a sum of integers with its constant term rounded to one."""
    constant, rest = expression.as_coeff_Add()
    if not rest.is_integer:
        raise Unsupported(f"expected integers in a mask's comparison, got {expression}")
    return rest + rounded(constant)


def _coefficient(expression: sympy.Expr, symbol: sympy.Symbol) -> tuple[int, sympy.Expr]:
    """Split `expression` into (integer coefficient of symbol, rest)."""
    expression = sympy.expand(expression)
    coefficient = expression.coeff(symbol)
    rest = expression - coefficient * symbol
    if not coefficient.is_Integer or symbol in rest.free_symbols:
        raise Unsupported(
            f"expected an integer multiple of {symbol} in a mask, got the term {expression}"
        )
    return int(coefficient), rest


def _eliminate(
    inequalities: Iterable[sympy.Expr], symbol: sympy.Symbol, rising: set[sympy.Symbol]
) -> list[sympy.Expr]:
    """Return inequalities without the symbol that hold where some FIRST <= symbol <= LAST satisfies
    all `inequalities` (each >= 0).

    Fourier-Motzkin: every lower bound on the symbol must not exceed any upper bound. Look-ups in
    `rising` values count with the largest value that they can add.
    """
    free: list[sympy.Expr] = []
    lower: list[tuple[int, sympy.Expr]] = []
    upper: list[tuple[int, sympy.Expr]] = []
    for inequality in inequalities:
        largest = _largest(sympy.expand(inequality), symbol, rising)
        coefficient, rest = _coefficient(largest, symbol)
        if coefficient == 0:
            free.append(rest)
        else:
            (lower if coefficient > 0 else upper).append((abs(coefficient), rest))
    pairs = [(a, low, b, high) for a, low in lower for b, high in [*upper, (1, LAST)]]
    pairs += [(1, -FIRST, b, high) for b, high in upper]  # FIRST <= LAST holds anyway
    return free + [sympy.expand(b * low + a * high) for a, low, b, high in pairs]


def _steps(expression: sympy.Expr, symbol: sympy.Symbol) -> list[sympy.floor]:
    """Return the terms `floor(symbol / n)` of a sum."""
    found = (term.as_coeff_Mul()[1] for term in sympy.Add.make_args(expression))
    return [one for one in found if isinstance(one, sympy.floor) and _step(one, symbol)]


def _step(found: sympy.floor, symbol: sympy.Symbol) -> int:
    """Return n of `floor(symbol / n)`, 0 for any other."""
    factor = found.args[0] / symbol
    return int(1 / factor) if factor.is_Rational and factor > 0 and (1 / factor).is_Integer else 0


def _largest(expression: sympy.Expr, symbol: sympy.Symbol, rising: set[sympy.Symbol]) -> sympy.Expr:
    """Return `expression` with what rises with `symbol`, look-ups and quotients, replaced by its
    values at the ends of the stationary tile."""
    for found in [*expression.atoms(Lookup), *_steps(expression, symbol)]:
        name, *indices = found.args
        rises = isinstance(found, sympy.floor) or (name in rising and indices[-1] == symbol)
        if rises:
            low, high = (found.xreplace({symbol: end}) for end in (FIRST, LAST))
            negative = expression.coeff(found).is_negative
            expression = expression.xreplace({found: low if negative else high})
    return expression


def _solve(inequalities: Iterable[sympy.Expr], symbol: sympy.Symbol) -> Interval:
    """Return the interval of integers `symbol` that satisfies all inequalities (each >= 0)."""
    lo: list[sympy.Expr] = []
    hi: list[sympy.Expr] = []
    guards: list[sympy.Expr] = []
    for inequality in inequalities:
        n, steps = 1, _steps(inequality, symbol)
        if steps and not inequality.xreplace({steps[0]: sympy.S.Zero}).has(symbol):
            n, coefficient = _step(steps[0], symbol), int(inequality.coeff(steps[0]))
            rest = inequality - coefficient * steps[0]
        else:
            coefficient, rest = _coefficient(inequality, symbol)
        if coefficient > 0:
            lo.append(-n * sympy.floor(rest / coefficient))
        elif coefficient < 0:
            hi.append(n * (sympy.floor(rest / -coefficient) + 1))
        elif not rest.is_nonnegative:
            guards.append(rest)
    return Interval(
        lo=sympy.Max(*lo) if lo else sympy.S.NegativeInfinity,
        hi=sympy.Min(*hi) if hi else sympy.S.Infinity,
        guards=tuple(sorted(guards, key=str)),
    )
