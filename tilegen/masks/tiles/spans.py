"""The mask compiler: from a predicate to the tiles it leaves, in closed form.

A kernel keeps one tile of rows (or columns) on chip and streams tiles of the other axis past it.
For a stationary tile
[first, last], a streamed index is *live* if some stationary index is kept with it, *dropped* if
some is not. A streamed tile that misses the live set is empty, one that misses the dropped set
is full, all others are partial.

Both sets are unions of intervals, and come from the predicate by interval arithmetic on it: where
`and` stands, intervals meet; where `or` stands, they are listed; under `not`, the other truth is
meant. In a comparison, all that rises with the stationary index counts with the end of the tile at
which it allows most, and the rest bounds the streamed index. Two inequalities from which the
stationary index cancels hold for one index only together, and bound the streamed index too. The
sets may come out too large, which costs time but never correctness. Numbers looked up per row or
column may stand where they never fall.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from typing import Literal

from tilegen.errors import Unsupported
from tilegen.masks.form import Side
from tilegen.masks.language.algebra import (
    add,
    at_most,
    both,
    floor_divide,
    less,
    maximum,
    minimum,
    multiply,
    negative,
    subtract,
)
from tilegen.masks.language.bounds import limits
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
    const,
    slot_of,
)
from tilegen.masks.language.integers import combined, linear
from tilegen.masks.language.rewriting import replaced
from tilegen.masks.mask import Mask
from tilegen.masks.pairs import AT, named
from tilegen.masks.remembered import by_mask
from tilegen.masks.tiles.intervals import Edges
from tilegen.masks.usual import UNLISTED

MAX_INTERVALS = 16
"""Most intervals of a condition; one with more goes to tile lists."""
MAX_MEETS = 256
"""Most intervals before those that are empty or equal are dropped."""
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
    stationary, streamed, length = (Q, K, SEQLEN_KV) if side == "rows" else (K, Q, SEQLEN_Q)
    most, sure = (named(mask.tables, one) for one in mask.enclosing(AT, side))
    rising = {slot for slot, value in enumerate(mask.tables) if value.rising}
    # Without lists, what has no closed form is taken for live and for dropped everywhere.
    spans = _Spans(stationary, streamed, rising, is_lenient=mask.form is UNLISTED)
    inside = _Span(ZERO, length)
    try:
        live = _some(spans.meet(one, inside) for one in spans.of(most, want=True))
        sets = StreamSets(live, _some(spans.of(sure, want=False)), length)
    except Unsupported as refusal:
        return str(refusal)
    if mask.form is UNLISTED and not sets.is_short:
        return StreamSets((Interval(ZERO, length),), (Interval(None, None),), length)
    return sets


@dataclass(frozen=True)
class _Span(Interval):
    """An interval, with the inequalities that it comes from, each `>= 0`."""

    rooms: tuple[Expr, ...] = ()


@dataclass(frozen=True)
class _Spans:
    """Solves conditions for the streamed indices for which some stationary index makes them true,
    or false. Raises Unsupported for what is no comparison of sums of positions."""

    stationary: Expr
    streamed: Expr
    rising: set[int]
    is_lenient: bool

    def of(self, keep: Expr, *, want: bool) -> list[_Span]:
        """Return the intervals of the indices for which a condition is as wanted."""
        if keep.op == "not":
            return self.of(keep.args[0], want=not want)
        if keep.op in ("and", "or"):
            return self._join((self.of(one, want=want) for one in keep.args), keep.op, want=want)
        if keep.is_const:
            return [_Span(None, None)] if keep.value == want else []
        try:
            return self._comparison(keep, want=want)
        except Unsupported:
            if self.is_lenient:
                return [_Span(None, None)]
            raise

    def _join(self, parts: Iterable[list[_Span]], op: str, *, want: bool) -> list[_Span]:
        lists = list(parts)
        if (op == "or") == want:
            return _few(one for part in lists for one in part)
        if math.prod(map(len, lists)) > MAX_MEETS:
            raise Unsupported(f"expected a mask of at most {MAX_INTERVALS} intervals, got more")
        return _few(self.meet(*one) for one in product(*lists))

    def _comparison(self, keep: Expr, *, want: bool) -> list[_Span]:
        if keep.op not in ("lt", "le", "eq") or not keep.args[0].is_int:
            raise Unsupported(f"expected a comparison of affine expressions in a mask, got {keep}")
        room = subtract(keep.args[1], keep.args[0])
        if keep.op != "eq":
            least = int(keep.op == "lt")
            return self._at_least_zero(room - least if want else negative(room) + (least - 1))
        sides = [self._at_least_zero(one if want else one - 1) for one in (room, negative(room))]
        return self._join(sides, "and" if want else "or", want=True)

    def meet(self, *spans: _Span) -> _Span:
        """Return the interval in which all spans may be true of one stationary index."""
        rooms = tuple(dict.fromkeys(room for one in spans for room in one.rooms))
        sums = [add(*pair) for pair in combinations(rooms, 2) if pair[0].has(self.stationary)]
        together = [self._span(one) for one in sums if not one.has(self.stationary)]
        parts = (*spans, *together)
        lo = [one.lo for one in parts if one.lo is not None]
        hi = [one.hi for one in parts if one.hi is not None]
        guards = {guard for one in parts for guard in one.guards}
        return _Span(
            lo=maximum(*lo) if lo else None,
            hi=minimum(*hi) if hi else None,
            guards=tuple(sorted(guards, key=str)),
            rooms=rooms,
        )

    def _at_least_zero(self, room: Expr) -> list[_Span]:
        """Solve `room >= 0`."""
        terms, _ = linear(room)
        for term, factor in sorted(terms.items(), key=lambda item: item[0].key):
            if term.op in ("abs", "max", "min") and term.has(Q, K):
                rest = subtract(room, multiply(factor, term))
                of = (term.args[0], negative(term.args[0])) if term.op == "abs" else term.args
                parts = [self._at_least_zero(add(rest, multiply(factor, one))) for one in of]
                op = "or" if (term.op == "min") == (factor < 0) else "and"
                return self._join(parts, op, want=True)
        return [replace(self._span(room), rooms=(room,))]

    def _span(self, room: Expr) -> _Span:
        """Solve `room >= 0` for a sum in which the streamed index stands once."""
        terms, constant = linear(room)
        most: list[Expr] = []  # what the other terms add at most
        own: list[tuple[int, int]] = []  # factor and step of the terms of the streamed index
        for term, factor in terms.items():
            step = _step(term)
            inner = term.args[0] if step else term
            is_load = term.op == "load"
            rises = is_load and slot_of(term) in self.rising and term.args[-1] is self.stationary
            if inner is self.streamed:
                own.append((factor, max(step, 1)))
            elif inner is self.stationary or rises:
                end = LAST if factor > 0 else FIRST
                most.append(multiply(factor, replaced(term, {self.stationary: end})))
            elif term.has(Q, K):
                raise Unsupported(f"expected sums of positions in a mask, got the term {term}")
            else:
                most.append(multiply(factor, term))
        rest = add(*most, const(constant))
        if not own:
            return _Span(None, None, () if limits(rest)[0] >= 0 else (rest,))
        if len(own) > 1:
            raise Unsupported(f"expected each position once in a mask, got {combined(terms)}")
        ((factor, n),) = own
        if factor > 0:
            return _Span(multiply(-n, floor_divide(rest, factor)), None)
        return _Span(None, multiply(n, add(floor_divide(rest, -factor), 1)))


def _step(term: Expr) -> int:
    """Return n of `index // n`, 0 for any other term."""
    is_step = term.op == "floordiv" and term.args[1].is_const
    return max(0, term.args[1].value) if is_step else 0


def _few(spans: Iterator[_Span]) -> list[_Span]:
    possible = [one for one in dict.fromkeys(spans) if one.nonempty is not FALSE]
    if any((one.lo, one.hi, one.guards) == (None, None, ()) for one in possible):
        return [_Span(None, None)]  # which holds all others
    if len(possible) > MAX_INTERVALS:
        raise Unsupported(f"expected a mask of at most {MAX_INTERVALS} intervals, got more")
    return possible


def _some(spans: Iterable[_Span]) -> tuple[Interval, ...]:
    """Return the intervals that can be non-empty, in the same order in every process; of two with
    the same ends the one that is guarded less."""
    intervals = {Interval(one.lo, one.hi, one.guards) for one in _few(iter(spans))}
    known = [(one.lo, one.hi, set(one.guards)) for one in intervals]
    kept = [
        one
        for one in intervals
        if not any((lo, hi) == (one.lo, one.hi) and set(one.guards) > of for lo, hi, of in known)
    ]
    return tuple(sorted(kept, key=str))


# --------------------------------------------------------------------------------------------------
# The way in which kernels find the tiles


@dataclass(frozen=True)
class Visit:
    """The tiles of a side in one interval, in several that the kernel merges, or in lists that are
    made before the launch."""

    strategy: Literal["single", "several", "lists"]
    sets: StreamSets | None = None
    """The closed form; None for lists."""
    reason: str = ""
    """The reason for lists."""


def visit(mask: Mask, side: Side) -> Visit:
    """Choose the first strategy that can express the tiles of a mask."""
    try:
        sets = stream_sets(mask, side)
    except Unsupported as refusal:
        return Visit("lists", reason=str(refusal))
    if sets.full is not None:
        return Visit("single", sets)
    if sets.is_short:
        return Visit("several", sets)
    return Visit("lists", reason="a kernel would merge too many intervals")
