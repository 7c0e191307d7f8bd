"""Backward schedules. FA1, FA2: Dao et al., arXiv 2205.14135 and 2307.08691; Li: Li et al., arXiv
2410.09397."""

from __future__ import annotations

import sympy as sp

from tilegen.model.symbols import (
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
    kappa,
    n,
)
from tilegen.model.traffic import Term, terms_of
from tilegen.theory.schedules.record import Held, Schedule

_ROWS, _WIDTH = g * N_q, d_qk + d_v
_SQUARE, _NONE = _ROWS * N_kv, sp.Integer(0)
_FIVE_PRODUCTS = 2 * _SQUARE * (3 * d_qk + 2 * d_v)
_SCORES = Held("p, ds", 2 * B_r * B_c, "fp32")
_STREAMED_KV = Held("k, v", n * B_c * _WIDTH)
_STREAMED_Q = Held("q, dout", n * B_r * _WIDTH), Held("lse, delta", 2 * n * B_r, "fp32")
_KV_TILE = Held("k, v", B_c * _WIDTH), Held("dk, dv", B_c * _WIDTH, "fp32"), _SCORES
_Q_TILE = (
    Held("q, dout", B_r * _WIDTH),
    Held("dq", B_r * d_qk, "fp32"),
    Held("lse, delta", 2 * B_r, "fp32"),
    _SCORES,
)

BWD_PREPROCESS = Schedule(
    name="bwd_preprocess",
    citation="FA2, Algorithm 2, line 4",
    direction="backward",
    terms=terms_of("bwd_preprocess"),
    phases=((Held("out, dout", 2 * B_r * d_v), Held("delta", B_r, "fp32")),),
    flops=_NONE,
    exps=_NONE,
    masks=True,
)
"""delta = rowsum(out * dout)."""

BWD_DKDV = Schedule(
    name="bwd_dkdv",
    citation="FA2, Algorithm 2, without the lines for dQ",
    direction="backward",
    terms=terms_of("bwd_dkdv"),
    phases=((*_KV_TILE, *_STREAMED_Q),),
    flops=4 * _SQUARE * _WIDTH,
    exps=_SQUARE,
    masks=True,
)
"""Each KV tile stays on chip with its gradients; the query tiles of all g heads are streamed."""

BWD_DKDV_PER_HEAD = Schedule(
    name="bwd_dkdv_per_head",
    citation="the same with one program per query head, and a kernel that adds up the group",
    direction="backward",
    terms=(
        Term("k", "read", g * N_kv * d_qk),
        Term("v", "read", g * N_kv * d_v),
        *(term for term in terms_of("bwd_dkdv") if term.tensor in ("q", "dout", "lse", "delta")),
        Term("partial_dk", "write", g * N_kv * d_qk, "fp32"),
        Term("partial_dv", "write", g * N_kv * d_v, "fp32"),
        Term("partial_dk", "read", g * N_kv * d_qk, "fp32"),
        Term("partial_dv", "read", g * N_kv * d_v, "fp32"),
        Term("dk", "write", N_kv * d_qk),
        Term("dv", "write", N_kv * d_v),
    ),
    phases=BWD_DKDV.phases,
    flops=4 * _SQUARE * _WIDTH,
    exps=_SQUARE,
    masks=True,
)
"""The dK/dV pass with a program for each query head: more programs if heads and KV tiles are
few."""

BWD_DQ = Schedule(
    name="bwd_dq",
    citation="FA2, Algorithm 2, with the loops exchanged",
    direction="backward",
    terms=terms_of("bwd_dq"),
    phases=((*_Q_TILE, _STREAMED_KV),),
    flops=2 * _SQUARE * (2 * d_qk + d_v),
    exps=_SQUARE,
    masks=True,
)
"""Each query tile stays on chip with its gradient; K and V are streamed."""


def _accumulated(tensor: str, additions: sp.Expr) -> tuple[Term, Term]:
    """Return the traffic of adding to slow memory: `kappa` is 2 if an addition loads, else 1."""
    return (
        Term(tensor, "read", (kappa - 1) * additions, "fp32"),
        Term(tensor, "write", additions, "fp32"),
    )


_FUSED_TERMS = (
    *terms_of("bwd_dkdv"),
    Term("dq_accum", "write", _ROWS * d_qk, "fp32"),  # zeros
    *_accumulated("dq_accum", g * V_q * d_qk),
)
BWD_FUSED = Schedule(
    name="bwd_fused",
    citation="FA2, Algorithm 2, without the load of O that it does not use",
    direction="backward",
    terms=_FUSED_TERMS,
    phases=((*_KV_TILE, *_STREAMED_Q, Held("dq", B_r * d_qk, "fp32")),),
    flops=_FIVE_PRODUCTS,
    exps=_SQUARE,
    masks=True,
)
"""The dK/dV pass, which also accumulates dQ in slow memory."""

BWD_FUSED_FA2 = Schedule(
    name="bwd_fused_fa2",
    citation="FA2, Algorithm 2",
    direction="backward",
    terms=(*_FUSED_TERMS, Term("out", "read", g * V_q * d_v)),
    phases=((*BWD_FUSED.phases[0], Held("out", B_r * d_v)),),
    flops=_FIVE_PRODUCTS,
    exps=_SQUARE,
    masks=True,
)
"""FA2's backward as printed: every step also loads O, although delta replaces it."""

BWD_CONVERT = Schedule(
    name="bwd_convert",
    citation="what every FA2 implementation runs after the fused backward",
    direction="backward",
    terms=(
        Term("dq_accum", "read", _ROWS * d_qk, "fp32"),
        Term("dq", "write", _ROWS * d_qk),
    ),
    phases=((Held("dq", B_r * d_qk, "fp32"),),),
    flops=_NONE,
    exps=_NONE,
    masks=True,
)
"""The kernel that rounds the accumulated dQ to the dtype of the inputs."""

BWD_FUSED_Q_STATIONARY = Schedule(
    name="bwd_fused_q_stationary",
    citation="FA2, Algorithm 2, with the loops exchanged: dK and dV are added up in slow memory",
    direction="backward",
    terms=(
        *terms_of("bwd_dq"),
        Term("dk_accum", "write", N_kv * d_qk, "fp32"),  # zeros
        Term("dv_accum", "write", N_kv * d_v, "fp32"),
        *_accumulated("dk_accum", g * V_kv * d_qk),
        *_accumulated("dv_accum", g * V_kv * d_v),
    ),
    phases=((*_Q_TILE, _STREAMED_KV, Held("dk, dv", B_c * _WIDTH, "fp32")),),
    flops=_FIVE_PRODUCTS,
    exps=_SQUARE,
    masks=True,
)
"""The dQ pass, which also accumulates dK and dV in slow memory."""

BWD_FA1 = Schedule(
    name="bwd_fa1",
    citation="FA1, Algorithm 4",
    direction="backward",
    terms=(
        Term("dq", "write", _ROWS * d_qk, "fp32"),  # zeros, as the next two
        Term("dk", "write", N_kv * d_qk),
        Term("dv", "write", N_kv * d_v),
        Term("k", "read", N_kv * d_qk),
        Term("v", "read", N_kv * d_v),
        Term("q", "read", g * V_q * d_qk),
        Term("out", "read", g * V_q * d_v),
        Term("dout", "read", g * V_q * d_v),
        Term("dq", "read", g * V_q * d_qk, "fp32"),
        Term("m_i, l_i", "read", 2 * g * V_q, "fp32"),
        Term("dq", "write", g * V_q * d_qk, "fp32"),
        Term("dk", "write", N_kv * d_qk),
        Term("dv", "write", N_kv * d_v),
    ),
    phases=(
        (
            *_KV_TILE,
            Held("q, out, dout", n * B_r * (d_qk + 2 * d_v)),
            Held("dq, m_i, l_i", n * B_r * (d_qk + 2), "fp32"),
            Held("delta", B_r, "fp32"),
        ),
    ),
    flops=_FIVE_PRODUCTS,
    exps=_SQUARE,
    masks=True,
)
"""FA1's backward as printed: dQ is loaded and stored for every KV tile, and delta is computed from
O every time."""

_T_C, _T_R = sp.ceiling(N_kv / B_c), sp.ceiling(N_q / B_r)
_T_EK, _T_EV = sp.ceiling(d_qk / B_e), sp.ceiling(d_v / B_e)
_T_CP, _T_RP = sp.ceiling(N_kv / B_p), sp.ceiling(N_q / B_p)


BWD_SMALL_CACHE = Schedule(
    name="bwd_small_cache",
    citation="in the spirit of Li, Algorithm 6: five matrix products with tiles of sqrt(M)",
    direction="backward",
    terms=(
        Term("lse", "read", _ROWS, "fp32"),
        Term("delta", "read", _ROWS, "fp32"),
        # P = exp(Q K^T - lse)
        Term("q", "read", _T_C * _ROWS * d_qk),
        Term("k", "read", g * _T_R * N_kv * d_qk),
        Term("p", "write", _SQUARE),
        # dV = P^T dO
        Term("p", "read", _T_EV * _SQUARE),
        Term("dout", "read", _T_CP * _ROWS * d_v),
        Term("dv", "write", N_kv * d_v),
        # dS = P (dO V^T - delta), in the memory of P
        Term("dout", "read", _T_C * _ROWS * d_v),
        Term("v", "read", g * _T_R * N_kv * d_v),
        Term("p", "read", _SQUARE),
        Term("ds", "write", _SQUARE),
        # dQ = dS K
        Term("ds", "read", _T_EK * _SQUARE),
        Term("k", "read", g * _T_RP * N_kv * d_qk),
        Term("dq", "write", _ROWS * d_qk),
        # dK = dS^T Q
        Term("ds", "read", _T_EK * _SQUARE),
        Term("q", "read", _T_CP * _ROWS * d_qk),
        Term("dk", "write", N_kv * d_qk),
    ),
    phases=(
        (
            Held("p", B_r * B_c, "fp32"),
            Held("q, k", n * B_d * (B_r + B_c)),
            Held("lse", B_r, "fp32"),
        ),
        (Held("dv; dq; dk", B_p * B_e, "fp32"), Held("operands", n * B_k * (B_p + B_e))),
    ),
    flops=_FIVE_PRODUCTS,
    exps=_SQUARE,
)
"""P and dS are stored. Products that compute them have tiles of B_r x B_c; the three products that
sum over rows have tiles of B_p x B_e. P is loaded again in pieces of B_d columns, into the memory
of the chunks of dO and V."""
