"""Classes of tiles, found pair by pair, and as kernels visit them, in ranges or lists."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.support.mask_zoo import BATCH, HEADS, Pairs
from tilegen.masks.form import Shape, TiledShape
from tilegen.masks.language.algebra import as_expr, both, equal, load, opposite
from tilegen.masks.language.expr import SEQLEN_KV, SEQLEN_Q, B, Expr, H, K, Q, slot_of
from tilegen.masks.mask import Mask, Side
from tilegen.masks.tensors import tensors_of
from tilegen.masks.tiles import tile_classes
from tilegen.masks.tiles.tile_classes import TileClasses
from tilegen.masks.tiles.tile_lists import TileLists, build, lists_of
from tilegen.masks.tiles.tile_ranges import tile_ranges


def brute_force(
    pairs: Pairs, side: Side, block_m: int, block_n: int, *, listed: bool = False
) -> NDArray[np.int64]:
    """Return the class of every tile (0 empty, 1 partial, 2 full), (batch, heads, stationary,
    streamed). A tile that the end of the streamed sequence cuts is never full; in lists, neither is
    one that the end of the other sequence cuts."""
    if side == "columns":
        pairs, block_m, block_n = pairs.swapaxes(2, 3), block_n, block_m
    rows, columns = -(-pairs.shape[2] // block_m), -(-pairs.shape[3] // block_n)
    classes = np.zeros((*pairs.shape[:2], rows, columns), dtype=np.int64)
    for i, j in itertools.product(range(rows), range(columns)):
        tile = pairs[..., i * block_m : (i + 1) * block_m, j * block_n : (j + 1) * block_n]
        whole = tile.shape[3] == block_n and (tile.shape[2] == block_m or not listed)
        classes[..., i, j] = np.where(tile.all((2, 3)) & whole, 2, tile.any((2, 3)))
    return classes


def found_classes(
    mask: Mask, side: Side, *, seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int,
    batch: int = BATCH, heads: int = HEADS,
) -> tuple[NDArray[np.int64], bool]:  # fmt: skip
    """Return the class of every tile as the compiler has it, and whether it has lists; that no tile
    is visited twice, and that counts agree, is checked on the way."""
    lengths = dict(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, block_m=block_m, block_n=block_n)
    ranges = tile_ranges(mask, side, batch=batch, heads=heads, **lengths)
    stays, stays_block, length, block = (
        (seqlen_q, block_m, seqlen_kv, block_n)
        if side == "rows"
        else (seqlen_kv, block_n, seqlen_q, block_m)
    )
    stationary, tiles = -(-stays // stays_block), -(-length // block)
    listed = not any(ranges.pieces)
    if not listed:
        each = ranges.visited.shape
        classes = np.zeros((*each, tiles), dtype=np.int64)
        for number, pieces in enumerate(ranges.pieces, start=1):
            for lo, hi in pieces:
                for index in np.ndindex(each):
                    start, end = lo[index], hi[index]
                    assert start == end or 0 <= start < end <= tiles
                    assert not classes[index][start:end].any(), "a tile is visited twice"
                    classes[index][start:end] = number
    else:
        shape = Shape(batch, heads, seqlen_q, seqlen_kv).tiled(block_m, block_n)
        tensors = tensors_of(mask, shape, torch.device("cpu"))
        keep = mask.predicate(side)
        lists = build(keep, tensors, shape, device="cpu", side=side)
        each = (lists.batch, lists.heads, stationary)
        flat = np.zeros((int(np.prod(each)), tiles), dtype=np.int64)
        starts, numbers = lists.starts.tolist(), lists.tiles.tolist()
        for i, row in enumerate(flat):
            fulls, partials, end = starts[2 * i : 2 * i + 3]
            assert len(set(numbers[fulls:end])) == end - fulls, "a tile is visited twice"
            row[numbers[fulls:partials]] = 2
            row[numbers[partials:end]] = 1
        classes = flat.reshape(*each, tiles)
    assert ranges.visited_tiles == (classes > 0).sum()
    assert ranges.full_tiles == (classes == 2).sum()
    beyond = tiles * block - length
    assert (
        ranges.visited_rows == (classes > 0).sum() * block - beyond * (classes[..., -1] > 0).sum()
    )
    return np.broadcast_to(classes, (batch, heads, stationary, tiles)), listed


CPU = torch.device("cpu")
EMPTY, FULL, PARTIAL = 0, 1, 2

SAME_DOCUMENT = equal(load(0, "int", Q), load(0, "int", K))


def block_layout(block: int) -> Expr:
    return opposite(equal(load(0, "bool", Q // block, K // block), 0))


def neighbourhood(width: int, radius: int) -> Expr:
    rows, columns = Q // width - K // width, Q % width - K % width
    return both(abs(rows) <= radius, abs(columns) <= radius)


# --------------------------------------------------------------------------------------------------
# Brute force


MEANING: dict[str, Callable[..., Any]] = {
    "add": lambda *x: reduce(np.add, x),
    "neg": np.negative,
    "mul": lambda *x: reduce(np.multiply, x),
    "div": np.divide,
    "floor": np.floor,
    "floordiv": lambda x, y: np.where(y == 0, x, x // np.where(y == 0, 1, y)),
    "mod": lambda x, y: np.where(y == 0, 0, np.mod(x, np.where(y == 0, 1, y))),
    "abs": np.abs,
    "min": lambda *x: reduce(np.minimum, x),
    "max": lambda *x: reduce(np.maximum, x),
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "and": lambda *x: reduce(np.logical_and, x),
    "or": lambda *x: reduce(np.logical_or, x),
    "not": np.logical_not,
    "where": np.where,
    "sign": np.sign,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def dense(keep: Any, captured: list[torch.Tensor], shape: TiledShape) -> NDArray[np.bool_]:
    """Return the mask of all pairs, (batch, heads, seqlen_q, seqlen_kv)."""
    sizes = (shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_kv)
    values: dict[Any, Any] = dict(zip((B, H, Q, K), np.indices(sizes), strict=True))
    values |= {SEQLEN_Q: shape.seqlen_q, SEQLEN_KV: shape.seqlen_kv}

    def look_up(slot: int, *indices: Any) -> Any:
        tensor = captured[slot].numpy()
        places = [np.broadcast_to(index, sizes).astype(int) for index in indices]
        inside = np.ones(sizes, dtype=bool)
        for place, size in zip(places, tensor.shape, strict=True):
            inside &= (place >= -size) & (place < size)
        actual = np.zeros(sizes, dtype=tensor.dtype)
        actual[inside] = tensor[tuple(place[inside] for place in places)]
        return actual.astype(np.int64) if actual.dtype.kind in "bui" else actual

    def value(expr: Expr) -> Any:
        if expr in values:
            return values[expr]
        if expr.is_const:
            return np.float32(expr.value) if expr.is_float else np.asarray(expr.value)
        args = [value(arg) for arg in expr.args]
        if expr.op == "load":
            return look_up(slot_of(expr), *args)
        if expr.op == "power":
            return reduce(np.multiply, args * expr.value)
        if expr.op == "cast":
            return np.asarray(args[0]).astype(expr.dtype)
        return MEANING[expr.op](*args)

    with np.errstate(invalid="ignore", divide="ignore"):
        return np.broadcast_to(value(as_expr(keep)), sizes)


def listed_brute_force(kept: NDArray[np.bool_], shape: TiledShape) -> NDArray[np.int64]:
    """Return the class of every tile, (batch, heads, rows, columns)."""
    classes = np.zeros((*kept.shape[:2], shape.rows, shape.columns), dtype=np.int64)
    pairs = shape.block_m * shape.block_n
    for row in range(shape.rows):
        for column in range(shape.columns):
            tile = kept[
                :,
                :,
                row * shape.block_m : (row + 1) * shape.block_m,
                column * shape.block_n : (column + 1) * shape.block_n,
            ].sum((2, 3))
            classes[:, :, row, column] = np.where(tile == 0, EMPTY, PARTIAL)
            classes[:, :, row, column][tile == pairs] = FULL
    return classes


def listed(lists: TileLists, streamed: int) -> NDArray[np.int64]:
    """Return the class of every tile as the lists have it, (batch, heads, stationary, streamed)."""
    sizes = (lists.batch, lists.heads, lists.num_stationary)
    assert lists.tiles.dtype == torch.int32
    assert lists.starts.dtype == torch.int64
    assert lists.starts.shape == (2 * np.prod(sizes) + 1,)
    assert lists.starts[0] == 0
    assert lists.starts[-1] == lists.visited_tiles == len(lists.tiles)
    classes = np.zeros((int(np.prod(sizes)) * 2, streamed), dtype=np.int64)
    starts = lists.starts.tolist()
    for segment, (start, end) in enumerate(itertools.pairwise(starts)):
        tiles = lists.tiles[start:end].tolist()
        assert tiles == sorted(set(tiles))
        classes[segment, tiles] = PARTIAL if segment % 2 else FULL
    full, partial = classes[::2], classes[1::2]
    assert not (full * partial).any()
    classes = (full + partial).reshape(*sizes, streamed)
    live, whole = lists.flags(streamed)
    assert (live.numpy() == (classes > 0)).all()
    assert (whole.numpy() == (classes == FULL)).all()
    return classes


def check(keep: Any, captured: list[torch.Tensor], shape: TiledShape) -> TileClasses:
    """Compare the lists of both sides with brute force; return the classification."""
    keep = as_expr(keep)
    expected = listed_brute_force(dense(keep, captured, shape), shape)
    classes = tile_classes.classify(keep, captured, shape, CPU)
    rows, columns = lists_of(classes, "rows"), lists_of(classes, "columns")
    actual = listed(rows, shape.columns)
    assert (np.broadcast_to(actual, expected.shape) == expected).all()
    assert (listed(columns, shape.rows) == actual.swapaxes(2, 3)).all()
    return classes


def shape_of(
    seqlen: int | tuple[int, int], block: int | tuple[int, int], *, batch: int = 1, heads: int = 1
) -> TiledShape:
    seqlen_q, seqlen_kv = seqlen if isinstance(seqlen, tuple) else (seqlen, seqlen)
    block_m, block_n = block if isinstance(block, tuple) else (block, block)
    return Shape(batch, heads, seqlen_q, seqlen_kv).tiled(block_m, block_n)
