"""Forward schedules. SY: Saha and Ye, arXiv 2402.07443; FA1, FA2: Dao et al., arXiv 2205.14135 and
2307.08691."""

from __future__ import annotations

import sympy as sp

from tilegen.model.symbols import (
    B,
    B_c,
    B_d,
    B_e,
    B_k,
    B_p,
    B_r,
    N_kv,
    N_q,
    V_kv,
    V_q,
    d_qk,
    d_v,
    g,
    n,
    n_s,
    nnz,
    s,
)
from tilegen.model.traffic import Size, Term, terms_of
from tilegen.theory.schedules.record import Held, Schedule

_ROWS = g * N_q
_T_R, _T_C = sp.ceiling(N_q / B_r), sp.ceiling(N_kv / B_c)
_T_E = sp.ceiling(d_v / B_e)
_SQUARE = _ROWS * N_kv
_FLOPS = 2 * _SQUARE * (d_qk + d_v)
_OUTPUTS = Term("out", "write", _ROWS * d_v), Term("lse", "write", _ROWS, "fp32")
_SCORES = Held("s", B_r * B_c, "fp32")
_Q_TILE = (
    Held("q", B_r * d_qk),
    Held("acc", B_r * d_v, "fp32"),
    Held("m_i, l_i", 2 * B_r, "fp32"),
    _SCORES,
)

FWD_Q_STATIONARY = Schedule(
    name="fwd_q_stationary",
    citation="FA2, Algorithm 1",
    direction="forward",
    terms=terms_of("fwd"),
    phases=((*_Q_TILE, Held("k, v", n * B_c * (d_qk + d_v))),),
    flops=_FLOPS,
    exps=_SQUARE,
    masks=True,
)
"""Each query tile stays on chip with its output; K and V are streamed."""

FWD_Q_STATIONARY_MLA = Schedule(
    name="fwd_q_stationary_mla",
    citation="FA2, Algorithm 1, where V is the first d_v columns of K (multi-head latent "
    "attention, DeepSeek-V2, arXiv 2405.04434)",
    direction="forward",
    terms=tuple(term for term in terms_of("fwd") if term.tensor != "v"),
    phases=((*_Q_TILE, Held("k", n * B_c * d_qk)),),
    flops=_FLOPS,
    exps=_SQUARE,
    masks=True,
)
"""One load of K serves both products."""


def _kv_stationary(name: str, citation: str, spills: tuple[Term, ...], masks: bool) -> Schedule:
    return Schedule(
        name=name,
        citation=citation,
        direction="forward",
        terms=(
            Term("k", "read", N_kv * d_qk),
            Term("v", "read", N_kv * d_v),
            Term("q", "read", g * V_q * d_qk),
            *spills,
        ),
        phases=(
            (
                Held("k, v", B_c * (d_qk + d_v)),
                _SCORES,
                Held("q", n * B_r * d_qk),
                Held("acc, m_i, l_i", n * B_r * (d_v + 2), "fp32"),
            ),
        ),
        flops=_FLOPS,
        exps=_SQUARE,
        masks=masks,
    )


FWD_KV_STATIONARY_FA1 = _kv_stationary(
    "fwd_kv_stationary_fa1",
    "FA1, Algorithm 1",
    (
        Term("acc", "read", g * V_q * d_v, "fp32"),
        Term("m_i, l_i", "read", 2 * g * V_q, "fp32"),
        Term("acc", "write", (_ROWS + g * V_q) * d_v, "fp32"),
        Term("m_i, l_i", "write", 2 * (_ROWS + g * V_q), "fp32"),
    ),
    True,
)
"""Each KV tile stays on chip. Outputs and statistics are initialised in memory with zeros and -inf,
then loaded and stored for every KV tile."""

_LATER = (_T_C - 1) * _ROWS  # rows that are loaded again, after the first KV tile
FWD_KV_STATIONARY = _kv_stationary(
    "fwd_kv_stationary",
    "FA1, Algorithm 1, without the first load and with the outputs of FA2",
    (
        Term("acc", "read", _LATER * d_v, "fp32"),
        Term("m_i, l_i", "read", 2 * _LATER, "fp32"),
        Term("acc", "write", _LATER * d_v, "fp32"),
        Term("m_i, l_i", "write", 2 * _LATER, "fp32"),
        *_OUTPUTS,
    ),
    False,
)
"""FA1's schedule, starting without a load at the first KV tile and storing the result at the
last."""

_PARTS = sp.ceiling(_T_C / sp.ceiling(_T_C / n_s))  # splits with at least one tile
FWD_SPLIT_KV = Schedule(
    name="fwd_split_kv",
    citation="Flash-decoding (Dao et al., 2023), with its combining kernel",
    direction="forward",
    terms=(
        Term("q", "read", _PARTS * _ROWS * d_qk),
        Term("k", "read", g * V_kv * d_qk),
        Term("v", "read", g * V_kv * d_v),
        Term("partial_out", "write", _PARTS * _ROWS * d_v, "fp32"),
        Term("partial_lse", "write", _PARTS * _ROWS, "fp32"),
        Term("partial_out", "read", _PARTS * _ROWS * d_v, "fp32"),
        Term("partial_lse", "read", _PARTS * _ROWS, "fp32"),
        *_OUTPUTS,
    ),
    phases=FWD_Q_STATIONARY.phases,
    flops=_FLOPS,
    exps=_SQUARE,
    masks=True,
)
"""n_s programs divide the KV tiles of a query tile; each writes a normalised output and lse."""

_SY_ROWS, _SY_COLUMNS = sp.ceiling(N_q / B), sp.ceiling(N_kv / B)
FWD_SAHA_YE = Schedule(
    name="fwd_saha_ye",
    citation="SY, Algorithm 1",
    direction="forward",
    terms=(
        Term("q", "read", _SY_COLUMNS * _ROWS * d_qk),
        Term("k", "read", g * _SY_ROWS * N_kv * d_qk),
        Term("p", "write", _SQUARE, "fp32"),
        Term("row_sum", "write", _ROWS, "fp32"),
        Term("row_sum", "read", _ROWS, "fp32"),
        Term("p", "read", sp.ceiling(d_v / B) * _SQUARE, "fp32"),
        Term("v", "read", g * _SY_ROWS * N_kv * d_v),
        Term("out", "write", _ROWS * d_v),
    ),
    phases=((Held("p", B**2, "fp32"), Held("q, k", 2 * B**2), Held("row_sum", B, "fp32")),),
    flops=_FLOPS,
    exps=_SQUARE,
)
"""Square blocks of exp(Q K^T) are stored, then multiplied by V. Without a running maximum, so
exponentials can overflow."""


def _small_cache(name: str, citation: str, size: Size, density: sp.Expr, kept: sp.Expr) -> Schedule:
    """Return the small-cache forward, which stores `kept` entries of S per key-value head."""
    rows_again = sp.ceiling(N_q / B_p)
    return Schedule(
        name=name,
        citation=citation,
        direction="forward",
        terms=(
            Term("q", "read", _T_C * _ROWS * d_qk),
            Term("k", "read", g * _T_R * N_kv * d_qk),
            Term("s", "write", kept, size),
            Term("lse", "write", _ROWS, "fp32"),
            Term("lse", "read", _ROWS, "fp32"),
            Term("s", "read", _T_E * kept, size),
            Term("v", "read", g * rows_again * N_kv * d_v),
            Term("out", "write", _ROWS * d_v),
        ),
        phases=(
            (
                Held("s", density * B_r * B_c, "fp32"),
                Held("q, k", n * B_d * (B_r + B_c)),
                Held("m_i, l_i", 2 * B_r, "fp32"),
            ),
            (
                Held("acc", B_p * B_e, "fp32"),
                Held("s", density * n * B_k * B_p, size),
                Held("v", n * B_k * B_e),
                Held("lse", B_p, "fp32"),
            ),
        ),
        flops=_FLOPS,
        exps=(1 + _T_E) * _SQUARE,
    )


_ONE = sp.Integer(1)
FWD_SMALL_CACHE = _small_cache(
    "fwd_small_cache",
    "SY, Algorithm 1, with rectangular tiles and a running maximum; S in the dtype of the inputs",
    "element",
    _ONE,
    _SQUARE,
)
"""Phase 1 stores S and the row statistics; phase 2 computes exp(S - lse) V. Each phase has its own
tiles. Head dims are streamed in chunks, so tiles grow to sqrt(M) for any head dim. S is
exponentiated for the statistics, and again for each chunk of the output."""

FWD_SMALL_CACHE_FP32 = _small_cache(
    "fwd_small_cache_fp32",
    "SY, Algorithm 1, with rectangular tiles and a running maximum; S in fp32",
    "fp32",
    _ONE,
    _SQUARE,
)
"""The small-cache forward with S in fp32, as accumulated: more words, no rounding."""

FWD_SPARSE_SMALL_CACHE = _small_cache(
    "fwd_sparse_small_cache",
    "the small-cache forward for masks without structure; compare Li et al., arXiv 2410.09397, "
    "Theorem 4.5",
    "element",
    s,
    g * nnz,
)
"""A tile of S is held and stored without the entries that the mask drops, so tiles grow to
sqrt(M / s). Every tile is visited. The footprint is a mean, and does not count indices."""

FWD_S_STATIONARY = Schedule(
    name="fwd_s_stationary",
    citation="derived here: N^2 d / sqrt(M) words without storing S",
    direction="forward",
    terms=(
        Term("q", "read", _T_C * _ROWS * d_qk),
        Term("k", "read", g * _T_R * N_kv * d_qk),
        Term("v", "read", g * _T_R * N_kv * d_v),
        Term("acc", "read", _LATER * d_v, "fp32"),
        Term("acc", "write", _LATER * d_v, "fp32"),
        *_OUTPUTS,
    ),
    phases=(
        (_SCORES, Held("m_i, l_i", 2 * B_r, "fp32"), Held("q, k", B_d * (B_r + B_c))),
        (
            _SCORES,
            Held("m_i, l_i", 2 * B_r, "fp32"),
            Held("acc", B_e * B_r, "fp32"),
            Held("v", B_e * B_c),
        ),
    ),
    flops=_FLOPS,
    exps=_SQUARE,
)
"""Tiles of S stay on chip until used; chunks of Q and K are streamed, and the output is loaded and
stored."""

FWD_O_STATIONARY = Schedule(
    name="fwd_o_stationary",
    citation="derived here: FA2, Algorithm 1, with Q read again for every KV tile",
    direction="forward",
    terms=(
        Term("q", "read", _T_C * _ROWS * d_qk),
        Term("k", "read", g * _T_R * N_kv * d_qk),
        Term("v", "read", g * _T_R * N_kv * d_v),
        *_OUTPUTS,
    ),
    phases=tuple(
        (Held("acc", B_r * d_v, "fp32"), Held("m_i, l_i", 2 * B_r, "fp32"), _SCORES, chunks)
        for chunks in (Held("q, k", B_d * (B_r + B_c)), Held("v", B_e * B_c))
    ),
    flops=_FLOPS,
    exps=_SQUARE,
)
"""Only the output stays on chip: for head dims at which Q does not fit beside it."""

FWD_V_SPLIT = Schedule(
    name="fwd_v_split",
    citation="derived here: FA2, Algorithm 1, for each chunk of d_v anew",
    direction="forward",
    terms=(
        Term("q", "read", _T_E * _ROWS * d_qk),
        Term("k", "read", _T_E * g * V_kv * d_qk),
        Term("v", "read", g * V_kv * d_v),
        *_OUTPUTS,
    ),
    phases=(
        (
            Held("q", B_r * d_qk),
            Held("acc", B_r * B_e, "fp32"),
            Held("m_i, l_i", 2 * B_r, "fp32"),
            _SCORES,
            Held("k, v", n * B_c * (d_qk + B_e)),
        ),
    ),
    flops=2 * _SQUARE * (_T_E * d_qk + d_v),
    exps=_T_E * _SQUARE,
    masks=True,
)
"""Programs divide d_v; each computes S."""
