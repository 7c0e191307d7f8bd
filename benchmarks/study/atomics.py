"""Cost of an addition into slow memory: one-way reductions, load and store, or a store alone.

The fused backward adds dQ tiles so. tilegen emits no fused backward: these kernels do nothing but
its additions, to an fp32 buffer of its shape.
"""

# Triton is not typed:
# pyright: basic

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = tl.constexpr(64), tl.constexpr(64)
ADDITIONS = 16
"""Number of programs that add to each tile, as so many KV tiles would."""


@triton.jit
def add_atomic(buffer, ADDITIONS: tl.constexpr):  # noqa: ANN001, ANN201, N803
    """Add 1 to every tile, one-way."""
    at = _tile(ADDITIONS)
    tl.atomic_add(buffer + at, tl.full((ROWS, COLUMNS), 1.0, tl.float32), sem="relaxed")


@triton.jit
def add_load_store(buffer, ADDITIONS: tl.constexpr):  # noqa: ANN001, ANN201, N803
    """The same by a load and a store; programs overwrite each other's sums."""
    at = _tile(ADDITIONS)
    tl.store(buffer + at, tl.load(buffer + at, cache_modifier=".cg") + 1.0)


@triton.jit
def add_store(buffer, ADDITIONS: tl.constexpr):  # noqa: ANN001, ANN201, N803
    """A store alone."""
    at = _tile(ADDITIONS)
    tl.store(buffer + at, tl.full((ROWS, COLUMNS), 1.0, tl.float32))


@triton.jit
def _tile(ADDITIONS: tl.constexpr):  # noqa: ANN202, N803
    """Programs of one tile are a whole sweep apart, as those of one fused row tile are."""
    tiles = tl.num_programs(0) // ADDITIONS
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    rows = tile * ROWS + tl.arange(0, ROWS)
    return rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


KERNELS = {"atomic": add_atomic, "load_store": add_load_store, "store": add_store}


def add(how: str, buffer_bytes: int, device: str) -> torch.Tensor:
    """Add ADDITIONS times to every word of a buffer of that size, and return it."""
    tile = ROWS.value * COLUMNS.value
    tiles = buffer_bytes // (4 * tile)
    buffer = torch.zeros(tiles * tile, device=device)
    KERNELS[how][(ADDITIONS * tiles,)](buffer, tl.constexpr(ADDITIONS))
    return buffer
