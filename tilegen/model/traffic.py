"""Exact traffic of the emitted kernels: which words each one loads and stores, as SymPy terms.

A contract: the loads and stores of an emitted kernel, counted in Triton's interpreter, equal
`traffic()` to the byte. Masked-off lanes are not loaded, so ragged tiles cost what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
import sympy as sp

from tilegen.emit.kernel_files import rows_are_aligned, stride_unit
from tilegen.kernels.config import COLUMN_KERNELS, Kernel, TileConfig
from tilegen.kernels.passes import SCORE_WIDTH, panels_per_group
from tilegen.masks.mask import Mask, Side
from tilegen.masks.tiles.tile_ranges import counted_over, tile_ranges
from tilegen.masks.tiles.visits import TileRanges
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
    d_qk,
    d_v,
    e,
    g,
    n_p,
)
from tilegen.problem import AttentionProblem

ACCUMULATOR_BYTES = 4
"""lse and delta are fp32 whatever the dtype of the inputs."""


@dataclass(frozen=True)
class Term:
    """Words of one tensor that one kernel moves one way, for one key-value head."""

    tensor: str
    direction: Literal["read", "write"]
    words: sp.Expr
    size: Literal["element", "fp32"] = "element"

    @property
    def bytes(self) -> sp.Expr:
        """The term in bytes; `e` stands for the bytes of an element."""
        return self.words * (e if self.size == "element" else ACCUMULATOR_BYTES)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one launch between the SMs and L2: all batches and heads."""

    read_bytes: int
    write_bytes: int


_ROWS = g * N_q  # query rows that share one key-value head
_SLICES_QK, _SLICES_V = sp.ceiling(d_qk / B_e), sp.ceiling(d_v / B_e)

TERMS: dict[Kernel, tuple[Term, ...]] = {
    # One program per query tile: Q stays, the KV tiles that the mask leaves stream past.
    "fwd": (
        Term("q", "read", _ROWS * d_qk),
        Term("k", "read", g * V_kv * d_qk),
        Term("v", "read", g * V_kv * d_v),
        Term("out", "write", _ROWS * d_v),
        Term("lse", "write", _ROWS, "fp32"),
    ),
    "bwd_preprocess": (
        Term("out", "read", _ROWS * d_v),
        Term("dout", "read", _ROWS * d_v),
        Term("delta", "write", _ROWS, "fp32"),
    ),
    # One program per KV tile: K and V stay, the query tiles of all g heads stream past.
    "bwd_dkdv": (
        Term("k", "read", N_kv * d_qk),
        Term("v", "read", N_kv * d_v),
        Term("q", "read", g * V_q * d_qk),
        Term("dout", "read", g * V_q * d_v),
        Term("lse", "read", g * V_q, "fp32"),
        Term("delta", "read", g * V_q, "fp32"),
        Term("dk", "write", N_kv * d_qk),
        Term("dv", "write", N_kv * d_v),
    ),
    # One program per query tile: Q, dO and dQ stay, KV tiles stream past.
    "bwd_dq": (
        Term("q", "read", _ROWS * d_qk),
        Term("dout", "read", _ROWS * d_v),
        Term("lse", "read", _ROWS, "fp32"),
        Term("delta", "read", _ROWS, "fp32"),
        Term("k", "read", g * V_kv * d_qk),
        Term("v", "read", g * V_kv * d_v),
        Term("dq", "write", _ROWS * d_qk),
    ),
    # One program per query tile: outputs stay, KV tiles stream past, and with each of them Q again.
    "fwd_streamed": (
        Term("q", "read", g * W_q * d_qk),
        Term("k", "read", g * V_kv * d_qk),
        Term("v", "read", g * V_kv * d_v),
        Term("out", "write", _ROWS * d_v),
        Term("lse", "write", _ROWS, "fp32"),
    ),
    # One program per score tile: the head dim streams past.
    "fwd_scores": (
        Term("q", "read", g * W_q * d_qk),
        Term("k", "read", g * V_kv * d_qk),
        Term("weights", "write", g * A_w),
        Term("maxima", "write", T_s * _ROWS, "fp32"),
        Term("sums", "write", T_s * _ROWS, "fp32"),
    ),
    # One program per query tile and slice of d_v: weights and values stream past.
    "fwd_values": (
        Term("maxima", "read", _SLICES_V * (T_s * _ROWS + g * W_q), "fp32"),
        Term("sums", "read", _SLICES_V * T_s * _ROWS, "fp32"),
        Term("weights", "read", _SLICES_V * g * A_w),
        Term("v", "read", g * V_kv * d_v),
        Term("out", "write", _ROWS * d_v),
        Term("lse", "write", _ROWS, "fp32"),
    ),
    # One program per score tile: both head dims stream past.
    "bwd_scores": (
        Term("q", "read", g * W_q * d_qk),
        Term("k", "read", g * V_kv * d_qk),
        Term("dout", "read", g * W_q * d_v),
        Term("v", "read", g * V_kv * d_v),
        Term("lse", "read", g * W_q, "fp32"),
        Term("delta", "read", g * W_q, "fp32"),
        Term("weights", "write", g * A_w),
        Term("ds", "write", g * A_w),
    ),
    # One program per KV tile and slice, launched for dV (d_v) and for dK (d_qk).
    "bwd_columns": (
        Term("weights", "read", _SLICES_V * g * A_w),
        Term("dout", "read", g * V_q * d_v),
        Term("ds", "read", _SLICES_QK * g * A_w),
        Term("q", "read", g * V_q * d_qk),
        Term("dk, dv so far", "read", (n_p - 1) * N_kv * (d_qk + d_v), "fp32"),
        Term("dk, dv so far", "write", (n_p - 1) * N_kv * (d_qk + d_v), "fp32"),
        Term("dv", "write", N_kv * d_v),
        Term("dk", "write", N_kv * d_qk),
    ),
    # One program per query tile and slice of d_qk: score gradients and keys stream past.
    "bwd_rows": (
        Term("ds", "read", _SLICES_QK * g * A_w),
        Term("k", "read", g * V_kv * d_qk),
        Term("dq", "write", _ROWS * d_qk),
    ),
}
"""FlashAttention-2 (Dao, arXiv 2307.08691): forward as Algorithm 1, backward in two passes. Small
cache: Saha and Ye's Algorithm 1 (arXiv 2402.07443), with each tile's maximum kept so that it is
numerically safe, and a backward of five matrix products in the same spirit."""

UNMASKED = {V_kv: sp.ceiling(N_q / B_r) * N_kv, V_q: sp.ceiling(N_kv / B_c) * N_q}
"""Substitute these for the visited rows when nothing is masked."""


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
) -> Traffic:
    """Return the exact bytes that `kernel` loads and stores for the whole problem.

    Those of the small-cache kernels depend on more than their own config: `aligned` kernels (by
    default where the head dims allow it) pad a panel's rows, `panel_rows` (by default all) go into
    a panel, and score tiles are `score_width` keys wide.
    """
    counts = visits(problem, config.block_m, config.block_n, kernel, aligned=aligned)
    width = config.block_n if kernel == "fwd_scores" else score_width
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
    )
    read, write = _evaluators(kernel)
    return Traffic(read_bytes=int(read(*arguments)), write_bytes=int(write(*arguments)))


@dataclass(frozen=True, kw_only=True)
class Visits:
    """Which tiles a kernel visits for one query head; preprocess visits each of its own once."""

    programs: int
    """Stationary tiles."""
    tiles: int | Fraction
    """Streamed tiles of all stationary tiles together."""
    partial_tiles: int | Fraction
    """Those of them that need mask code."""
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
) -> Visits:
    """Return the tiles that one query head visits under the problem's mask.

    `aligned` kernels pad the rows of a panel to 16 bytes; by default the head dims decide.
    """
    if kernel == "bwd_preprocess":
        tiles = -(-problem.seqlen_q // block_m)
        return Visits(programs=tiles, tiles=tiles, partial_tiles=0, rows=0, longest=1)
    side: Side = "columns" if kernel in COLUMN_KERNELS else "rows"
    aligned = rows_are_aligned(problem) if aligned is None else aligned
    unit = stride_unit(problem, aligned)
    lengths = problem.seqlen_q, problem.seqlen_kv
    over = counted_over(problem.mask, problem.batch, problem.num_heads_q)
    return _visits(problem.mask, side, *lengths, block_m, block_n, unit, *over)


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
        row_steps=_each(int((mine * ranges.visited).sum()), heads),
        cells=_each(int((mine * ranges.rows(length)).sum()), heads),
        programs=ranges.visited.shape[-1],
        tiles=_each(ranges.visited_tiles, heads),
        partial_tiles=_each(ranges.partial_tiles, heads),
        rows=_each(ranges.visited_rows, heads),
        longest=int(ranges.visited.max()),
    )


def _each(total: int, heads: int) -> int | Fraction:
    """Return the mean over heads, exactly."""
    return total // heads if total % heads == 0 else Fraction(total, heads)


@cache
def _evaluators(kernel: Kernel) -> tuple[Callable[..., int], Callable[..., int]]:
    """Return (read, write) as functions of Python integers, which do not overflow."""
    arguments = [H_kv, g, N_q, N_kv, d_qk, d_v, V_kv, V_q, W_q, A_w, T_s, n_p, B_e, e]

    def evaluator(direction: str) -> Any:
        moved = [term for term in TERMS[kernel] if term.direction == direction]
        return sp.lambdify(arguments, H_kv * total_bytes(moved), modules="math")

    return evaluator("read"), evaluator("write")
