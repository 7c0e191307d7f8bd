"""The record of a schedule: the words that it moves, and the words that it holds on chip."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import sympy as sp

from tilegen.kernels.spec import Direction
from tilegen.model.symbols import (
    UNMASKED,
    B_c,
    B_r,
    N,
    N_kv,
    N_q,
    V_kv,
    V_q,
    alpha,
    d,
    d_qk,
    d_v,
    e,
    g,
    nnz,
    s,
)
from tilegen.model.traffic import (
    ACCUMULATOR_BYTES,
    Size,
    Term,
    total_bytes,
    total_words,
)


@dataclass(frozen=True)
class Held:
    """Words of a tensor that are on chip at the same time."""

    tensor: str
    words: sp.Expr
    size: Size = "element"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """An order of the computation, for one key-value head and its g query heads.

    Exact for ragged tiles too: nothing outside a tensor is moved. `g V_kv` and `g V_q` are streamed
    rows (see symbols.py); substitute UNMASKED for them if nothing is masked.
    """

    name: str
    citation: str
    direction: Direction
    terms: tuple[Term, ...]
    phases: tuple[tuple[Held, ...], ...]
    """Words that are on chip together, by phase. Each phase must fit, with whole tiles."""
    flops: sp.Expr
    """Operations of all matrix products without a mask; a multiply-add counts as two."""
    exps: sp.Expr
    """Exponentials of scores without a mask."""
    masks: bool = False
    """True if the terms also hold under a mask, with the visited rows for V_kv and V_q."""

    def words(self, direction: Literal["read", "write"] | None = None) -> sp.Expr:
        """Sum the words moved in one direction or both."""
        return total_words(self._moved(direction))

    def bytes(self, direction: Literal["read", "write"] | None = None) -> sp.Expr:
        """Sum the bytes moved in one direction or both; `e` is the size of an element."""
        return total_bytes(self._moved(direction))

    def weighted_words(self) -> sp.Expr:
        """Sum the words moved, in words of the inputs: an fp32 word counts as `alpha`."""
        return sp.Add(*(term.words * weight(term.size) for term in self.terms))

    @property
    def footprint(self) -> sp.Expr:
        """Words on chip in the largest phase."""
        return _largest(sp.Add(*(held.words for held in phase)) for phase in self.phases)

    @property
    def footprint_bytes(self) -> sp.Expr:
        """Bytes on chip in the largest phase; `e` is the size of an element."""
        sizes: dict[Size, sp.Expr | int] = {"element": e, "fp32": ACCUMULATOR_BYTES}
        return _largest(
            sp.Add(*(held.words * sizes[held.size] for held in phase)) for phase in self.phases
        )

    def weighted_phases(self) -> tuple[sp.Expr, ...]:
        """Count the words that each phase holds, in words of the inputs."""
        return tuple(
            sp.Add(*(held.words * weight(held.size) for held in phase)) for phase in self.phases
        )

    def per_score(self) -> sp.Expr:
        """Return weighted words / N^2 for N to infinity, as an expression of the tiles.

        For one head, equal lengths and head dims, and no mask but a density. In this limit ragged
        tiles do not matter.
        """
        words = smooth(self.weighted_words().subs(UNMASKED))
        words = words.subs({nnz: s * N**2, g: 1, N_q: N, N_kv: N, d_qk: d, d_v: d})
        return sp.simplify(sp.expand(words).coeff(N, 2))

    def _moved(self, direction: Literal["read", "write"] | None) -> Iterable[Term]:
        return (term for term in self.terms if direction in (None, term.direction))


def weight(size: Size) -> sp.Expr:
    """Return the number of input words that a word of this size counts as."""
    return alpha if size == "fp32" else sp.Integer(1)


def smooth(expression: sp.Expr) -> sp.Expr:
    """Return the expression without rounding up, as if tiles divided all lengths."""
    return expression.replace(sp.ceiling, lambda argument: argument)


def packed(schedule: Schedule) -> Schedule:
    """Return the schedule with the g query heads of a group packed into one axis of g N_q rows.

    V_kv and V_q then count for the whole group: ceil(g N_q / B_r) N_kv and ceil(N_kv / B_c) g N_q.
    """
    swap = {g: sp.Integer(1), N_q: g * N_q}
    return replace(
        schedule,
        name=f"{schedule.name}_packed",
        terms=tuple(
            replace(term, words=term.words.subs(swap, simultaneous=True)) for term in schedule.terms
        ),
    )


PACKED_UNMASKED = {
    V_kv: sp.ceiling(g * N_q / B_r) * N_kv,
    V_q: sp.ceiling(N_kv / B_c) * g * N_q,
}
"""Visited rows of a packed schedule without a mask."""


def _largest(phases: Iterable[sp.Expr]) -> sp.Expr:
    alternatives = list(phases)
    return alternatives[0] if len(alternatives) == 1 else sp.Max(*alternatives)
