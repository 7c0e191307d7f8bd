"""Tiles of masks without a closed form, counted from their lists: what the model reasons about."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from tilegen.masks.binding import Shape, realized, tensors_of
from tilegen.masks.compiler import predicate
from tilegen.masks.mask import Mask, Side
from tilegen.masks.tile_lists import build
from tilegen.masks.tiles import TileRanges
from tilegen.masks.traced import typical


@lru_cache(maxsize=512)
def listed_ranges(mask: Mask, side: Side, shape: Shape, block_m: int, block_n: int) -> TileRanges:
    """Return the tiles every stationary tile visits, exactly; typical tensors stand for missing
    ones."""
    mask = realized(typical(mask), shape)
    lists = build(
        predicate(mask, side),
        tensors_of(mask, shape, torch.device("cpu")),
        batch=shape.batch,
        heads=shape.heads,
        seqlen_q=shape.seqlen_q,
        seqlen_kv=shape.seqlen_kv,
        block_m=block_m,
        block_n=block_n,
        device="cpu",
        side=side,
    )
    length, block = (shape.seqlen_kv, block_n) if side == "rows" else (shape.seqlen_q, block_m)
    starts = lists.starts.numpy()
    each = (lists.batch, lists.heads, lists.num_stationary)
    last = (lists.tiles.numpy() == -(-length // block) - 1).astype(np.int64)
    reached = np.concatenate([[0], last.cumsum()])[starts[::2]]
    return TileRanges(
        visited=(starts[2::2] - starts[:-2:2]).reshape(each),
        full=(starts[1::2] - starts[:-1:2]).reshape(each),
        ends=np.diff(reached).reshape(each),
        block=block,
        length=length,
    )
