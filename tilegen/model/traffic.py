"""Exact traffic of the emitted kernels: which words each one loads and stores, as SymPy terms.

A contract: the loads and stores of an emitted kernel, counted by builds for the CPU, equal
`traffic()` to the byte. Masked-off lanes are not loaded, so ragged tiles cost what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
import sympy as sp

from tilegen.emit.identity import rows_are_aligned, stride_unit
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.layout import PAIRED
from tilegen.kernels.panels import SCORE_WIDTH, panels_per_group
from tilegen.kernels.registry import KERNELS, tile_heads
from tilegen.kernels.spec import Moved
from tilegen.kernels.split_backward import BWD_DKDV_SPLIT
from tilegen.kernels.split_kv import FWD_SPLIT, is_divided
from tilegen.masks.mask import Mask, Side
from tilegen.masks.source import is_single, ranges_source
from tilegen.masks.tiles.tile_ranges import TileRanges, counted_over, tile_ranges
from tilegen.model import symbols
from tilegen.model.mask_tables import tree_bytes
from tilegen.model.splits import Splits, divided_splits, mean_of, usual_split
from tilegen.model.symbols import (
    A_w,
    B_c,
    B_e,
    B_r,
    H_kv,
    N_kv,
    N_q,
    T_s,
    V_kv,
    V_q,
    W_q,
    W_s,
    d_qk,
    d_v,
    e,
    g,
    g_t,
    n_p,
    n_s,
)
from tilegen.problem import AttentionProblem

Size = Literal["element", "fp32"]
"""Words of the problem's dtype, or of fp32."""
ACCUMULATOR_BYTES = 4
"""Bytes of a number of lse or delta: fp32 whatever the dtype of the inputs."""
STATE_BYTES = 16
"""Bytes of the seed and the offset of dropout, which every program reads that draws."""


@dataclass(frozen=True)
class Term:
    """Words of one tensor that one kernel moves one way, for one key-value head."""

    tensor: str
    direction: Literal["read", "write"]
    words: sp.Expr
    size: Size = "element"

    @property
    def bytes(self) -> sp.Expr:
        """The term in bytes; `e` stands for the bytes of an element."""
        return self.words * (e if self.size == "element" else ACCUMULATOR_BYTES)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one launch between the SMs and L2: all batches and heads."""

    read_bytes: int
    write_bytes: int


parse: Any = sp.sympify
_SYMBOLS = {name: one for name, one in vars(symbols).items() if isinstance(one, sp.Symbol)}


def terms(moved: Iterable[Moved]) -> tuple[Term, ...]:
    """Return what a kernel's record says that it moves, as SymPy terms."""
    return tuple(
        Term(
            one.tensor,
            one.direction,
            parse(one.words, locals=_SYMBOLS),
            "fp32" if one.fp32 else "element",
        )
        for one in moved
    )


@cache
def terms_of(
    kernel: Kernel, *, values_in_keys: bool = False, pairs: bool = False
) -> tuple[Term, ...]:
    """Return what a kernel moves; UNMASKED has the visited rows where nothing is masked. Values
    that are taken from the keys are not read; with `pairs` lse is two numbers for each row."""
    moved = terms(KERNELS[kernel].traffic)
    if pairs:
        moved = tuple(
            replace(one, words=2 * one.words) if one.tensor in PAIRED else one for one in moved
        )
    return tuple(one for one in moved if one.tensor != "v") if values_in_keys else moved


UNMASKED = {V_kv: sp.ceiling(N_q / B_r) * N_kv, V_q: sp.ceiling(N_kv / B_c) * N_q}
"""Visited rows where nothing is masked, to substitute for their symbols."""


def total_words(terms: Iterable[Term]) -> sp.Expr:
    """Return the words of all terms, per key-value head."""
    return sp.Add(*(term.words for term in terms))


def total_bytes(terms: Iterable[Term]) -> sp.Expr:
    """Return the bytes of all terms, per key-value head."""
    return sp.Add(*(term.bytes for term in terms))


def traffic(
    problem: AttentionProblem,
    config: TileConfig,
    kernel: Kernel,
    *,
    aligned: bool | None = None,
    panel_rows: int | None = None,
    score_width: int = SCORE_WIDTH,
    before: TileConfig | None = None,
) -> Traffic:
    """Return the exact bytes that `kernel` loads and stores for the whole problem.

    The bytes of some kernels depend on more than their own config: `aligned` small-cache kernels
    (by default where the head dims allow it) pad a panel's rows, `panel_rows` (by default all) go
    into a panel, and score tiles are `score_width` keys wide; `before` is the config of the kernel
    that left the splits' results (by default `usual_split`).
    """
    tile = config.block_m, config.block_n
    counts = visits(problem, *tile, kernel, aligned=aligned, split_kv=config.split_kv)
    splits = splits_of(problem, config, kernel, before)
    width = config.block_n if "maxima" in KERNELS[kernel].made else score_width
    rows = problem.batch * problem.num_heads_q * problem.seqlen_q
    arguments = (
        problem.batch * problem.num_heads_kv,
        problem.group_size,
        problem.seqlen_q,
        problem.seqlen_kv,
        problem.head_dim_qk,
        problem.head_dim_v,
        counts.rows,
        counts.rows,
        counts.row_steps,
        counts.cells,
        -(-problem.seqlen_kv // width),
        panels_per_group(problem.group_size, problem.seqlen_q, panel_rows or rows),
        config.block_d or 1,
        problem.element_bytes,
        splits.rows,
        splits.count,
        splits.tiles_of_group,
    )
    read, write = _evaluators(kernel, KERNELS[kernel].values_in_keys(problem), problem.pair_lse)
    return Traffic(
        read_bytes=int(read(*arguments))
        + state_bytes(problem, config, kernel, counts)
        + table_bytes(problem, config, kernel, counts)
        + tree_bytes(problem, config, kernel),
        write_bytes=int(write(*arguments)),
    )


def table_bytes(
    problem: AttentionProblem, config: TileConfig, kernel: Kernel, counts: Visits
) -> int:
    """Return the bytes that say where requests lie: three numbers for each program, also for
    programs of empty splits, and for each tile its page, or the pages of its keys where pages are
    smaller."""
    if not KERNELS[kernel].pages:
        return 0
    splits = splits_of(problem, config, kernel)
    tiles = problem.batch * problem.num_heads_kv * splits.tiles_of_group
    pages = counts.tiles if problem.page >= config.block_n else counts.rows
    return 4 * int(tiles * (3 * counts.programs * splits.count + pages))


def splits_of(
    problem: AttentionProblem, config: TileConfig, kernel: Kernel, before: TileConfig | None = None
) -> Splits:
    """Return the splits of a kernel that makes them, or of the config `before` it."""
    spec, group = KERNELS[kernel], problem.group_size
    if not (spec.splits or spec.joins):
        return Splits(count=1, programs=0, rows=0, tiles_of_group=group, longest=0)
    split = config if spec.splits else before or usual_split(problem)
    keys = split.split_kv
    # A split is visited where any of its tiles is: as if it were a tile itself.
    if spec.stays == "columns":
        counts = visits(problem, keys, split.block_n, BWD_DKDV_SPLIT.name, aligned=False)
        count, every = -(-problem.seqlen_q // keys), _goes_through_heads(problem.mask.general)
        return Splits(
            count=count,
            programs=count * counts.programs if every else counts.tiles,
            rows=count * problem.seqlen_kv if every else counts.row_steps,
            tiles_of_group=1,
            longest=keys // split.block_m,
        )
    count, tiles_of_group = -(-problem.seqlen_kv // keys), group // tile_heads(split, group)
    if is_divided(problem):
        return divided_splits(problem, split, count, tiles_of_group)
    counts = visits(problem, split.block_m, keys, FWD_SPLIT.name)
    return Splits(
        count=count,
        programs=counts.tiles,
        rows=counts.row_steps,
        tiles_of_group=tiles_of_group,
        longest=keys // split.block_n,
    )


@lru_cache(maxsize=256)
def _goes_through_heads(mask: Mask) -> bool:
    """True where the query heads of a group visit different tiles, so that a program goes through
    the heads one after the other, and is not left out where none of them visits anything."""
    return ranges_source(mask, "columns").per_head


def state_bytes(
    problem: AttentionProblem, config: TileConfig, kernel: Kernel, counts: Visits
) -> int:
    """Return the bytes of seeds that programs read which draw for dropout; those of score tiles,
    and of splits, that nothing is kept of do not draw."""
    spec = KERNELS[kernel]
    if not (problem.dropout and spec.drops):
        return 0
    heads = problem.num_heads_kv if spec.stays == "columns" else problem.num_heads_q
    each = counts.tiles if spec.panel == "writes" else counts.programs
    if spec.splits:
        each = splits_of(problem, config, kernel).programs
    return STATE_BYTES * int(problem.batch * heads * each)


@dataclass(frozen=True, kw_only=True)
class Visits:
    """Tiles that a kernel visits for one query head; preprocess visits each of its own once."""

    programs: int
    """Stationary tiles."""
    tiles: int | Fraction
    """Streamed tiles of all stationary tiles together."""
    partial_tiles: int | Fraction
    """Streamed tiles that need mask code."""
    rows: int | Fraction
    """Streamed rows inside the sequence."""
    longest: int
    """Streamed tiles of the stationary tile that has most."""
    row_steps: int | Fraction = 0
    """Stationary rows inside the sequence, once for each streamed tile."""
    cells: int | Fraction = 0
    """Entries of all visited tiles, as far as a panel holds them."""


def visits(
    problem: AttentionProblem,
    block_m: int,
    block_n: int,
    kernel: Kernel,
    *,
    aligned: bool | None = None,
    split_kv: int = 0,
) -> Visits:
    """Return the tiles that one query head visits under the problem's mask.

    `aligned` kernels pad the rows of a panel to 16 bytes; by default the head dims decide. Kernels
    of batch-invariant problems take the tiles of a split of `split_kv` keys in order, as partial
    ones, and all tiles of a split where a mask leaves no single range. Kernels that join splits of
    `split_kv` rows take `block_n` splits a step.
    """
    side: Side = KERNELS[kernel].stays
    if not KERNELS[kernel].masked:
        stays, passes = problem.seqlen_q, problem.seqlen_kv
        if side == "columns":
            stays, passes = passes, stays
        tiles, steps = -(-stays // block_m), 1
        if KERNELS[kernel].joins and split_kv:
            splits = -(-passes // split_kv)
            steps = -(-splits // block_n)
        every = tiles * steps
        return Visits(programs=tiles, tiles=every, partial_tiles=0, rows=0, longest=steps)
    aligned = rows_are_aligned(problem) if aligned is None else aligned
    unit = stride_unit(problem, aligned)
    lengths = problem.seqlen_q, problem.seqlen_kv
    over = counted_over(problem.mask, problem.batch, problem.num_heads_q)
    found = _visits(problem.mask, side, *lengths, block_m, block_n, unit, *over)
    if not (split_kv and problem.invariant and KERNELS[kernel].in_order):
        return found
    if not is_single(problem.mask, side):  # all tiles of the splits that hold any of them
        splits = _visits(problem.mask, side, *lengths, block_m, split_kv, unit, *over)
        each = split_kv // block_n
        most = min(splits.tiles * each, splits.programs * -(-problem.seqlen_kv // block_n))
        found = replace(found, tiles=most, rows=splits.rows, longest=splits.longest * each)
    return replace(found, partial_tiles=found.tiles)


@lru_cache(maxsize=8192)
def _visits(
    mask: Mask,
    side: Side,
    seqlen_q: int,
    seqlen_kv: int,
    block_m: int,
    block_n: int,
    unit: int,
    batch: int,
    heads: int,
) -> Visits:
    ranges: TileRanges = tile_ranges(
        mask,
        side,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        block_m=block_m,
        block_n=block_n,
        batch=batch,
        heads=heads,
    )
    padded = -(-seqlen_kv // unit) * unit
    stays, block, length = (
        (seqlen_q, block_m, padded) if side == "rows" else (padded, block_n, seqlen_q)
    )
    heads = ranges.heads
    mine = np.minimum(block, stays - block * np.arange(ranges.visited.shape[-1], dtype=np.int64))
    return Visits(
        row_steps=mean_of(int((mine * ranges.visited).sum()), heads),
        cells=mean_of(int((mine * ranges.rows(length)).sum()), heads),
        programs=ranges.visited.shape[-1],
        tiles=mean_of(ranges.visited_tiles, heads),
        partial_tiles=mean_of(ranges.partial_tiles, heads),
        rows=mean_of(ranges.visited_rows, heads),
        longest=int(ranges.visited.max()),
    )


@cache
def _evaluators(
    kernel: Kernel, values_in_keys: bool, pairs: bool
) -> tuple[Callable[..., int], Callable[..., int]]:
    """Return (read, write) as functions of Python integers, which do not overflow."""
    arguments = [H_kv, g, N_q, N_kv, d_qk, d_v, V_kv, V_q, W_q, A_w, T_s, n_p, B_e, e]
    arguments += [W_s, n_s, g_t]

    def evaluator(direction: str) -> Any:
        every = terms_of(kernel, values_in_keys=values_in_keys, pairs=pairs)
        moved = [term for term in every if term.direction == direction]
        return sp.lambdify(arguments, H_kv * total_bytes(moved), modules="math")

    return evaluator("read"), evaluator("write")
