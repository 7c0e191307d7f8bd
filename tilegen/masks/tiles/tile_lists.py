"""Lists of the tiles a mask leaves, for masks that have no ranges in closed form.

Any predicate will do: modular, data-dependent, with an explicit layout. The lists take memory for
live tiles only, never for pairs or for all tiles, and are built on the device that uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sympy.logic.boolalg import Boolean

from tilegen.masks.mask import Side
from tilegen.masks.shapes import TiledShape
from tilegen.masks.tiles.tile_classes import TileClasses, classify


@dataclass(frozen=True, eq=False)
class TileLists:
    """For every stationary tile the streamed tiles it visits: the full ones, then the partial.

    The i-th stationary tile of batch b and head h has number
    n = (b * heads + h) * num_stationary + i, where b or h is 0 if there is one for all. It visits
    `tiles[starts[2n]:starts[2n + 1]]`, which are full, and `tiles[starts[2n + 1]:starts[2n + 2]]`,
    which are partial; both ascend.
    """

    tiles: torch.Tensor
    """int32 (visited_tiles,): indices of streamed tiles."""
    starts: torch.Tensor
    """int64 (batch * heads * num_stationary * 2 + 1,)."""
    batch: int
    """The number of batches that have lists: 1 where the mask is the same for all."""
    heads: int
    """The number of query heads that have lists, also where columns are stationary: 1 where the
    mask is the same for all."""
    num_stationary: int

    @property
    def visited_tiles(self) -> int:
        """Non-empty tiles, over all batches and heads that have lists."""
        return self.tiles.numel()

    def flags(self, streamed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (batch, heads, stationary, streamed) which of so many tiles are visited, and which
        of those are full."""
        sizes = (self.batch, self.heads, self.num_stationary, streamed)
        live, full = (
            torch.zeros(sizes, dtype=torch.bool, device=self.tiles.device) for _ in range(2)
        )
        counts = self.starts.diff()
        which = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        live.flatten(0, 2)[which // 2, self.tiles.long()] = True
        full.flatten(0, 2)[which // 2, self.tiles.long()] = which % 2 == 0
        return live, full


def build(
    keep: Boolean,
    captured: Sequence[torch.Tensor],
    shape: TiledShape,
    *,
    device: torch.device | str,
    side: Side,
) -> TileLists:
    """Return the lists of one side.

    `keep` is a predicate in the symbols of `symbols`; `captured[i]` is what `Lookup(t<i>, ...)`
    reads. Raises Unsupported for a term that has no meaning here, naming it.
    """
    return lists_of(classify(keep, captured, shape, torch.device(device)), side)


def lists_of(classes: TileClasses, side: Side) -> TileLists:
    """Return the lists of one side."""
    shape, codes = classes.shape, classes.codes
    stationary, streamed = shape.rows, shape.columns
    if side == "columns":
        segment, column = codes // shape.columns, codes % shape.columns
        tile, is_partial = segment // 2, segment % 2
        batch_head, row = tile // shape.rows, tile % shape.rows
        stationary, streamed = shape.columns, shape.rows
        codes = ((batch_head * stationary + column) * 2 + is_partial) * streamed + row
    codes = codes.sort().values
    num_lists = shape.batch * shape.heads * stationary * 2
    firsts = torch.arange(num_lists + 1, device=codes.device) * streamed
    return TileLists(
        tiles=(codes % streamed).int() if streamed else codes.int(),
        starts=torch.searchsorted(codes, firsts),
        batch=shape.batch,
        heads=shape.heads,
        num_stationary=stationary,
    )
