"""Sorts the tiles of any mask into empty, full and partial: exactly, at the cost of the live ones.

Coarse squares of tiles come first. What interval arithmetic proves empty is dropped at once, what
it proves full is kept whole, and the rest is divided until single tiles remain. Those still open
are looked at in a few pairs each, which usually finds both a kept and a dropped one; the next are
divided once more, then looked at in more pairs, and only the last are evaluated pair by pair. Work
is done in chunks of bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from tilegen.masks.form import TiledShape
from tilegen.masks.language.evaluation import points
from tilegen.masks.language.expr import PAIR, B, Expr, H
from tilegen.masks.language.value_bounds import Interval, Tables, Verdict, tile_bounds

CHUNK_BYTES = 32 << 20
"""About the most temporary memory: tiles and pairs are evaluated in chunks that need no more."""
FAN = 8
"""A square of tiles is divided into FAN x FAN."""
FIRST_SQUARES = 16_384
"""About the number of coarsest squares: fewer would take as long, for a GPU at least."""
SAMPLES = 16
"""Number of pairs in which an open tile is first looked at."""

Range = tuple[torch.Tensor, torch.Tensor]
"""First and last index, both inclusive."""


@dataclass(frozen=True, eq=False)
class TileClasses:
    """The live tiles of a mask, in no particular order."""

    codes: torch.Tensor
    """int64 (live,): (((b * heads + h) * rows + row) * 2 + is_partial) * columns + column."""
    shape: TiledShape
    """The shape, with batch and heads 1 where the mask does not depend on them."""
    open_tiles: int
    """The number of tiles that interval arithmetic left open."""
    evaluated_tiles: int
    """The number of tiles that were evaluated pair by pair."""


def classify(
    keep: Expr, captured: Sequence[torch.Tensor], shape: TiledShape, device: torch.device
) -> TileClasses:
    """Return the tiles in which `keep` holds for some pair inside both sequences; full are those
    wholly inside in which it holds for all. Raises Unsupported, naming the term."""
    classifier = _Classifier(keep, captured, distinguished(keep, shape), device)
    return classifier.run()


def distinguished(keep: Expr, shape: TiledShape) -> TiledShape:
    """Return the shape with batch and heads 1 where `keep` does not depend on them."""
    batch = shape.batch if B in keep.free else 1
    heads = shape.heads if H in keep.free else 1
    return replace(shape, batch=batch, heads=heads)


class _Classifier:
    """Squares of tiles are int64 tensors (3, n): batch and head, row, column in their level's
    units."""

    def __init__(
        self,
        keep: Expr,
        captured: Sequence[torch.Tensor],
        shape: TiledShape,
        device: torch.device,
    ) -> None:
        self._keep = keep
        self._captured = [tensor.detach().to(device) for tensor in captured]
        self._shape = shape
        self._device = device
        self._tables: Tables = {}
        self._codes: list[torch.Tensor] = []
        self._open_tiles = 0
        self._evaluated_tiles = 0
        # All subexpressions are held at once, as 64-bit numbers.
        self._element_bytes = 8 * len(list(keep.walk()))

    def run(self) -> TileClasses:
        """Return the live tiles."""
        shape = self._shape
        level, sizes = 0, (shape.batch * shape.heads, shape.rows, shape.columns)
        while prod(sizes) > FIRST_SQUARES and max(sizes[1:]) > 1:
            level, sizes = level + 1, (sizes[0], -(-sizes[1] // FAN), -(-sizes[2] // FAN))
        axes = [torch.arange(size, device=self._device) for size in sizes]
        self._divide(torch.cartesian_prod(*axes).T, level)
        codes = torch.cat([torch.empty(0, dtype=torch.int64, device=self._device), *self._codes])
        return TileClasses(codes, self._shape, self._open_tiles, self._evaluated_tiles)

    def _divide(self, squares: torch.Tensor, level: int) -> None:
        """Find the live tiles in squares of FAN**level tiles each way."""
        for chunk in self._chunks(squares, 2):
            always, never = self._prove(chunk[0], *self._ranges(chunk, level))
            self._expand(chunk[:, always], level)
            undecided = chunk[:, ~always & ~never]
            if level == 0:
                self._settle(undecided)
                continue
            for part in self._chunks(undecided, 2 * FAN**2):
                self._divide(self._children(part, level), level - 1)

    def _expand(self, squares: torch.Tensor, level: int) -> None:
        """Note all tiles of full squares."""
        if level == 0:
            self._emit(squares, is_full=True)
        else:
            for part in self._chunks(squares, 2 * FAN**2):
                self._expand(self._children(part, level), level - 1)

    def _children(self, squares: torch.Tensor, level: int) -> torch.Tensor:
        """Return the squares one level below that are not wholly beyond the sequences."""
        step = torch.arange(FAN, device=self._device)
        batch_head, row, column = squares[:, :, None, None]
        row, column = row * FAN + step[:, None], column * FAN + step
        grid = torch.broadcast_tensors(batch_head, row, column)
        children = torch.stack([part.flatten() for part in grid])
        below = FAN ** (level - 1)
        exists = (children[1] * below < self._shape.rows) & (
            children[2] * below < self._shape.columns
        )
        return children[:, exists]

    def _prove(
        self, batch_head: torch.Tensor, q: Range, k: Range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute by interval arithmetic where the mask surely keeps all pairs of a rectangle,
        and where surely none."""
        values = {
            symbol: value if isinstance(value, Interval) else Interval(value, value)
            for symbol, value in self._values(batch_head, Interval(*q), Interval(*k)).items()
        }
        bounds = tile_bounds(self._captured, values, self._device, self._tables)
        verdict: Verdict = bounds(self._keep)
        size = torch.broadcast_shapes(q[0].shape, k[0].shape)
        return verdict.always.expand(size), verdict.never.expand(size)

    def _settle(self, tiles: torch.Tensor) -> None:
        """Classify tiles that interval arithmetic leaves open."""
        self._open_tiles += tiles.shape[1]
        tiles = self._sample(tiles, SAMPLES)
        tiles = self._prove_parts(tiles)
        tiles = self._sample(tiles, max(SAMPLES, self._shape.block_m + self._shape.block_n))
        self._evaluate_all(tiles)

    def _sample(self, tiles: torch.Tensor, count: int) -> torch.Tensor:
        """Note the tiles in which some of so many pairs, spread out, are kept and some dropped;
        return the others."""
        down, along = _spread(count, self._device)
        others = [tiles[:, :0]]
        for chunk in self._chunks(tiles, count):
            (q0, q1), (k0, k1) = self._ranges(chunk, 0)
            q = q0[:, None] + ((q1 - q0 + 1)[:, None] * down >> _SPREAD_BITS)
            k = k0[:, None] + ((k1 - k0 + 1)[:, None] * along >> _SPREAD_BITS)
            kept = self._evaluate(chunk, q, k)
            is_mixed = kept.any(1) & ~(kept.all(1) & self._is_inside(chunk))
            self._emit(chunk[:, is_mixed], is_full=False)
            others.append(chunk[:, ~is_mixed])
        return torch.cat(others, 1)

    def _prove_parts(self, tiles: torch.Tensor) -> torch.Tensor:
        """Classify tiles by interval arithmetic on FAN x FAN parts of each; return the others."""
        others = [tiles[:, :0]]
        for chunk in self._chunks(tiles, 2 * FAN**2):
            q, k = (self._parts(*one) for one in self._ranges(chunk, 0))
            always, never = self._prove(
                chunk[0, :, None, None],
                (q[0][:, :, None], q[1][:, :, None]),
                (k[0][:, None, :], k[1][:, None, :]),
            )
            always, never = always.flatten(1), never.flatten(1)
            is_mixed = always.any(1) & (never.any(1) | ~self._is_inside(chunk))
            is_full = always.all(1)
            self._emit(chunk[:, is_mixed & ~is_full], is_full=False)
            self._emit(chunk[:, is_full], is_full=True)
            others.append(chunk[:, ~is_mixed & ~is_full & ~never.all(1)])
        return torch.cat(others, 1)

    def _parts(self, first: torch.Tensor, last: torch.Tensor) -> Range:
        """Return ranges (n, FAN) that together cover [first, last]."""
        size, step = (last - first + 1)[:, None], torch.arange(FAN, device=self._device)
        starts = first[:, None] + size * step // FAN
        ends = first[:, None] + size * (step + 1) // FAN - 1
        return starts, torch.maximum(starts, ends)  # a short range has parts in common

    def _evaluate_all(self, tiles: torch.Tensor) -> None:
        """Classify tiles pair by pair."""
        shape = self._shape
        self._evaluated_tiles += tiles.shape[1]
        for chunk in self._chunks(tiles, shape.block_m * shape.block_n):
            (q0, _), (k0, _) = self._ranges(chunk, 0)
            q = q0[:, None, None] + torch.arange(shape.block_m, device=self._device)[:, None]
            k = k0[:, None, None] + torch.arange(shape.block_n, device=self._device)
            kept = self._evaluate(chunk, q, k) & (q < shape.seqlen_q) & (k < shape.seqlen_kv)
            some, every = kept.flatten(1).any(1), kept.flatten(1).all(1)
            self._emit(chunk[:, every], is_full=True)
            self._emit(chunk[:, some & ~every], is_full=False)

    def _evaluate(self, tiles: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return which pairs of each tile are kept; `q` and `k` are (tiles, ...)."""
        batch_head = tiles[0].view(-1, *[1] * (q.dim() - 1))
        values = self._values(batch_head, q, k)
        kept: torch.Tensor = points(self._captured, values, self._device)(self._keep)
        return kept.expand(torch.broadcast_shapes(q.shape, k.shape))

    def _values(self, batch_head: torch.Tensor, q: Any, k: Any) -> dict[Expr, Any]:
        """Return the values of a mask's symbols."""
        shape = self._shape
        lengths = torch.tensor((shape.seqlen_q, shape.seqlen_kv), device=self._device)
        pair = (batch_head // shape.heads, batch_head % shape.heads, q, k, *lengths)
        return dict(zip(PAIR, pair, strict=True))

    def _ranges(self, squares: torch.Tensor, level: int) -> tuple[Range, Range]:
        """Return the first and the last query row, and KV column, of squares of tiles."""
        shape = self._shape
        first_q = squares[1] * (shape.block_m * FAN**level)
        first_k = squares[2] * (shape.block_n * FAN**level)
        last_q = (first_q + (shape.block_m * FAN**level - 1)).clamp(max=shape.seqlen_q - 1)
        last_k = (first_k + (shape.block_n * FAN**level - 1)).clamp(max=shape.seqlen_kv - 1)
        return (first_q, last_q), (first_k, last_k)

    def _is_inside(self, tiles: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        return ((tiles[1] + 1) * shape.block_m <= shape.seqlen_q) & (
            (tiles[2] + 1) * shape.block_n <= shape.seqlen_kv
        )

    def _emit(self, tiles: torch.Tensor, *, is_full: bool) -> None:
        """Note live tiles; of the full ones, those that a sequence ends in are partial."""
        if tiles.shape[1]:
            batch_head, row, column = tiles
            is_partial = (~self._is_inside(tiles)).long() if is_full else 1
            segment = (batch_head * self._shape.rows + row) * 2 + is_partial
            self._codes.append(segment * self._shape.columns + column)

    def _chunks(self, squares: torch.Tensor, elements: int) -> Iterator[torch.Tensor]:
        """Yield squares in chunks that need CHUNK_BYTES at most, at so many elements each."""
        size = max(1, CHUNK_BYTES // (self._element_bytes * elements))
        if squares.shape[1]:
            yield from squares.split(size, dim=1)


_SPREAD_BITS = 16


def _spread(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points of the unit square, times 2**_SPREAD_BITS: its corners, then evenly spread."""
    # Multiples of these two irrationals, modulo 1, fill the square evenly (the R2 sequence).
    wide: Any = {"dtype": torch.float64, "device": "cpu"}
    steps = torch.arange(1, count - 3, **wide)
    corners = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], **wide)
    inner = torch.stack([steps * 0.7548776662466927 % 1, steps * 0.5698402909980532 % 1], 1)
    points = torch.cat([corners, inner]) * (2**_SPREAD_BITS - 1)
    q, k = points.long().T.to(device)
    return q, k
