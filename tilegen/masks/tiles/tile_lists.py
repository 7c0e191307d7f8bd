"""Lists of the tiles a mask leaves, for masks that have no ranges in closed form.

Any predicate will do: modular, data-dependent, with an explicit layout. The lists take memory for
live tiles only, never for pairs or for all tiles, and are built on the device that uses them. They
are kept, so that all layers of a model share those of one mask.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from tilegen.disk import say_once
from tilegen.errors import Unsupported
from tilegen.masks.form import Shape, TiledShape
from tilegen.masks.language.expr import Expr
from tilegen.masks.mask import Mask, Side
from tilegen.masks.snapshots import TensorCache
from tilegen.masks.tiles.tile_classes import TileClasses, classify, distinguished
from tilegen.masks.values import is_captured


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
    keep: Expr,
    captured: Sequence[torch.Tensor],
    shape: TiledShape,
    *,
    device: torch.device | str,
    side: Side,
) -> TileLists:
    """Return the lists of one side.

    `keep` is a predicate; `captured[i]` is what t<i> names in it. Raises Unsupported for a term
    that has no meaning here, naming it.
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


def every_tile(shape: TiledShape, side: Side, device: torch.device) -> TileLists:
    """Return lists of all tiles as partial ones, right for any mask; nothing waits for a GPU."""
    stationary, streamed = (shape.rows, shape.columns)[:: 1 if side == "rows" else -1]
    ends = torch.arange(2 * stationary + 1, device=device) // 2 * streamed
    tiles = torch.arange(streamed, dtype=torch.int32, device=device).repeat(stationary)
    return TileLists(tiles=tiles, starts=ends, batch=1, heads=1, num_stationary=stationary)


class ListCache:
    """Lists of tiles by predicate, the tensors behind its tables (the very objects), lengths, tile
    shape, side and device, in a `TensorCache`."""

    def __init__(self, capacity: int = 64) -> None:
        self._lists: TensorCache[TileLists] = TensorCache(capacity)

    def __len__(self) -> int:
        return len(self._lists)

    def get(
        self,
        keep: Expr,
        captured: Sequence[torch.Tensor],
        shape: TiledShape,
        *,
        device: torch.device | str,
        side: Side,
        sources: Sequence[torch.Tensor] | None = None,
        origin: Hashable = None,
    ) -> TileLists:
        """Return the lists of `build`, built at most once.

        While a CUDA graph is captured, the lists of a mask that reads tensors have every tile, as
        their values may be others at a replay, and those of other masks must be there already, or
        else Unsupported is raised.

        `captured` are made of `sources` in a way that `origin` names; by default they are the same.
        """
        sources = captured if sources is None else sources
        shape, device = distinguished(keep, shape), torch.device(device)
        if sources and is_captured(device):
            say_once("a CUDA graph visits every tile of masks that lists of tiles are made for")
            return every_tile(shape, side, device)

        def make() -> TileLists:
            if is_captured(device):
                raise Unsupported(
                    "lists of tiles cannot be made while a CUDA graph is captured: make the "
                    "call once before"
                )
            lists = build(keep, captured, shape, device=device, side=side)
            return outside_of_pools(lists) if allocates_from_pools(device) else lists

        return self._lists.get((keep, origin, shape, device, side), sources, make)


def allocates_from_pools(device: torch.device) -> bool:
    """Whether CUDA graphs may have memory pools of their own on a device."""
    return device.type == "cuda"


def outside_of_pools(lists: TileLists) -> TileLists:
    """Copy lists into memory that belongs to no CUDA graph.

    Before torch.compile captures a graph, it runs the call once, with allocations of the calling
    thread taken from the memory pool of the graph. It refuses what stays allocated there. Other
    threads allocate as usual, so that another thread makes the copies.
    """
    device = lists.tiles.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def copied() -> TileLists:
        with torch.cuda.stream(stream):
            return replace(lists, tiles=lists.tiles.clone(), starts=lists.starts.clone())

    with ThreadPoolExecutor(1, thread_name_prefix="tilegen-lists") as thread:
        return thread.submit(copied).result()


JUDGED = 64
"""Side of the tiles by which the density of a traced mask is judged."""
LONGEST_JUDGED = 4096
"""Longest sequence for which the density of a traced mask is judged."""


def percent_live(mask: Mask) -> int:
    """Compute the percentage of tiles that an expression leaves, rounded up to a power of two.

    The length of a call is not known yet; the longest dimension of the tensors read is a good
    guess.
    """
    tables = [value.on("cpu", (LONGEST_JUDGED, LONGEST_JUDGED)) for value in mask.tables]
    sizes = [size for table in tables for size in table.shape]
    length = min(max(sizes, default=JUDGED), LONGEST_JUDGED)
    shape = Shape(1, 1, length, length).tiled(JUDGED, JUDGED)
    lists = build(mask.predicate(), tables, shape, device="cpu", side="rows")
    live = lists.visited_tiles / (shape.rows * shape.columns)
    return min(100, 2 ** math.ceil(math.log2(max(1.0, 100 * live))))
