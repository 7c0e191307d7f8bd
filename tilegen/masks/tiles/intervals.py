"""Merging of intervals of indices into the tiles that a stationary tile visits: sorted, each once.

The same arithmetic runs on numpy arrays (the model) and prints itself as Triton source (kernels).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Range = tuple[Any, Any]
"""First and past-the-last tile."""


class Arithmetic:
    """The operations that merging needs, on numpy arrays."""

    def __init__(self, block: Any) -> None:
        """`block` is the number of indices of a tile."""
        self.block = block

    def maximum(self, left: Any, right: Any) -> Any:
        return np.maximum(left, right)

    def minimum(self, left: Any, right: Any) -> Any:
        return np.minimum(left, right)

    def where(self, condition: Any, left: Any, right: Any) -> Any:
        return np.where(condition, left, right)

    def tile_of(self, index: Any) -> Any:
        """Return the tile that an index lies in; anything up to 0 for a negative one."""
        return index // self.block

    def tiles_up_to(self, index: Any) -> Any:
        """Return how many tiles the indices before `index` touch; anything up to 0 for a negative
        one."""
        return -(-index // self.block)

    def named(self, name: str, value: Any) -> Any:
        """Return `value`, which a kernel calls `name` from here on."""
        return value

    def once(self, name: str, value: Any) -> Any:
        """Return `value`, which a kernel calls `name` unless it is a name or a number itself."""
        return value

    def in_order(self, first: Range, second: Range) -> tuple[Range, Range]:
        """Return both ranges, the one that begins first before the other."""
        swap = second[0] < first[0]
        low = np.where(swap, second[0], first[0]), np.where(swap, second[1], first[1])
        return low, (np.where(swap, first[0], second[0]), np.where(swap, first[1], second[1]))


class Edges(NamedTuple):
    """An interval as numbers; `lo` or `hi` is None where it is unbounded."""

    lo: Any
    hi: Any
    nonempty: Any = None
    """Condition under which the interval is not empty; None if it is never empty."""

    def each(self, change: Callable[[Any], Any]) -> Edges:
        """Apply a change to each edge that is not None."""
        return Edges(*(None if one is None else change(one) for one in self))


Visited = tuple[tuple[Range, ...], tuple[Range, ...]]
"""Partial and full tiles that a stationary tile visits, as disjoint ranges; some are empty."""


def merge(do: Arithmetic, live: Sequence[Edges], dropped: Sequence[Edges], length: Any) -> Visited:
    """Return the visited tiles from the live and the dropped intervals of a stationary tile.

    Tiles in no live interval are empty; of the others, those that meet no dropped interval and not
    the end of the sequence (`length` streamed indices) are full.
    """
    end = do.named("all_tiles", do.tiles_up_to(length))
    lives = _disjoint(do, "live", live, end, end)
    past_the_end = Edges(length, None)
    drops = _disjoint(do, "dropped", [past_the_end, *dropped], None, end)
    full: list[Range] = []
    reached: Any = 0
    for lo, hi in drops:  # a tile without dropped pairs is live
        if lo is not reached:
            full.append((reached, lo))
        reached = hi
    partial: list[Range] = []
    for a, b in lives:
        for c, d in drops:
            name = f"partial{len(partial)}"
            lo = do.once(f"{name}_lo", do.maximum(a, c))
            partial.append((lo, do.named(f"{name}_hi", do.maximum(do.minimum(b, d), lo))))
    return tuple(partial), tuple(full)


def _disjoint(
    do: Arithmetic, name: str, intervals: Sequence[Edges], right: Any, end: Any
) -> list[Range]:
    """Return the tiles that intervals touch as disjoint ranges in rising order.

    Intervals without a lower bound make the first one, from tile 0; those without an upper bound
    the last one, up to tile `end`: from tile `right`, or before.
    """
    from_start = [e for e in intervals if e.lo is None and e.hi is not None]
    to_end = [e for e in intervals if e.hi is None]
    middle = [e for e in intervals if e.lo is not None and e.hi is not None]
    for e in to_end:
        first = 0 if e.lo is None else do.maximum(do.tile_of(e.lo), 0)
        if right is None:
            right = do.named(f"{name}_right", first)
            continue
        nearer = do.minimum(right, do.once(f"{name}_from", first))
        right = do.named(f"{name}_right", _if_any(do, e, nearer, right))
    left: Any = None
    for e in from_start:
        reach = _if_any(do, e, do.tiles_up_to(e.hi), 0)
        left = do.named(f"{name}_left", reach if left is None else do.maximum(left, reach))
    if from_start and to_end:
        left = do.named(f"{name}_left", do.minimum(do.maximum(left, 0), right))
    ranges: list[Range] = []
    for i, e in enumerate(middle):
        first = do.maximum(do.tile_of(e.lo), 0 if left is None else left)
        if to_end:
            first = do.minimum(first, right)
        first = do.named(f"{name}{i}_lo", first)
        last = do.maximum(do.minimum(do.tiles_up_to(e.hi), right), first)
        last = do.named(f"{name}{i}_hi", last)
        if e.nonempty is not None:
            last = do.named(f"{name}{i}_hi", do.where(e.nonempty, last, first))
        ranges.append((first, last))
    for last in range(len(ranges) - 1, 0, -1):  # a sorting network: few ranges, no branches
        for i in range(last):
            ranges[i], ranges[i + 1] = do.in_order(ranges[i], ranges[i + 1])
    for i in range(1, len(ranges)):
        reached = ranges[i - 1][1]
        first = do.named(f"{name}{i}_lo", do.maximum(ranges[i][0], reached))
        ranges[i] = first, do.named(f"{name}{i}_hi", do.maximum(ranges[i][1], first))
    if from_start:
        ranges.insert(0, (0, left))
    if to_end:
        ranges.append((right, end))
    return ranges


def _if_any(do: Arithmetic, edges: Edges, value: Any, otherwise: Any) -> Any:
    return value if edges.nonempty is None else do.where(edges.nonempty, value, otherwise)
