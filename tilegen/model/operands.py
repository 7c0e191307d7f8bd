"""Count the words that a step moves to and from shared memory: operands of matrix instructions,
arriving tiles, and weights that warps exchange."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tilegen.kernels.loops import Product, Step
from tilegen.model.columns import Number
from tilegen.model.footprint import divides_rows, reads_shared, repetition
from tilegen.model.on_chip import ROWS_PER_WARP, family


def shared_words(
    work: Step, element_bytes: int, warps: Number, arch: str, *, rows_per_read: int
) -> Number:
    """Count the words that a step with matrix instructions moves through the port of shared memory.

    Instructions that read both operands in place read the streamed operand once for `rows_per_read`
    rows. If warpgroups repeat a score tile, each reads the whole tile, and computes it in as many
    pieces as there are warpgroups. Other instructions take operands from registers. Warps that
    divide a tile along its rows keep their rows there and read all streamed words. Warps that
    divide it along columns read all stationary rows in each step, and pass their part of the
    weights to the others. tests/compile_only/test_machine_code.py compares with machine code.
    """
    repeated = repetition(work, element_bytes, warps, arch)
    made = _passing(product for product in work.products if product.scores)
    summed = _passing(product for product in work.products if not product.scores)
    loaded = work.loaded * work.loads
    own = work.kept + sum(x.times * x.rows * x.depth for x in work.products if x.rows_in_shared)
    reads = np.maximum(1.0, work.rows / max(rows_per_read, 1))
    in_place = reads * (repeated * made + summed) + repeated**2 * own + loaded
    if not np.any(work.scores):
        others = np.maximum(1.0, np.minimum(warps, work.rows / ROWS_PER_WARP)) * summed + loaded
    else:
        exchanged = sum(not product.scores for product in work.products) * work.scores
        by_columns = repeated * made + summed + warps * work.kept + (1 + warps) * exchanged
        by_rows = divides_rows(work, element_bytes, arch)
        others = np.where(by_rows, warps * (made + summed), by_columns) + loaded
    return np.where(reads_shared(family(arch), work, element_bytes), in_place, others)


def _passing(products: Iterable[Product]) -> int:
    return sum(product.times * product.columns * product.depth for product in products)
