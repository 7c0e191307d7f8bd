"""Exact traffic of the emitted kernels: the words that each loads and stores, as SymPy terms.

`traffic()` equals the loads and stores of an emitted kernel, as builds for the CPU count them, to
the byte. Masked-off lanes are not loaded, so a ragged tile costs only the rows that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import sympy as sp

from tilegen.kernels.config import Kernel
from tilegen.kernels.moved import Moved
from tilegen.kernels.panels import SCORE_WIDTH, panels_per_group
from tilegen.kernels.registry import KERNELS
from tilegen.model import symbols
from tilegen.model.mask_tables import tree_bytes
from tilegen.model.splits import splits_of
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
from tilegen.model.visits import visits
from tilegen.task import Tiled

Size = Literal["element", "fp32"]
"""Words of the problem's dtype, or of fp32."""
ACCUMULATOR_BYTES = 4
"""Bytes of an element of lse or delta: fp32 for inputs of any dtype."""
STATE_BYTES = 16
"""Bytes of the seed and offset of dropout, read by every program that draws."""


@dataclass(frozen=True)
class Term:
    """Words of a tensor that a kernel moves in one direction, for one key-value head."""

    tensor: str
    direction: Literal["read", "write"]
    words: sp.Expr
    size: Size = "element"

    @property
    def bytes(self) -> sp.Expr:
        """The term in bytes; `e` is the size of an element."""
        return self.words * (e if self.size == "element" else ACCUMULATOR_BYTES)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one launch between the SMs and L2: all batches and heads."""

    read_bytes: int
    write_bytes: int


parse: Any = sp.sympify
_SYMBOLS = {name: value for name, value in vars(symbols).items() if isinstance(value, sp.Symbol)}


def terms(
    moved: Iterable[Moved], *, values_in_keys: bool = False, pairs: bool = False
) -> tuple[Term, ...]:
    """Parse the words that a kernel's record lists, as SymPy terms. With `values_in_keys` values
    move with the keys; with `pairs` lse is two numbers a row."""
    return tuple(
        Term(
            term.tensor.name,
            term.direction,
            parse(term.words, locals=_SYMBOLS) * (2 if pairs and term.tensor.paired else 1),
            "fp32" if term.tensor.dtype == "fp32" else "element",
        )
        for term in moved
        if not (values_in_keys and term.tensor.alias)
    )


@cache
def terms_of(
    kernel: Kernel, *, values_in_keys: bool = False, pairs: bool = False
) -> tuple[Term, ...]:
    """Return the terms of a kernel's traffic. UNMASKED gives the visited rows without a mask."""
    return terms(KERNELS[kernel].traffic, values_in_keys=values_in_keys, pairs=pairs)


UNMASKED = {V_kv: sp.ceiling(N_q / B_r) * N_kv, V_q: sp.ceiling(N_kv / B_c) * N_q}
"""Values of the symbols for visited rows if nothing is masked."""


def total_words(terms: Iterable[Term]) -> sp.Expr:
    """Sum the words of all terms, per key-value head."""
    return sp.Add(*(term.words for term in terms))


def total_bytes(terms: Iterable[Term]) -> sp.Expr:
    """Sum the bytes of all terms, per key-value head."""
    return sp.Add(*(term.bytes for term in terms))


def traffic(tiled: Tiled) -> Traffic:
    """Compute the exact bytes that a config loads and stores for the whole problem, in panels for
    which the device has room."""

    def compute() -> Traffic:
        return traffic_of(tiled, panel_rows=tiled.task.panel_rows)

    return tiled.by_tile("traffic", compute)


def traffic_of(
    tiled: Tiled,
    *,
    aligned: bool | None = None,
    panel_rows: int | None = None,
    score_width: int = SCORE_WIDTH,
) -> Traffic:
    """Compute the bytes of a launch with unusual tensors or panels.

    `aligned` small-cache kernels pad a panel's rows; by default they do if the head dims allow it.
    A panel has `panel_rows` rows (by default all), and a score tile `score_width` keys.
    """
    task, problem, config = tiled.task, tiled.problem, tiled.config
    counts, splits = visits(tiled, aligned=aligned), splits_of(tiled)
    width = task.spec.returned(config) or score_width
    rows = task.heads_q * problem.seqlen_q
    arguments = (
        task.heads_kv,
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
    read, write = _evaluators(task.kernel, task.values_in_keys, problem.pair_lse)
    return Traffic(
        read_bytes=int(read(*arguments))
        + state_bytes(tiled)
        + table_bytes(tiled)
        + tree_bytes(tiled),
        write_bytes=int(write(*arguments)),
    )


def table_bytes(tiled: Tiled) -> int:
    """Compute the bytes read of the tables of pages: three numbers per program, even of an empty
    split, and a page per tile, or per key if a page is smaller than a tile."""
    if "pages" not in tiled.spec.supports:
        return 0
    splits, counts = splits_of(tiled), visits(tiled)
    tiles = tiled.task.heads_kv * splits.tiles_of_group
    pages = counts.tiles if tiled.problem.page >= tiled.config.block_n else counts.rows
    return 4 * int(tiles * (3 * counts.programs * splits.count + pages))


def state_bytes(tiled: Tiled) -> int:
    """Compute the bytes read of the seeds of dropout, by each program that draws. Programs of score
    tiles or splits without kept pairs draw nothing."""
    if not tiled.task.draws:
        return 0
    splits = splits_of(tiled)
    return STATE_BYTES * int(tiled.task.heads_kv * splits.tiles_of_group * splits.programs)


@cache
def _evaluators(
    kernel: Kernel, values_in_keys: bool, pairs: bool
) -> tuple[Callable[..., int], Callable[..., int]]:
    """Return functions that compute (read, write) in Python integers, which do not overflow."""
    arguments = [H_kv, g, N_q, N_kv, d_qk, d_v, V_kv, V_q, W_q, A_w, T_s, n_p, B_e, e]
    arguments += [W_s, n_s, g_t]

    def evaluator(direction: str) -> Any:
        all_terms = terms_of(kernel, values_in_keys=values_in_keys, pairs=pairs)
        moved = [term for term in all_terms if term.direction == direction]
        return sp.lambdify(arguments, H_kv * total_bytes(moved), modules="math")

    return evaluator("read"), evaluator("write")
