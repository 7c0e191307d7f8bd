"""The kernels that measure a processor's rates: products, exponentials, reading."""

# pyright: basic
# Triton takes annotations of arguments for code.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(x_ptr, out_ptr, steps, N: tl.constexpr) -> None:
    """Add up products of a tile with itself, which stays packed."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + at)
    sums = tl.zeros((N, N), tl.float32)
    for _ in range(steps):
        sums = tl.dot(x, x, sums, input_precision="ieee")
    tl.store(out_ptr + at, sums)


@triton.jit
def exponentiate(x_ptr, out_ptr, steps, N: tl.constexpr) -> None:
    """Take exponentials of a tile, again and again."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + at)
    for _ in range(steps):
        x = tl.exp2(x) - 1.0
    tl.store(out_ptr + at, x)


@triton.jit
def read(x_ptr, out_ptr, rounds, steps, N: tl.constexpr) -> None:
    """Read `steps` tiles of 16 x N, `rounds` times."""
    at = tl.arange(0, 16)[:, None] * N + tl.arange(0, N)[None, :]
    most = tl.zeros((16,), tl.float32)
    for _ in range(rounds):
        for i in range(steps):
            most = tl.maximum(most, tl.sum(tl.load(x_ptr + i * 16 * N + at), 1))
    tl.store(out_ptr + tl.arange(0, 16), most)
