"""Masks that need lists of tiles, and the check of such lists against brute force, in numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import sympy
import torch
from numpy.typing import NDArray

from tilegen.masks.language.nodes import Sigmoid, Where
from tilegen.masks.language.symbols import SEQLEN_KV, SEQLEN_Q, B, H, K, Lookup, Q, captured_name
from tilegen.masks.shapes import Shape, TiledShape
from tilegen.masks.tiles import tile_classes
from tilegen.masks.tiles.tile_classes import TileClasses
from tilegen.masks.tiles.tile_lists import TileLists, lists_of

CPU = torch.device("cpu")
EMPTY, FULL, PARTIAL = 0, 1, 2

SAME_DOCUMENT = sympy.Eq(Lookup(captured_name(0, "int"), Q), Lookup(captured_name(0, "int"), K))


def block_layout(block: int) -> Any:
    layout = captured_name(0, "bool")
    return sympy.Ne(Lookup(layout, sympy.floor(Q / block), sympy.floor(K / block)), 0)


def neighbourhood(width: int, radius: int) -> Any:
    rows = sympy.floor(Q / width) - sympy.floor(K / width)
    columns = sympy.Mod(Q, width) - sympy.Mod(K, width)
    return (sympy.Abs(rows) <= radius) & (sympy.Abs(columns) <= radius)


# --------------------------------------------------------------------------------------------------
# Brute force


TINY = 1e-6
"""Less than what two fractions here differ by, more than what they are rounded by."""
MEANING: dict[Any, Callable[..., Any]] = {
    sympy.Add: lambda *x: reduce(np.add, x),
    sympy.Pow: lambda x, n: x**n,
    sympy.floor: lambda x: np.floor(x + TINY),
    sympy.ceiling: lambda x: np.ceil(x - TINY),
    sympy.Mod: np.mod,
    sympy.Abs: np.abs,
    sympy.Min: lambda *x: reduce(np.minimum, x),
    sympy.Max: lambda *x: reduce(np.maximum, x),
    sympy.Lt: lambda x, y: x < y - TINY,
    sympy.Le: lambda x, y: x <= y + TINY,
    sympy.Gt: lambda x, y: x > y + TINY,
    sympy.Ge: lambda x, y: x >= y - TINY,
    sympy.Eq: np.equal,
    sympy.Ne: np.not_equal,
    sympy.And: lambda *x: reduce(np.logical_and, x),
    sympy.Or: lambda *x: reduce(np.logical_or, x),
    sympy.Not: np.logical_not,
    Where: np.where,
    sympy.sign: np.sign,
    sympy.exp: np.exp,
    sympy.log: np.log,
    sympy.tanh: np.tanh,
    sympy.sin: np.sin,
    sympy.cos: np.cos,
    Sigmoid: lambda x: 1 / (1 + np.exp(-x)),
}


def dense(keep: Any, captured: list[torch.Tensor], shape: TiledShape) -> NDArray[np.bool_]:
    """Return the mask of all pairs, (batch, heads, seqlen_q, seqlen_kv)."""
    sizes = (shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_kv)
    values: dict[Any, Any] = dict(zip((B, H, Q, K), np.indices(sizes), strict=True))
    values |= {SEQLEN_Q: shape.seqlen_q, SEQLEN_KV: shape.seqlen_kv}

    def look_up(name: Any, *indices: Any) -> Any:
        tensor = captured[int(name.name[1:])].numpy()
        places = [np.broadcast_to(index, sizes).astype(int) for index in indices]
        inside = np.ones(sizes, dtype=bool)
        for place, size in zip(places, tensor.shape, strict=True):
            inside &= (place >= -size) & (place < size)
        found = np.zeros(sizes)
        found[inside] = tensor[tuple(place[inside] for place in places)]
        return found

    def value(expr: Any) -> Any:
        if expr in values:
            return values[expr]
        if isinstance(expr, Lookup):
            return look_up(expr.args[0], *map(value, expr.args[1:]))
        if expr.is_Mul:  # a third of 3 is 1, whatever the order
            numerator, denominator = expr.as_numer_denom()
            factors = numerator.args if numerator.is_Mul else [numerator]
            return reduce(np.multiply, map(value, factors)) / value(denominator)
        if expr.is_Atom:
            return bool(expr) if expr in (True, False) else float(expr)
        return MEANING[expr.func](*map(value, expr.args))

    with np.errstate(invalid="ignore", divide="ignore"):
        return np.broadcast_to(value(keep), sizes)


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
    keep = sympy.sympify(keep)
    expected = brute_force(dense(keep, captured, shape), shape)
    classes = tile_classes.classify(keep, captured, shape, CPU)
    rows, columns = lists_of(classes, "rows"), lists_of(classes, "columns")
    found = listed(rows, shape.columns)
    assert (np.broadcast_to(found, expected.shape) == expected).all()
    assert (listed(columns, shape.rows) == found.swapaxes(2, 3)).all()
    return classes


def shape_of(
    seqlen: int | tuple[int, int], block: int | tuple[int, int], *, batch: int = 1, heads: int = 1
) -> TiledShape:
    seqlen_q, seqlen_kv = seqlen if isinstance(seqlen, tuple) else (seqlen, seqlen)
    block_m, block_n = block if isinstance(block, tuple) else (block, block)
    return Shape(batch, heads, seqlen_q, seqlen_kv).tiled(block_m, block_n)
