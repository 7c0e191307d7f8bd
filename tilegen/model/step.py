"""One step of a kernel's inner loop: its matrix products, what they read, and what they add to.

Kernels that hold head dims whole work on one tile of the side that stays and one of the side that
passes. Kernels that take head dims in slices work on one slice; the forward that streams Q again
takes all slices of a key tile in a step. Footprint and time are computed from this record alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import sqrt

from tilegen.kernels.config import TileConfig, head_dim_chunks
from tilegen.kernels.spec import WIDTHS, KernelSpec, Sliced, Whole
from tilegen.problem import AttentionProblem
from tilegen.task import Tiled

chunks = cache(head_dim_chunks)
"""Widths of the tiles that hold a head dim."""


@dataclass(frozen=True)
class Product:
    """One matrix product: rows x depth times depth x columns."""

    rows: int
    columns: int
    depth: int
    rows_in_shared: bool = True
    """True: the first operand comes from shared memory. False: from registers, or it has been read
    by another product of the step."""
    scores: bool = False
    """True: its result is a tile of scores, or of their gradients, that another product reads."""

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of the product."""
        return self.rows * self.columns * self.depth

    def operands_of_thread(self, threads: int) -> float:
        """Operand words of the square of the result that is one of `threads` threads' part."""
        return 2 * self.depth * sqrt(self.rows * self.columns / threads)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The work of one step; sizes in rows, columns and words of the problem's dtype."""

    rows: int
    """Rows of the tile that stays."""
    columns: int
    """Rows of the tile that passes; columns of the result, where head dims are sliced."""
    products: tuple[Product, ...]
    kept: int
    """Words of the operands that stay on chip through the loop."""
    results: tuple[int, ...]
    """Widths of the fp32 tiles of `rows` rows that the loop adds up."""
    rescales: bool
    """True: a step multiplies its results by the correction of the running maximum."""
    score_tiles: int
    """fp32 score tiles alive together, beside the results."""
    scores: int
    """Entries of one score tile; 0 where a step has none."""
    scores_after: int = 0
    """Entries of the score tile that a program computes once, after its loop."""
    changed: int
    """Words of an operand that change in registers before the product that reads them."""
    passing: tuple[int, ...]
    """Widths of the pieces in which a row of the passing tile is loaded."""
    loaded: int
    """Words that a step loads."""
    loads: int = 1
    """Loads that follow each other in a step, each started when the one before is done."""

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of all products."""
        return sum(one.multiply_adds for one in self.products)

    @property
    def result_words(self) -> int:
        """fp32 words of all results."""
        return self.rows * sum(self.results)


def step(tiled: Tiled) -> Step:
    """Return one step of a kernel; configs that differ in warps and stages share it."""
    task, config = tiled.task, tiled.config
    key = "step", task.kernel, config.rows, config.block_n, config.block_d
    return task.lengthless.memo.once(key, lambda: step_of(task.spec, task.problem, config))


def step_of(spec: KernelSpec, problem: AttentionProblem, config: TileConfig) -> Step:
    """Return one step of a kernel, whatever the device."""
    m, n, d = config.rows, config.block_n, config.block_d
    qk, v = problem.head_dim_qk, problem.head_dim_v
    if isinstance(spec.loop, Whole):
        in_keys = spec.values_in_keys(problem)
        return _whole(spec, spec.loop, chunks(qk), chunks(v), m, n, in_keys)
    if isinstance(spec.loop, Sliced):
        knobs = {"block_m": m, "block_n": n, "block_d": d}
        sizes = [knobs[one] for one in (spec.loop.rows, spec.loop.columns, spec.loop.depth)]
        if spec.loop.panel:
            return _panel(spec.loop, *sizes)
        return _streamed(*sizes, slices=-(-qk // d), values=chunks(v))
    widths = {"qk": chunks(qk), "v": chunks(v)}
    read = tuple(w for one in spec.given if one in WIDTHS for w in widths[WIDTHS[one]])
    return Step(
        rows=m * n if spec.joins else m,  # a step joins the results of n splits
        columns=0,
        products=(),
        kept=0,
        results=read,
        rescales=True,  # a word that is read is worked on once
        score_tiles=0,
        scores=0,
        changed=0,
        passing=(),
        loaded=0,
    )


def _whole(
    spec: KernelSpec,
    loop: Whole,
    qk: tuple[int, ...],
    v: tuple[int, ...],
    m: int,
    n: int,
    values_in_keys: bool,
) -> Step:
    stays, passes = (n, m) if spec.stays == "columns" else (m, n)
    widths = {"qk": qk, "v": v}
    kept = sum(width for one in loop.keeps for width in widths[WIDTHS[one]])
    passing = qk if values_in_keys else qk + v
    scored = loop.score_tiles  # the first products make scores, the others read them
    return Step(
        rows=stays,
        columns=passes,
        products=tuple(
            Product(stays, passes, sum(widths[one]), rows_in_shared=False, scores=i < scored)
            for i, one in enumerate(loop.products)
        ),
        kept=stays * kept,
        results=tuple(width for one in loop.accumulates for width in widths[WIDTHS[one]]),
        rescales=True,
        score_tiles=loop.score_tiles,
        scores=m * n,
        changed=m * n,  # weights are rounded
        passing=passing,
        loaded=passes * sum(passing),
    )


def _panel(loop: Sliced, rows: int, columns: int, depth: int) -> Step:
    return Step(
        rows=rows,
        columns=columns,
        products=(Product(rows, columns, depth),),
        kept=0,
        results=(columns,) * loop.results,
        rescales=False,
        score_tiles=0,
        scores=0,
        scores_after=rows * columns if loop.panel == "writes" else 0,
        changed=rows * depth if loop.panel == "reads" else 0,  # scaled, or masked
        passing=(depth,),
        loaded=(rows + columns) * depth,
    )


def _streamed(rows: int, columns: int, depth: int, *, slices: int, values: tuple[int, ...]) -> Step:
    products = [Product(rows, columns, depth, scores=True)] * slices
    return Step(
        rows=rows,
        columns=columns,
        products=(*products, Product(rows, sum(values), columns, rows_in_shared=False)),
        kept=0,
        results=values,
        rescales=True,
        score_tiles=1,
        scores=rows * columns,
        changed=rows * columns,
        passing=(depth,),
        loaded=(rows + columns) * depth,
        loads=slices,
    )
