"""Exact traffic of the emitted kernels: which words each one loads and stores, as SymPy terms.

A contract: the loads and stores of an emitted kernel, counted in Triton's interpreter, equal
`traffic()` to the byte. Masked-off lanes are not loaded, so ragged tiles cost what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import sympy as sp

from tilegen.config import Kernel, TileConfig
from tilegen.masks.compiler import TileRanges, tile_ranges
from tilegen.masks.mask import Mask
from tilegen.model.symbols import B_c, B_r, H_kv, N_kv, N_q, V_kv, V_q, d_qk, d_v, e, g
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
}
"""FlashAttention-2 (Dao, arXiv 2307.08691): forward as Algorithm 1, backward in two passes."""

UNMASKED = {V_kv: sp.ceiling(N_q / B_r) * N_kv, V_q: sp.ceiling(N_kv / B_c) * N_q}
"""Substitute these for the visited rows when nothing is masked."""


def total_words(terms: Iterable[Term]) -> sp.Expr:
    """Return the words of all terms, per key-value head."""
    return sp.Add(*(term.words for term in terms))


def total_bytes(terms: Iterable[Term]) -> sp.Expr:
    """Return the bytes of all terms, per key-value head."""
    return sp.Add(*(term.bytes for term in terms))


def traffic(problem: AttentionProblem, config: TileConfig, kernel: Kernel) -> Traffic:
    """Return the exact bytes that one launch of `kernel` loads and stores."""
    counts = visits(problem, config.block_m, config.block_n, kernel)
    arguments = (
        problem.batch * problem.num_heads_kv,
        problem.group_size,
        problem.seqlen_q,
        problem.seqlen_kv,
        problem.head_dim_qk,
        problem.head_dim_v,
        counts.rows,
        counts.rows,
        problem.element_bytes,
    )
    read, write = _evaluators(kernel)
    return Traffic(read_bytes=int(read(*arguments)), write_bytes=int(write(*arguments)))


@dataclass(frozen=True, kw_only=True)
class Visits:
    """Which tiles a kernel visits for one query head; preprocess visits each of its own once."""

    programs: int
    """Stationary tiles."""
    tiles: int
    """Streamed tiles of all stationary tiles together."""
    partial_tiles: int
    """Those of them that need mask code."""
    rows: int
    """Streamed rows inside the sequence."""
    longest: int
    """Streamed tiles of the stationary tile that has most."""


def visits(problem: AttentionProblem, block_m: int, block_n: int, kernel: Kernel) -> Visits:
    """Return the tiles that one query head visits under the problem's mask."""
    if kernel == "bwd_preprocess":
        tiles = -(-problem.seqlen_q // block_m)
        return Visits(programs=tiles, tiles=tiles, partial_tiles=0, rows=0, longest=1)
    side = "columns" if kernel == "bwd_dkdv" else "rows"
    return _visits(problem.mask, side, problem.seqlen_q, problem.seqlen_kv, block_m, block_n)


@lru_cache(maxsize=8192)
def _visits(
    mask: Mask,
    side: Literal["rows", "columns"],
    seqlen_q: int,
    seqlen_kv: int,
    block_m: int,
    block_n: int,
) -> Visits:
    ranges: TileRanges = tile_ranges(
        mask, side, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, block_m=block_m, block_n=block_n
    )
    return Visits(
        programs=len(ranges.lo),
        tiles=ranges.visited_tiles,
        partial_tiles=ranges.partial_tiles,
        rows=ranges.visited_rows,
        longest=int((ranges.hi - ranges.lo).max()),
    )


@cache
def _evaluators(kernel: Kernel) -> tuple[Callable[..., int], Callable[..., int]]:
    """Return (read, write) as functions of Python integers, which do not overflow."""
    arguments = [H_kv, g, N_q, N_kv, d_qk, d_v, V_kv, V_q, e]

    def evaluator(direction: str) -> Any:
        moved = [term for term in TERMS[kernel] if term.direction == direction]
        return sp.lambdify(arguments, H_kv * total_bytes(moved), modules="math")

    return evaluator("read"), evaluator("write")
