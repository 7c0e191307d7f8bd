"""Masks: counted words against Li's Theorem 4.5, and against the pattern-aware bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy as sp

from benchmarks.environment import Environment
from benchmarks.study.counting import Counters
from benchmarks.study.tiles import DTYPES, held_words, moved_words
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.symbols import Z_S, H_kv, M, N, P, Z, b, d_qk, g, nnz, s, w
from tilegen.problem import AttentionProblem
from tilegen.theory.patterns import (
    MaskPattern,
    bound_of,
    pattern_bound,
    spanned,
    unstructured_limit,
)
from tilegen.theory.regimes import worst_case_over_instances

ELEMENT_BYTES = 4
HEAD_DIM, BLOCK = 64, 64
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
LONGEST_SQUARE = 2048
"""Longest length of the masks whose tiles grow as N^2."""
LONG_HEAD_DIM, LONG_BLOCK, LONG = 128, 128, 65536
"""Head dim, tile and length of what is predicted only, at a size where asymptotics show."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mask of N x N."""

    pattern: MaskPattern
    parameter: int = 0
    """Entries of a row of a window, side of a block, or 1 / density of an unstructured mask."""

    @property
    def name(self) -> str:
        """Name of the mask."""
        return f"{self.pattern} {self.parameter}" if self.parameter else self.pattern

    def problem(self, seqlen: int, head_dim: int) -> AttentionProblem | None:
        """Return the problem that moves the same words, None if none can be emitted.

        A block-diagonal mask whose blocks are multiples of a tile is a batch of shorter sequences.
        """
        mask, batch, rows = "full", 1, seqlen
        match self.pattern:
            case "causal":
                mask = "causal"
            case "window":
                mask = f"causal&window({self.parameter - 1},0)"
            case "block_diagonal":
                batch, rows = seqlen // self.parameter, self.parameter
            case "unstructured":
                return None
            case _:
                pass
        return AttentionProblem.parse(
            f"b{batch} hq1 hkv1 q{rows} kv{rows} d{head_dim} {DTYPES[ELEMENT_BYTES]} {mask}"
        )

    def entries(self, seqlen: int) -> float:
        """Return the entries that the mask keeps."""
        match self.pattern:
            case "causal":
                return seqlen * (seqlen + 1) / 2
            case "window":
                return self.parameter * seqlen - self.parameter * (self.parameter - 1) / 2
            case "block_diagonal":
                return self.parameter * seqlen
            case "unstructured":
                return seqlen**2 / self.parameter
            case _:
                return seqlen**2


COUNTED = (
    Case(pattern="dense"),
    Case(pattern="causal"),
    *(Case(pattern="window", parameter=width) for width in (64, 256)),
    *(Case(pattern="block_diagonal", parameter=side) for side in (64, 256)),
)
PREDICTED = (
    Case(pattern="dense"),
    Case(pattern="causal"),
    *(Case(pattern="window", parameter=width) for width in (512, 4096)),
    *(Case(pattern="block_diagonal", parameter=side) for side in (128, 2048)),
    *(Case(pattern="unstructured", parameter=inverse) for inverse in (16, 1024)),
)


@dataclass(frozen=True, kw_only=True)
class MaskRow(Environment):
    """The Q-stationary forward under one mask, all elements one word."""

    mask: str
    pattern: str
    seqlen: int
    head_dim: int
    tiles: str
    memory_words: int
    """Fast memory that one program needs, the M of the formulas [words]."""
    density: float
    """Kept entries / N^2."""
    predicted_words: int
    counted_words: int | None
    """Words that were counted; empty if they are predicted alone."""
    theorem_4_5: float
    pattern_bound: float
    floor: float
    over_theorem: float
    """Words over the formula of Theorem 4.5. Below 1 the formula is no bound for this mask."""
    over_bound: float
    """Words over the larger of pattern-aware bound and floor; never below 1."""


def mask_rows(counters: Counters, lengths: Sequence[int] = LENGTHS) -> Iterator[MaskRow]:
    """Yield the counted rows, then the ones that are predicted at a long sequence."""
    cases = [
        (case, seqlen)
        for case in COUNTED
        for seqlen in lengths
        if case.parameter or seqlen <= LONGEST_SQUARE
    ]
    config = TileConfig(block_m=BLOCK, block_n=BLOCK)
    configs: dict[Kernel, TileConfig] = {"fwd": config}
    questions = [
        (problem, configs)
        for case, seqlen in cases
        if (problem := case.problem(seqlen, HEAD_DIM)) is not None
    ]
    for (case, seqlen), moved in zip(cases, counters.count(questions), strict=True):
        counted = sum(moved["fwd"]) // ELEMENT_BYTES
        yield mask_row(case, seqlen, HEAD_DIM, config, counted)
    long = TileConfig(block_m=LONG_BLOCK, block_n=LONG_BLOCK)
    for case in PREDICTED:
        yield mask_row(case, LONG, LONG_HEAD_DIM, long, None)


def mask_row(
    case: Case, seqlen: int, head_dim: int, config: TileConfig, counted: int | None
) -> MaskRow:
    """Return the row of one mask at one length."""
    memory = held_words("fwd", config, head_dim, ELEMENT_BYTES)
    # Without structure, some entry is kept in every tile.
    problem = case.problem(seqlen, head_dim) or Case(pattern="dense").problem(seqlen, head_dim)
    assert problem is not None
    predicted = moved_words(problem, {"fwd": config})
    theorem = theorem_4_5(case, seqlen, head_dim, memory)
    pattern, floor = bound(case, seqlen, head_dim, memory), float(4 * seqlen * head_dim + seqlen)
    words = predicted if counted is None else counted
    return MaskRow(
        mask=case.name,
        pattern=case.pattern,
        seqlen=seqlen,
        head_dim=head_dim,
        tiles=f"{config.block_m}x{config.block_n}",
        memory_words=memory,
        density=case.entries(seqlen) / seqlen**2,
        predicted_words=predicted,
        counted_words=counted,
        theorem_4_5=theorem,
        pattern_bound=pattern,
        floor=floor,
        over_theorem=words / theorem,
        over_bound=words / max(pattern, floor),
    )


def theorem_4_5(case: Case, seqlen: int, head_dim: int, memory: int) -> float:
    """Return Li's formula for the forward, without its constant: Z nonzeros of dense Q and K."""
    values = {Z: 2 * seqlen * head_dim, Z_S: case.entries(seqlen), M: memory}
    return float(worst_case_over_instances("forward").subs(values))


def bound(case: Case, seqlen: int, head_dim: int, memory: int) -> float:
    """Return the pattern-aware bound in words; 0 if it says less than nothing."""
    numbers: dict[sp.Symbol, float] = {
        N: seqlen,
        M: memory,
        d_qk: head_dim,
        nnz: case.entries(seqlen),
        H_kv: 1,
        g: 1,
        P: 1,
    }
    expression: Any
    if case.pattern == "unstructured":
        limit = sp.Min(unstructured_limit(), spanned("dense"))
        expression = bound_of(limit).subs(s, sp.Rational(1, case.parameter))
    else:
        expression = pattern_bound(case.pattern).subs({w: case.parameter, b: case.parameter})
    return max(0.0, float(expression.subs(numbers)))
