"""The kinds of masks beyond causal and windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tilegen.errors import InvalidProblem
from tilegen.masks.mask import And, Causal, Full, Mask, Side, SlidingWindow
from tilegen.masks.tree import Tree
from tilegen.masks.values import Pair, Pattern, Values, check_number


@dataclass(frozen=True)
class _OfNumber(Mask):
    """A mask that one number describes; a kernel may read it at run time."""

    number: int | Values

    def __post_init__(self) -> None:
        if not isinstance(self.number, Values):
            check_number(f"N of {self.name}(N)", self.number)


class PrefixLM(_OfNumber):
    """`k <= q or k < number`: the prefix sees all of itself, what follows is causal."""

    name = "prefix_lm"

    def keep(self, at: Pair) -> Any:
        return (at.k <= at.q) | (at.k < at.number(self.number))


class GlobalTokens(_OfNumber):
    """`q < number or k < number`: the first tokens see everything and are seen by all."""

    name = "global"

    def keep(self, at: Pair) -> Any:
        tokens = at.number(self.number)
        return (at.q < tokens) | (at.k < tokens)


class KvPrefix(_OfNumber):
    """`k < number`: only the first columns, by batch for padded batches."""

    name = "kv_prefix"

    def keep(self, at: Pair) -> Any:
        return at.k < at.number(self.number)


@dataclass(frozen=True)
class Dilated(Mask):
    """`(q - k) % step == 0`: every step-th column, counted from the row's own."""

    name = "dilated"

    step: int

    def __post_init__(self) -> None:
        check_number("step", self.step, low=1)

    def keep(self, at: Pair) -> Any:
        return equal((at.q - at.k) % self.step, 0)


@dataclass(frozen=True)
class Intervals(Mask):
    """`first[q] <= k < end[q]`, where neither falls as q rises: documents of a packed sequence.

    The same pairs by column: `first_row[k] <= q < end_row[k]`.
    """

    first: Values
    end: Values
    first_row: Values
    end_row: Values
    by: Side = "rows"
    """The tables that the predicate reads: those by row, or those by column."""

    @classmethod
    def of(cls, first: Values) -> Intervals:
        """Return the mask of the four tables of a recipe, of which `first` is the first, or of
        stand-ins that are as `first` is."""
        sides: tuple[tuple[str, Pattern], ...]
        sides = ("q", "firsts"), ("q", "ends"), ("k", "firsts"), ("k", "ends")
        axes = (first.axes or "")[:-1]
        parts = (first.beside(i, how, axes + axis) for i, (axis, how) in enumerate(sides))
        first, end, first_row, end_row = parts
        return cls(first, end, first_row, end_row)

    @property
    def notation(self) -> str:
        return f"documents({self.first.notation})"

    def keep(self, at: Pair) -> Any:
        by_row, by_column = (self.first, self.end), (self.first_row, self.end_row)
        ends, index = (by_row, at.k) if self.by == "rows" else (by_column, at.q)
        first, end = (one.at(at) for one in ends)
        return (first <= index) & (index < end)

    def for_side(self, side: Side) -> Mask:
        return replace(self, by=side)


@dataclass(frozen=True)
class SameDocument(Mask):
    """`ids_q[q] == ids_kv[k]`, ids in any order."""

    name = "same_id"

    ids_q: Values
    ids_kv: Values

    def keep(self, at: Pair) -> Any:
        return equal(self.ids_q.at(at), self.ids_kv.at(at))


@dataclass(frozen=True)
class BlockSparse(Mask):
    """`layout[(b,) (h,) q // block, k // block]`; pairs beyond the layout are dropped."""

    name = "block_sparse"

    layout: Values
    block: int

    def check_lengths(self, seqlen_q: int, seqlen_kv: int) -> None:
        if self.layout.is_stand_in:
            return
        found = tuple(self.layout.tensor.shape[-2:])
        needed = tuple(-(-length // self.block) for length in (seqlen_q, seqlen_kv))
        if self.block == 1 and found != needed:
            raise InvalidProblem(
                f"a bool tensor as mask must have the lengths of the call, {needed}, got {found}"
            )
        if found[0] < needed[0] or found[1] < needed[1]:
            raise InvalidProblem(
                f"a layout of blocks of {self.block} must cover lengths {seqlen_q} and {seqlen_kv} "
                f"with {needed[0]} x {needed[1]} blocks, got {found[0]} x {found[1]}"
            )

    def keep(self, at: Pair) -> Any:
        return self.layout.at(at, at.q // self.block, at.k // self.block)


@dataclass(frozen=True)
class Neighborhood(Mask):
    """Every dimension's window around a point, moved inwards at the borders, as NATTEN defines it.

    Points of a grid are numbered row by row; both sequences are the same grid.
    """

    name = "neighborhood"

    grid: tuple[int, ...]
    window: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.grid) <= 3 or len(self.grid) != len(self.window):
            raise InvalidProblem(
                "neighborhood needs one to three dimensions and a window for each, "
                f"got grid {self.grid} and window {self.window}"
            )
        for size in self.grid:
            check_number("grid", size, low=1)
        for size in self.window:
            check_number("window", size, low=1)
            if size % 2 == 0:
                raise InvalidProblem(f"window must be odd, got {size}")

    def check_lengths(self, seqlen_q: int, seqlen_kv: int) -> None:
        points = math.prod(self.grid)
        if (seqlen_q, seqlen_kv) != (points, points):
            raise InvalidProblem(
                f"{self.notation} needs sequences of {points} points, "
                f"got {seqlen_q} and {seqlen_kv}"
            )

    def keep(self, at: Pair) -> Any:
        keep: Any = True
        stride = 1
        for axis in reversed(range(len(self.grid))):
            size, window = self.grid[axis], min(self.window[axis], self.grid[axis])
            own, seen = at.q // stride, at.k // stride
            if axis:
                own, seen = own % size, seen % size
            first = own - self.window[axis] // 2
            above = (seen >= first) | (seen >= size - window)
            below = (seen < first + self.window[axis]) | (seen < window)
            inside = above & below & (seen < size) if not axis else above & below
            keep = inside & keep
            stride *= size
        return keep


@dataclass(frozen=True)
class Unlisted(Mask):
    """The same mask over keys in pages, whose lengths the host does not know: no lists of tiles can
    be made.

    The parts with a closed form say which tiles are visited; all others are computed for each of
    their pairs. `AttentionProblem.normal` rewrites problems so.
    """

    mask: Mask

    @property
    def notation(self) -> str:
        return f"unlisted({self.mask.notation})"

    @property
    def parts(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def with_parts(self, changed: Callable[[Mask], Mask]) -> Mask:
        return Unlisted(changed(self.mask))

    def keep(self, at: Pair) -> Any:
        return self.mask.keep(at)


def is_surely_solved(mask: Mask) -> bool:
    """Return whether a mask surely has a closed form, without solving it."""
    if isinstance(mask, Unlisted | Tree | KvPrefix):
        return True
    parts = mask.parts if isinstance(mask, And) else (mask,)
    return all(isinstance(part, Full | Causal | SlidingWindow | Intervals) for part in parts)


def equal(left: Any, right: Any) -> Any:
    """Return the condition that two numbers are equal."""
    from tilegen.masks.language import algebra

    return algebra.equal(left, right)
