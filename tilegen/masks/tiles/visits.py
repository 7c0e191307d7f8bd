"""The streamed tiles that stationary tiles visit, as numbers for the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilegen.masks.tiles.intervals import Range

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class TileRanges:
    """The streamed tiles of stationary tiles: arrays (batches, heads, stationary tiles), with 1
    where the mask is the same for all."""

    visited: Counts
    """The number of non-empty tiles."""
    full: Counts
    """The number of visited tiles that run without mask code."""
    ends: Counts
    """1 where the stationary tile visits the last streamed tile, which may be cut off; else 0."""
    block: int
    length: int
    """The numbers of streamed rows: `block` of a tile, `length` of the sequence."""
    ranges: tuple[tuple[Range, ...], tuple[Range, ...]] = ((), ())
    """Partial and full tiles, where the mask is solved in closed form; `pieces` in full shape."""

    @property
    def pieces(self) -> tuple[tuple[Range, ...], ...]:
        """Partial and full tiles as ranges of tiles: arrays shaped like `visited`."""
        shape = self.visited.shape
        return tuple(
            tuple((np.broadcast_to(lo, shape), np.broadcast_to(hi, shape)) for lo, hi in part)
            for part in self.ranges
        )

    @property
    def heads(self) -> int:
        """The number of heads, of all batches, over which tiles are counted."""
        return self.visited.shape[0] * self.visited.shape[1]

    @property
    def visited_tiles(self) -> int:
        """`A(block_m, block_n)`: the visited tiles of all heads that differ."""
        return int(self.visited.sum())

    @property
    def full_tiles(self) -> int:
        """The number of tiles that run without mask code, over all heads that differ."""
        return int(self.full.sum())

    @property
    def partial_tiles(self) -> int:
        """The number of tiles that the mask's edge or the end of the sequence crosses."""
        return self.visited_tiles - self.full_tiles

    @property
    def visited_rows(self) -> int:
        """The number of streamed rows in all visited tiles, inside the sequence: the loads of a
        kernel read them."""
        return int(self.rows(self.length).sum())

    def rows(self, length: int) -> Counts:
        """Return the streamed rows of the visited tiles, cut off at `length`."""
        beyond = -(-self.length // self.block) * self.block - length
        return self.visited * self.block - self.ends * beyond
