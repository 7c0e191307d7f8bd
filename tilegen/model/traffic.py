"""Exact traffic of the emitted kernels: which words each one loads and stores, as SymPy terms.

A contract: the loads and stores of an emitted kernel, counted by builds for the CPU, equal
`traffic()` to the byte. Masked-off lanes are not loaded, so ragged tiles cost what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import sympy as sp

from tilegen.kernels.config import Kernel
from tilegen.kernels.layout import PAIRED
from tilegen.kernels.panels import SCORE_WIDTH, panels_per_group
from tilegen.kernels.registry import KERNELS
from tilegen.kernels.spec import Moved
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
    """Parse the words that a kernel's record lists, as SymPy terms."""
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
    """Return the terms of a kernel's traffic; UNMASKED has the visited rows where nothing is
    masked. Values that are taken from the keys are not read; with `pairs` lse is two numbers a
    row."""
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


def traffic(tiled: Tiled) -> Traffic:
    """Compute the exact bytes that a config loads and stores for the whole problem, in panels that
    the device has room for."""

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
    """Compute the bytes of a launch whose tensors or panels are not the usual.

    `aligned` small-cache kernels (by default where the head dims allow it) pad a panel's rows,
    `panel_rows` (by default all) go into a panel, and score tiles are `score_width` keys wide.
    """
    task, problem, config = tiled.task, tiled.problem, tiled.config
    counts, splits = visits(tiled, aligned=aligned), splits_of(tiled)
    width = task.spec.told(config) or score_width
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
    """Compute the bytes of the tables of pages: three numbers for each program, also of an empty
    split, and a page for each tile, or for each key where a page is smaller than a tile."""
    if not tiled.spec.pages:
        return 0
    splits, counts = splits_of(tiled), visits(tiled)
    tiles = tiled.task.heads_kv * splits.tiles_of_group
    pages = counts.tiles if tiled.problem.page >= tiled.config.block_n else counts.rows
    return 4 * int(tiles * (3 * counts.programs * splits.count + pages))


def state_bytes(tiled: Tiled) -> int:
    """Compute the bytes of the seeds of dropout: each program that draws reads them, so not those
    of score tiles, or splits, that the mask leaves nothing of."""
    if not tiled.task.draws:
        return 0
    splits = splits_of(tiled)
    return STATE_BYTES * int(tiled.task.heads_kv * splits.tiles_of_group * splits.programs)


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
