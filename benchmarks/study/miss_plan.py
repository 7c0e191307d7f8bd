"""The points at which misses are counted: tiles for each head dim and cache, around d^2 = M.

Small-cache tiles take half of the cache or so. A cache that drops the line used longest ago needs
that room: it keeps what has just passed by. FlashAttention's tiles are the largest that fit. Where
none fits, or the next nearly does, two are counted, and the better stands for the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.study.misses import Point
from tilegen.kernels.spec import Direction

SMALL_FORWARD = {
    32: "fwd_scores 16x64x32, fwd_values 32x16x64",
    64: "fwd_scores 32x64x32, fwd_values 64x16x128",
    128: "fwd_scores 64x64x32, fwd_values 64x16x128",
    256: "fwd_scores 128x64x32, fwd_values 128x16x128",
    512: "fwd_scores 128x128x32, fwd_values 128x16x256",
}
SMALL_BACKWARD = {
    64: "bwd_scores 64x32x32, bwd_columns 16x64x128, bwd_rows 64x16x128",
    128: "bwd_scores 64x64x32, bwd_columns 16x128x128, bwd_rows 128x16x128",
    256: "bwd_scores 128x64x32, bwd_columns 16x128x128, bwd_rows 128x16x128",
}
FORWARD: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {
    (64, 1024): {32: (16,), 64: (64,), 128: (128,)},
    (128, 512): {32: (16, 64), 64: (16, 32), 128: (64,), 256: (128,)},
    (256, 512): {32: (16, 64), 64: (16, 64), 128: (16, 32), 256: (64,), 512: (128,)},
    (512, 256): {128: (16, 64), 256: (16,), 512: (64,)},
}
"""Query rows of FlashAttention's tiles by (head dim, length) and KB of the cache."""
BACKWARD: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {
    (128, 384): {64: (16, 32), 128: (16, 32), 256: (64,)},
    (256, 384): {64: (16,), 128: (16,), 256: (16, 32)},
}
"""Rows that stay of FlashAttention's backward: keys in dK and dV, queries in dQ."""
MASKS = {"causal": "causal", "block-sparse": "block_sparse(@:25,64)"}
MASKED_DIM, MASKED_LENGTH = 128, 512
MASKED_KB: dict[Direction, tuple[int, int]] = {"forward": (64, 16), "backward": (128, 16)}
"""KB of the cache, and FlashAttention's rows, of the masked points."""

ROOMIER_KB = 152
"""KB of a cache in which FlashAttention's backward, whose state nearly fills 128 KB, has room."""


def plan() -> list[Point]:
    """Return all points, those that count fastest first."""
    return sorted(_all(), key=_products)


def _products(point: Point) -> float:
    """Return the multiplications of a point, dense, relative to those of a forward product."""
    return point.seqlen**2 * point.head_dim * (2 if point.direction == "forward" else 7)


def _all() -> Iterator[Point]:
    for (head_dim, seqlen), caches in FORWARD.items():
        for memory, sides in caches.items():
            yield from _points("forward", "full", seqlen, head_dim, memory, sides)
    for (head_dim, seqlen), caches in BACKWARD.items():
        for memory, sides in caches.items():
            yield from _points("backward", "full", seqlen, head_dim, memory, sides)
    (large, _) = _points("backward", "full", 384, 128, 128, (32,))
    yield replace(large, memory_kb=ROOMIER_KB)
    for mask in MASKS.values():
        for direction, (memory, side) in MASKED_KB.items():
            yield from _points(direction, mask, MASKED_LENGTH, MASKED_DIM, memory, (side,))


def _points(
    direction: Direction,
    mask: str,
    seqlen: int,
    head_dim: int,
    memory_kb: int,
    sides: tuple[int, ...],
) -> Iterator[Point]:
    large = [
        f"fwd {side}x16" if direction == "forward" else f"bwd_dkdv 16x{side}, bwd_dq {side}x16"
        for side in sides
    ]
    small = SMALL_FORWARD if direction == "forward" else SMALL_BACKWARD
    for schedule, tiles in [
        *(("large", kernels) for kernels in large),
        ("small", _narrowed(small[min(memory_kb, max(small))], head_dim)),
    ]:
        yield Point(
            direction=direction,
            mask=mask,
            seqlen=seqlen,
            head_dim=head_dim,
            memory_kb=memory_kb,
            schedule=schedule,
            tiles=tiles,
        )


def _narrowed(tiles: str, head_dim: int) -> str:
    """Return tiles whose slices of V are no wider than the head dim."""
    for width in (256, 128):
        if width > head_dim:
            tiles = tiles.replace(f"x16x{width}", f"x16x{width // 2}")
    return tiles
