"""Exact traffic of the emitted kernels: the words that each loads and stores, as formulas.

`traffic()` equals the loads and stores of an emitted kernel, as builds for the CPU count them, to
the byte. Masked-off lanes are not loaded, so a ragged tile costs only the rows that it holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tilegen.kernels.config import Kernel
from tilegen.kernels.moved import Moved
from tilegen.kernels.panels import SCORE_WIDTH, panels_per_group
from tilegen.kernels.registry import KERNELS
from tilegen.model.columns import Number, by_tile, exact
from tilegen.model.formulas import computed, expression
from tilegen.model.mask_tables import tree_bytes
from tilegen.model.splits import splits_of
from tilegen.model.visits import visits
from tilegen.task import Tiled

if TYPE_CHECKING:
    import sympy as sp

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
        return self.words * (expression("e") if self.size == "element" else ACCUMULATOR_BYTES)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one launch between the SMs and L2: all batches and heads."""

    read_bytes: Number
    write_bytes: Number


def terms(
    moved: Iterable[Moved], *, values_in_keys: bool = False, pairs: bool = False
) -> tuple[Term, ...]:
    """Parse the words that a kernel's record lists, as SymPy terms. With `values_in_keys` values
    move with the keys; with `pairs` lse is two numbers a row."""
    return tuple(
        Term(
            term.tensor.name,
            term.direction,
            expression(term.words) * (2 if pairs and term.tensor.paired else 1),
            "fp32" if term.tensor.dtype == "fp32" else "element",
        )
        for term in moved
        if not (values_in_keys and term.tensor.alias)
    )


@cache
def terms_of(
    kernel: Kernel, *, values_in_keys: bool = False, pairs: bool = False
) -> tuple[Term, ...]:
    """Return the terms of a kernel's traffic. `symbols.UNMASKED` has the visited rows without a
    mask."""
    return terms(KERNELS[kernel].traffic, values_in_keys=values_in_keys, pairs=pairs)


def total_words(terms: Iterable[Term]) -> sp.Expr:
    """Sum the words of all terms, per key-value head."""
    return sum((term.words for term in terms), start=expression("0"))


def total_bytes(terms: Iterable[Term]) -> sp.Expr:
    """Sum the bytes of all terms, per key-value head."""
    return sum((term.bytes for term in terms), start=expression("0"))


def bytes_moved(
    moved: Iterable[Moved], direction: Literal["read", "write"], *, in_keys: bool, pairs: bool
) -> str:
    """Return the formula of the bytes that all key-value heads move in a direction; arguments as
    those of `terms`."""
    each = [
        f"({one.words})*{2 if pairs and one.tensor.paired else 1}"
        f"*{ACCUMULATOR_BYTES if one.tensor.dtype == 'fp32' else 'e'}"
        for one in moved
        if one.direction == direction and not (in_keys and one.tensor.alias)
    ]
    return f"H_kv*({' + '.join(each) or '0'})"


def traffic(tiled: Tiled) -> Traffic:
    """Compute the exact bytes that a config loads and stores for the whole problem, in panels for
    which the device has room."""
    return traffic_of(tiled, panel_rows=tiled.task.panel_rows)


@by_tile
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
    task, problem = tiled.task, tiled.problem
    values = values_of(tiled, aligned=aligned, panel_rows=panel_rows, score_width=score_width)
    formulas = _formulas(task.kernel, task.values_in_keys, problem.pair_lse)
    moved = computed(formulas, values)
    other = state_bytes(tiled) + table_bytes(tiled) + tree_bytes(tiled)
    return Traffic(read_bytes=moved["read"] // 1 + other, write_bytes=moved["write"] // 1)


@by_tile
def values_of(
    tiled: Tiled,
    *,
    aligned: bool | None = None,
    panel_rows: int | None = None,
    score_width: int = SCORE_WIDTH,
) -> dict[str, Number]:
    """Return the values of the symbols in a kernel's traffic, by name; arguments as those of
    `traffic_of`."""
    task, problem, config = tiled.task, tiled.problem, tiled.config
    counts, splits = visits(tiled, aligned=aligned), splits_of(tiled)
    width: Any = getattr(config, task.spec.returns) if task.spec.returns else score_width
    rows = panel_rows or task.heads_q * problem.seqlen_q
    return {
        "H_kv": task.heads_kv,
        "g": problem.group_size,
        "N_q": problem.seqlen_q,
        "N_kv": problem.seqlen_kv,
        "d_qk": problem.head_dim_qk,
        "d_v": problem.head_dim_v,
        "e": problem.element_bytes,
        "V_kv": counts.rows,
        "V_q": counts.rows,
        "W_q": counts.row_steps,
        "A_w": counts.cells,
        "T_s": -(-problem.seqlen_kv // exact(width)),
        "n_p": panels_per_group(problem.group_size, problem.seqlen_q, rows),
        "B_e": exact(config.block_d) + (exact(config.block_d) == 0),
        "W_s": splits.rows,
        "n_s": splits.count,
        "g_t": splits.tiles_of_group,
    }


@by_tile
def table_bytes(tiled: Tiled) -> Number:
    """Compute the bytes read of the tables of pages: three numbers per program, even of an empty
    split, and a page per tile, or per key if a page is smaller than a tile."""
    if "pages" not in tiled.spec.supports:
        return 0
    splits, counts = splits_of(tiled), visits(tiled)
    tiles = tiled.task.heads_kv * splits.tiles_of_group
    pages = np.where(tiled.problem.page >= tiled.config.block_n, counts.tiles, counts.rows)
    return 4 * (tiles * (3 * counts.programs * splits.count + pages) // 1)


def state_bytes(tiled: Tiled) -> Number:
    """Compute the bytes read of the seeds of dropout, by each program that draws. Programs of score
    tiles or splits without kept pairs draw nothing."""
    if not tiled.task.draws:
        return 0
    splits = splits_of(tiled)
    return STATE_BYTES * (tiled.task.heads_kv * splits.tiles_of_group * splits.programs // 1)


@cache
def _formulas(kernel: Kernel, in_keys: bool, pairs: bool) -> dict[str, str]:
    moved = KERNELS[kernel].traffic
    return {
        "read": bytes_moved(moved, "read", in_keys=in_keys, pairs=pairs),
        "write": bytes_moved(moved, "write", in_keys=in_keys, pairs=pairs),
    }
