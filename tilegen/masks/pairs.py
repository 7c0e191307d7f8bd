"""Predicates of masks, and their values for tensors of indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilegen.errors import InvalidProblem
from tilegen.masks.language.algebra import as_expr
from tilegen.masks.language.evaluation import evaluate
from tilegen.masks.language.expr import PAIR, Expr
from tilegen.masks.language.rewriting import renamed
from tilegen.masks.values import Made, Pair, Table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


AT = Pair(*PAIR)
"""The pair of compiled predicates."""


def named(values: Sequence[Table], condition: Any) -> Expr:
    """Replace look-ups of values by t0, t1, ..., in the order of the values."""
    slots = {value.slot: (place, value.elements_kind) for place, value in enumerate(values)}
    return renamed(as_expr(condition), slots)


def kept(keep: Expr, values: Sequence[Table], at: Pair) -> torch.Tensor:
    """Compute where a predicate over named values holds, for tensors of indices `at` and the
    lengths of a call."""
    made: Made = {}
    tables = [value.on(at.q.device, (at.seqlen_q, at.seqlen_kv), made) for value in values]
    return evaluate(keep, tables, **at._asdict())


# --------------------------------------------------------------------------------------------------
# Drawings


MAX_SIDE = 128
"""Most rows and columns that are drawn."""
LEGEND = "# in a full tile, + kept in a partial tile, . dropped in one, blank: tiles not visited"


def check_sides(seqlen_q: int, seqlen_kv: int) -> None:
    """Raise InvalidProblem for more rows or columns than are drawn."""
    if not (0 < seqlen_q <= MAX_SIDE and 0 < seqlen_kv <= MAX_SIDE):
        raise InvalidProblem(
            f"a drawn mask has 1 to {MAX_SIDE} rows and columns, got {seqlen_q} x {seqlen_kv}"
        )


def draw(keep: NDArray[np.bool_], name: str, block_m: int, block_n: int) -> str:
    """Return a picture of pairs, a character each, tiles ruled off; then counts, with the name of
    the mask."""
    seqlen_q, seqlen_kv = keep.shape
    rule = "+".join(
        ["", *("-" * min(block_n, seqlen_kv - k) for k in range(0, seqlen_kv, block_n)), ""]
    )
    lines: list[str] = []
    counts = {"full": 0, "partial": 0, "empty": 0}
    for first in range(0, seqlen_q, block_m):
        rows = keep[first : first + block_m]
        lines.append(rule)
        pieces: list[list[str]] = []
        for k in range(0, seqlen_kv, block_n):
            tile = rows[:, k : k + block_n]
            whole = tile.shape == (block_m, block_n) and bool(tile.all())
            kind = "full" if whole else "partial" if tile.any() else "empty"
            counts[kind] += 1
            marks = {"full": "##", "partial": ".+", "empty": "  "}[kind]
            pieces.append(["".join(marks[int(pair)] for pair in row) for row in tile])
        lines += ["|".join(["", *row, ""]) for row in zip(*pieces, strict=True)]
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return "\n".join([*lines, rule, f"{name}: {told} tiles; {LEGEND}"])
