"""Words that a step moves to and from shared memory: operands of its matrix instructions, tiles as
they come in, and weights on their way to other warps."""

from __future__ import annotations

from collections.abc import Iterable

from tilegen.kernels.loops import Product, Step
from tilegen.model.footprint import divides_rows, in_place_of, repetition
from tilegen.model.on_chip import ROWS_PER_WARP, family


def shared_words(
    work: Step, element_bytes: int, warps: int, arch: str, *, rows_per_read: int
) -> float:
    """Return the words that a step with matrix instructions moves through the port of shared
    memory.

    Instructions that read both operands in place read the passing one once for `rows_per_read`
    rows; where warpgroups repeat a score tile, each reads all of it, and forms it in as many
    pieces as there are of them. Others take operands from registers: warps that divide a tile along
    its rows keep their own rows there and read all that passes; warps that divide it across read
    all rows that stay, in each step, and hand their part of the weights to the others. Held to the
    machine code by tests/compile_only/test_machine_code.py.
    """
    repeated = repetition(work, element_bytes, warps, arch)
    made = _passing(one for one in work.products if one.scores)
    summed = _passing(one for one in work.products if not one.scores)
    loaded = work.loaded * work.loads
    if in_place_of(family(arch), work, element_bytes):
        own = work.kept + sum(one.rows * one.depth for one in work.products if one.rows_in_shared)
        reads = max(1.0, work.rows / rows_per_read)
        return reads * (repeated * made + summed) + repeated**2 * own + loaded
    if not work.scores:
        return max(1.0, min(warps, work.rows / ROWS_PER_WARP)) * summed + loaded
    if divides_rows(work, element_bytes, arch):
        return warps * (made + summed) + loaded
    handed = sum(not one.scores for one in work.products) * work.scores
    return repeated * made + summed + warps * work.kept + (1 + warps) * handed + loaded


def _passing(products: Iterable[Product]) -> int:
    return sum(one.columns * one.depth for one in products)
