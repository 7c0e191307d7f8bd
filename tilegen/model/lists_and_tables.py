"""Footprint that lists of tiles, trees, captured tensors and dropout add to a kernel.

The rules were observed in compiled kernels (Triton 3.7.1). A load whose address comes from another
load is pipelined one stage deeper, and tiles of a captured table are buffered like those of keys
and values. Dropout takes up to 2 registers a score if registers are free, and fewer otherwise.
"""

from __future__ import annotations

import re

from tilegen.masks.language.elements import ELEMENTS
from tilegen.masks.language.expr import K, Q, slot_of
from tilegen.masks.score import ScoreForm
from tilegen.masks.usual import is_surely_solved, trees_of
from tilegen.model.columns import Number
from tilegen.task import KernelTask, Tiled

DRAWN_REGISTERS = 0.75
"""Registers of a thread that dropout takes per score."""


def lists_and_tables(tiled: Tiled) -> tuple[Number, Number]:
    """Return shared memory [bytes] and registers of a thread in addition to those of a plain
    mask."""
    task, spec, problem, config = tiled.task, tiled.spec, tiled.problem, tiled.config
    smem = registers = 0
    if _is_listed(task):
        if (
            spec.stationary == "columns"
        ):  # the next tile is looked up ahead: as many bytes as its pairs
            smem += config.block_m * config.block_n
        else:
            whole_width = problem.head_dim_qk + problem.head_dim_v
            width = config.block_d if spec.sliced else whole_width
            smem += config.block_n * width * problem.element_bytes
    whole = spec.whole
    if whole and trees_of(problem.mask):
        # Where matrix instructions read shared memory, forwards were observed to keep one more tile
        # of keys, and backwards a tile of the table.
        keys = problem.head_dim_qk * problem.element_bytes
        smem += config.block_n * (keys if "out" in spec.checked_by else config.rows)
    if problem.score and problem.score.changes:
        scores = config.rows * config.block_n
        tables = _tables(problem.score)
        smem += config.num_stages * scores * sum(tables)
        trained = "training" in spec.supports and bool(problem.score.trained)
        # A look-up in a table keeps tiles of scores alive: its own, and in a backward its slope.
        alive = len(tables) * (spec.score_tiles + trained)
        registers += alive * scores // (32 * config.num_warps)
    if task.draws:
        threads = 32 * config.num_warps
        registers += DRAWN_REGISTERS * config.rows * config.block_n // threads
    return smem, registers


def _is_listed(task: KernelTask) -> bool:
    mask = task.problem.mask
    if is_surely_solved(mask):
        return False  # decided without SymPy, which cached calls do not load
    from tilegen.masks.tiles.tile_ranges import is_solved

    return not is_solved(mask, task.spec.stationary)


def _tables(score: ScoreForm) -> tuple[int, ...]:
    """Return the element size of each table that is indexed by row and column [bytes]."""
    slots = {slot_of(load) for load in score.expression().loads() if {Q, K} <= load.free}
    sizes = (re.sub(r"\D", "", ELEMENTS[score.elements[slot]]) for slot in sorted(slots))
    return tuple(int(bits) // 8 for bits in sizes)
