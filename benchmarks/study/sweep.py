"""The sweep over M: best tiles, words predicted and counted, bounds; and where regimes meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from benchmarks.environment import Environment
from benchmarks.study import closed
from benchmarks.study.counting import Counters, Question
from benchmarks.study.tiles import (
    DTYPES,
    FAMILIES,
    LARGE_CACHE,
    TileSet,
    best_at,
    frontier,
    moved_words,
    problem_of,
)
from tilegen.kernels.spec import Direction

HEAD_DIMS = (64, 128, 256, 512)
MEMORY_KB = tuple(2.0 ** (step / 2) for step in range(2, 19))
"""Sizes of fast memory from 2 to 512 KB, in steps of the square root of two [KB]."""
LARGEST_COUNTED_KB = 2200
"""Fast memory up to which steps of the staircases are counted [KB]: the crossover of d = 512 lies
beyond the sweep."""
LONG = 65536
"""Length that predictions are made for: terms that grow with N alone no longer count."""
SHORT = 128
"""Shortest length that is counted; never shorter than the widest tile, which must divide it."""
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class SweepRow(Environment):
    """The best emitted tiles at one M, with the curves they belong to. Words are per score,
    words / N^2, unless said otherwise."""

    direction: str
    dtype: str
    head_dim: int
    memory_kb: float
    memory_words: int
    memory_over_d2: float
    family: str
    """Family of the tiles that move least; empty if no emitted tile fits."""
    tiles: str
    words: float | None
    large_cache: float | None
    """Words of the best tiles of FlashAttention's schedule."""
    small_cache: float | None
    """Words of the best tiles of the small-cache kernels."""
    ideal: float
    """Words of the best known schedule where chunks take no room: the less of two closed forms."""
    lb1: float
    lb2: float
    floor: float
    over_bound: float | None
    """Words over the best of the three bounds."""


@dataclass(frozen=True, kw_only=True)
class CountRow(Environment):
    """One step of a family's staircase: all words its kernels move, predicted and counted."""

    direction: str
    dtype: str
    head_dim: int
    family: str
    tiles: str
    memory_kb: float
    memory_words: int
    memory_over_d2: float
    seqlen: int
    predicted_words: int
    counted_words: int
    seqlen_twice: int | None
    predicted_words_twice: int | None
    counted_words_twice: int | None
    equal: bool
    """True where counted and predicted words are equal, at both lengths."""
    words_long: float
    """Predicted words / N^2 at N = 65536."""
    words_counted: float | None
    """Counted words that grow as N^2, over N^2: (W(2N) - 2 W(N)) / 2 N^2, with no formula."""


@dataclass(frozen=True, kw_only=True)
class CrossoverRow(Environment):
    """The M, over d^2, below which small-cache tiles move fewer words."""

    direction: str
    dtype: str
    head_dim: int
    ideal: float
    """Crossover by the leading terms of the schedules."""
    chunked: float
    """Crossover of tiles of any size, with chunks as wide as the narrowest emitted ones."""
    emitted: float | None
    """Crossover of emitted tiles, predicted at N = 65536; empty if small-cache tiles lose."""
    counted: float | None
    """Crossover of emitted tiles by the counted words that grow as N^2."""


def kilobytes(words: float, element_bytes: int) -> float:
    """Return words in KB."""
    return words * element_bytes / 1024


def sweep_rows(
    head_dims: Sequence[int] = HEAD_DIMS, sizes: Sequence[int] = (4, 2)
) -> Iterator[SweepRow]:
    """Yield a row for every M, direction, dtype and head dim. Counts nothing."""
    for direction, size, head_dim, memory_kb in product(DIRECTIONS, sizes, head_dims, MEMORY_KB):
        memory = memory_kb * 1024 / size
        best: list[TileSet] = []
        for family in FAMILIES[direction]:
            tile_set = best_at(frontier(family, direction, head_dim, size, LONG), memory)
            if tile_set:
                best.append(tile_set)
        winner = min(best, key=lambda tile_set: tile_set.words, default=None)
        words = winner.words / LONG**2 if winner else None
        bound = closed.lower_bounds(direction, LONG, head_dim, memory, size)
        by_family = {tile_set.family: tile_set.words / LONG**2 for tile_set in best}
        yield SweepRow(
            direction=direction,
            dtype=DTYPES[size],
            head_dim=head_dim,
            memory_kb=memory_kb,
            memory_words=int(memory),
            memory_over_d2=memory / head_dim**2,
            family=winner.family if winner else "",
            tiles=winner.key if winner else "",
            words=words,
            large_cache=by_family.get(LARGE_CACHE[direction]),
            small_cache=by_family.get("small_cache"),
            ideal=closed.ideal(direction, memory, head_dim, size),
            **bound,
            over_bound=words / max(bound.values()) if words else None,
        )


# --------------------------------------------------------------------------------------------------
# Counted


def count_rows(
    counters: Counters,
    *,
    head_dims: Sequence[int] = HEAD_DIMS,
    sizes: Sequence[int] = (4, 2),
    largest_kb: float = LARGEST_COUNTED_KB,
) -> Iterator[CountRow]:
    """Yield a row for each step of each staircase: fp32 at two lengths, fp16 at one."""
    for size, direction, head_dim in product(sizes, DIRECTIONS, head_dims):
        steps = [
            step
            for family in FAMILIES[direction]
            for step in frontier(family, direction, head_dim, size, LONG)
            if kilobytes(step.memory, size) <= largest_kb
        ]
        lengths = (1, 2) if size == 4 else (1,)
        questions: list[Question] = [
            (problem_of(times * counted_length(step), head_dim, size), step.configs)
            for step in steps
            for times in lengths
        ]
        counted = [sum(map(sum, moved.values())) // size for moved in counters.count(questions)]
        predicted = [moved_words(*question) for question in questions]
        for index, step in enumerate(steps):
            at = slice(index * len(lengths), (index + 1) * len(lengths))
            yield _count_row(
                direction, head_dim, size, step, tuple(counted[at]), tuple(predicted[at])
            )


def counted_length(step: TileSet) -> int:
    """Return the length that tiles are counted at: a multiple of all their sides."""
    sides = [side for one in step.configs.values() for side in (one.block_m, one.block_n)]
    return max(SHORT, *sides)


def growing_as_square(words: int, words_twice: int, seqlen: int) -> float:
    """Return the a of W(N) = a N^2 + b N, from W(N) and W(2N)."""
    return (words_twice - 2 * words) / (2 * seqlen**2)


def _count_row(
    direction: Direction,
    head_dim: int,
    size: int,
    step: TileSet,
    counted: tuple[int, ...],
    predicted: tuple[int, ...],
) -> CountRow:
    seqlen = counted_length(step)
    twice = len(counted) > 1
    return CountRow(
        direction=direction,
        dtype=DTYPES[size],
        head_dim=head_dim,
        family=step.family,
        tiles=step.key,
        memory_kb=kilobytes(step.memory, size),
        memory_words=step.memory,
        memory_over_d2=step.memory / head_dim**2,
        seqlen=seqlen,
        predicted_words=predicted[0],
        counted_words=counted[0],
        seqlen_twice=2 * seqlen if twice else None,
        predicted_words_twice=predicted[1] if twice else None,
        counted_words_twice=counted[1] if twice else None,
        equal=counted == predicted,
        words_long=step.words / LONG**2,
        words_counted=growing_as_square(counted[0], counted[1], seqlen) if twice else None,
    )


# --------------------------------------------------------------------------------------------------
# Slopes and crossovers

Point = tuple[float, float]
"""M in words, words / N^2."""


def points(
    rows: Sequence[dict[str, str]],
    family: str,
    where: Mapping[str, str],
    *,
    counted: bool = True,
) -> list[Point]:
    """Return the steps of one staircase out of the rows of a result file of CountRow."""
    name = "words_counted" if counted else "words_long"
    return [
        (float(row["memory_words"]), float(row[name]))
        for row in rows
        if row["family"] == family
        and all(row[key] == value for key, value in where.items())
        and row[name]
    ]


def slope(steps: Sequence[Point]) -> float:
    """Return d log(words) / d log(M), fitted by least squares."""
    memory, words = np.log(np.array(steps)).T
    return float(np.polyfit(memory, words, 1)[0])


def last_small_win(large: Sequence[Point], small: Sequence[Point]) -> float | None:
    """Return the M at which the large-cache staircase gets below the small-cache one for good,
    None if the small-cache one is below nowhere."""
    memories = sorted({memory for memory, _ in (*large, *small)})
    wins = [memory for memory in memories if _value(small, memory) < _value(large, memory)]
    if not wins:
        return None
    later = [memory for memory in memories if memory > wins[-1]]
    return later[0] if later else None


def crossing(difference: Callable[[float], float], low: float, high: float) -> float:
    """Return the M where a difference that falls with M is zero, by bisection of log M."""
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if difference(middle) > 0 else (low, middle)
    return low


def crossover_rows(
    counts: Sequence[dict[str, str]],
    head_dims: Sequence[int] = HEAD_DIMS,
    sizes: Sequence[int] = (4, 2),
) -> Iterator[CrossoverRow]:
    """Yield a row for every direction, dtype and head dim, from the rows of CountRow."""
    for direction, size, head_dim in product(DIRECTIONS, sizes, head_dims):
        large, small = (
            [
                (float(step.memory), step.words / LONG**2)
                for step in frontier(family, direction, head_dim, size, LONG)
            ]
            for family in (LARGE_CACHE[direction], "small_cache")
        )
        where = {"direction": direction, "dtype": DTYPES[size], "head_dim": str(head_dim)}
        counted = [
            points(counts, family, where) for family in (LARGE_CACHE[direction], "small_cache")
        ]
        square = head_dim**2

        def ideal(
            memory: float, way: Direction = direction, d: int = head_dim, e: int = size
        ) -> float:
            return closed.ideal_large(way, memory, d, e) - closed.ideal_small(way, memory, d, e)

        def chunked(
            memory: float, way: Direction = direction, d: int = head_dim, e: int = size
        ) -> float:
            large = closed.chunked_large(way, memory, d, e)
            return math.inf if large is None else large - closed.chunked_small(way, memory, d, e)

        emitted = last_small_win(large, small)
        by_counts = last_small_win(*counted) if all(counted) else None
        yield CrossoverRow(
            **where | {"head_dim": head_dim},
            ideal=crossing(ideal, square / 64, 64 * square) / square,
            chunked=crossing(chunked, square / 64, 64 * square) / square,
            emitted=emitted / square if emitted else None,
            counted=by_counts / square if by_counts else None,
        )


def _value(steps: Sequence[Point], memory: float) -> float:
    return min((words for at, words in steps if at <= memory), default=math.inf)
