"""Masks that need lists of tiles, and the check of such lists against brute force, in numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tilegen.masks.form import Shape, TiledShape
from tilegen.masks.language.algebra import as_expr, both, equal, load, opposite
from tilegen.masks.language.expr import SEQLEN_KV, SEQLEN_Q, B, Expr, H, K, Q, slot_of
from tilegen.masks.tiles import tile_classes
from tilegen.masks.tiles.tile_classes import TileClasses
from tilegen.masks.tiles.tile_lists import TileLists, lists_of

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


def brute_force(kept: NDArray[np.bool_], shape: TiledShape) -> NDArray[np.int64]:
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
    expected = brute_force(dense(keep, captured, shape), shape)
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
