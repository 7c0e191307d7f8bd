"""Classes of tiles, found in two ways: pair by pair, and as kernels visit them."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray

from tests.mask_zoo import BATCH, HEADS, Pairs
from tilegen.masks.form import Shape
from tilegen.masks.mask import Mask, Side
from tilegen.masks.tensors import tensors_of
from tilegen.masks.tiles.tile_lists import build
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
