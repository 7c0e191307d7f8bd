"""The tiles that a mask leaves at given lengths and tile shapes, as numbers for the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import sympy
import torch

from tilegen.errors import Unsupported
from tilegen.masks.language.evaluation import Points
from tilegen.masks.language.integers import exact
from tilegen.masks.language.symbols import FIRST, LAST, SEQLEN_KV, SEQLEN_Q, B, H
from tilegen.masks.mask import Mask, Side, SlidingWindow
from tilegen.masks.shapes import Shape
from tilegen.masks.tiles.closed_form import depends_on, edges, stream_sets
from tilegen.masks.tiles.intervals import Edges, Range, merge
from tilegen.masks.tiles.tile_counts import listed_ranges
from tilegen.masks.tiles.visits import TileRanges
from tilegen.masks.values import Values


def tile_ranges(
    mask: Mask,
    side: Side,
    *,
    seqlen_q: int,
    seqlen_kv: int,
    block_m: int,
    block_n: int,
    batch: int = 1,
    heads: int = 1,
) -> TileRanges:
    """Return the tiles every stationary tile visits, at given lengths; the same arithmetic as the
    emitted kernels'.

    `batch` and `heads` matter only to a mask that depends on them.
    """
    shape = Shape(batch, heads, seqlen_q, seqlen_kv).tiled(block_m, block_n)
    stays, stays_block, length, block = (
        (seqlen_q, block_m, seqlen_kv, block_n)
        if side == "rows"
        else (seqlen_kv, block_n, seqlen_q, block_m)
    )
    try:
        depends, evaluate, values = _evaluator(mask, side)
    except Unsupported:
        return listed_ranges(mask, side, shape)
    first = np.arange(0, stays, stays_block, dtype=np.int64)[None, None]
    last = np.minimum(first + stays_block, stays) - 1
    b = np.arange(batch if B in depends else 1)[:, None, None]
    h = np.arange(heads if H in depends else 1)[None, :, None]
    symbols = {FIRST: first, LAST: last, B: b, H: h, SEQLEN_Q: seqlen_q, SEQLEN_KV: seqlen_kv}
    live, dropped = evaluate(symbols, [value.sample(shape.by_axis) for value in values])
    found = merge(_OnArrays(block), live, dropped, length)
    every = np.broadcast_shapes(first.shape, b.shape, h.shape)
    zero = np.zeros(every, dtype=np.int64)
    full = sum((hi - lo for lo, hi in found.full), zero)
    visited = sum((hi - lo for lo, hi in found.partial), full)
    tiles = -(-length // block)
    ends = sum(((hi == tiles) & (hi > lo) for lo, hi in (*found.partial, *found.full)), zero)
    return TileRanges(
        visited=visited,
        full=full,
        ends=ends,
        block=block,
        length=length,
        ranges=(found.partial, found.full),
    )


class _OnArrays:
    """The arithmetic of `merge` on numpy arrays."""

    def __init__(self, block: int) -> None:
        self._block = block
        numpy: Any = np
        self.maximum, self.minimum, self.where = numpy.maximum, numpy.minimum, numpy.where

    def tile_of(self, index: Any) -> Any:
        return index // self._block

    def tiles_up_to(self, index: Any) -> Any:
        return -(-index // self._block)

    def named(self, name: str, value: Any) -> Any:
        return value

    def in_order(self, first: Range, second: Range) -> tuple[Range, Range]:
        swap = second[0] < first[0]
        low = np.where(swap, second[0], first[0]), np.where(swap, second[1], first[1])
        return low, (np.where(swap, first[0], second[0]), np.where(swap, first[1], second[1]))


def is_solved(mask: Mask, side: Side) -> bool:
    """Whether tiles come in closed form; counting those of others takes time."""
    try:
        _evaluator(mask, side)
    except Unsupported:
        return False
    return True


def counted_over(mask: Mask, batch: int, heads: int) -> tuple[int, int]:
    """Return the numbers of batches and of heads over which tiles are counted: 1 where a mask does
    not depend on them, or is a stand-in."""
    if mask.is_stand_in:
        return 1, 1
    depends = depends_on(_with_scalars(mask).general)
    return batch if B in depends else 1, heads if H in depends else 1


def _evaluator(mask: Mask, side: Side) -> tuple[frozenset[Any], Evaluator, tuple[Values, ...]]:
    """Return which of B and H a mask depends on, its intervals as a function of numbers, and the
    values that it reads."""
    alike = _with_scalars(mask)
    values = alike.values
    if any(value.is_unknown for value in values):
        raise Unsupported(f"expected a mask with its tensors, got {mask}")
    return *_evaluator_of(alike.general, side), values


def _with_scalars(mask: Mask) -> Mask:
    """Return a mask that reads the sides of its windows: SymPy solves it once for all widths."""
    if not isinstance(mask, SlidingWindow):
        return mask.with_parts(_with_scalars)

    def scalar(side: int | Values | None) -> Values | None:
        return Values(axes="", typical=side) if isinstance(side, int) else side

    return replace(mask, left=scalar(mask.left), right=scalar(mask.right))


Evaluator = Callable[[Mapping[sympy.Symbol, Any], Sequence[Any]], tuple[list[Edges], list[Edges]]]


@lru_cache(maxsize=512)
def _evaluator_of(mask: Mask, side: Side) -> tuple[frozenset[Any], Evaluator]:
    sets = stream_sets(mask, side)
    intervals = [edges(one, sets.length) for one in sets.live]
    intervals += [edges(one) for one in sets.dropped]
    prepared = [tuple(e if e is None else exact(e) for e in one) for one in intervals]

    def evaluate(
        symbols: Mapping[sympy.Symbol, Any], samples: Sequence[Any]
    ) -> tuple[list[Edges], list[Edges]]:
        tensors = [torch.from_numpy(np.array(sample)) for sample in samples]
        given = {symbol: torch.as_tensor(value) for symbol, value in symbols.items()}
        points = Points(tensors, given, torch.device("cpu"))
        numbers = [
            Edges(*(None if e is None else points(e).numpy() for e in one)) for one in prepared
        ]
        return numbers[: len(sets.live)], numbers[len(sets.live) :]

    return depends_on(mask), evaluate
