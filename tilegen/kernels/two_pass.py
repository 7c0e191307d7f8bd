"""Backward in two passes over the scores, without atomics: dK and dV with key-value tiles on chip,
dQ with query tiles on chip. FlashAttention-2 (Dao, arXiv 2307.08691)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tilegen.kernels.arguments import factor, pointers, sizes, strides
from tilegen.kernels.config import BLOCK_SIZES
from tilegen.kernels.loops import OverRows, Whole
from tilegen.kernels.panels import Launch
from tilegen.kernels.spec import FamilySpec, KernelSpec, Knobs, read, write

if TYPE_CHECKING:
    import torch

INPUTS = ("q", "k", "v", "dout", "lse", "delta")
READ_ONCE = (
    read("q", "g*n_q*d_qk"),
    read("k", "n_kv*d_qk"),
    read("v", "n_kv*d_v"),
    read("dout", "g*n_q*d_v"),
    read("lse", "g*n_q", fp32=True),
    read("delta", "g*n_q", fp32=True),
)
"""Tensors that every kernel of a backward that forms scores must read."""
FLOOR = (
    read("q", "g*n_q*d_qk"),
    read("k", "n_kv*d_qk"),
    read("v", "n_kv*d_v"),
    read("out", "g*n_q*d_v"),
    read("dout", "g*n_q*d_v"),
    read("lse", "g*n_q", fp32=True),
    write("dq", "g*N_q*d_qk"),
    write("dk", "N_kv*d_qk"),
    write("dv", "N_kv*d_v"),
)
"""Tensors that any backward must move."""
_STRIDES = (
    strides("q", "batch, head and row strides"),
    strides("k"),
    strides("v"),
    strides("dout"),
)

BWD_PREPROCESS = KernelSpec(
    name="bwd_preprocess",
    template="two_pass/attention_bwd_preprocess.py.jinja",
    title="Attention backward, preprocess: delta = rowsum(out * dout).",
    given=("out", "dout"),
    made=("delta",),
    lines=(
        pointers("out", "dout", "delta"),
        strides("out", "batch, head and row strides"),
        strides("dout"),
        sizes("num_heads_q seqlen_q", "out"),
    ),
    grid=(("seqlen_q", "block_m"), ("num_heads_q", 1), ("batch", 1)),
    loop=OverRows(works_on=("out", "dout")),
    traffic=(
        read("out", "g*N_q*d_v"),
        read("dout", "g*N_q*d_v"),
        write("delta", "g*N_q", fp32=True),
    ),
    floor=(
        read("out", "g*N_q*d_v"),
        read("dout", "g*N_q*d_v"),
        write("delta", "g*N_q", fp32=True),
    ),
    shows=("dq", "dk", "dv", "dt", "dsinks"),  # delta is seen in all of them
    knobs=Knobs(block_n=BLOCK_SIZES[:1], num_stages=(1,)),  # nothing to pipeline or stream
)

BWD_DKDV = KernelSpec(
    name="bwd_dkdv",
    template="two_pass/attention_bwd_dkdv.py.jinja",
    title="Attention backward: dk and dv.",
    given=(*INPUTS, "softmax_scale"),
    made=("dk", "dv"),
    lines=(
        pointers(*INPUTS, "dk", "dv"),
        *_STRIDES,
        strides("dk"),
        strides("dv"),
        sizes("num_heads_kv seqlen_q seqlen_kv", "q k"),
        factor("softmax_scale"),
    ),
    grid=(("seqlen_kv", "block_n"), ("num_heads_kv", 1), ("batch", 1)),
    loop=Whole(
        stays="columns",
        keeps=("k", "v"),
        streams=("q", "dout", "lse", "delta"),
        accumulates=("dk", "dv"),
        products=("qk", "v", "v", "qk"),  # S, dP; dV += P^T dO, dK += dS^T Q
        score_tiles=2,
    ),
    traffic=(
        read("k", "N_kv*d_qk"),
        read("v", "N_kv*d_v"),
        read("q", "g*V_q*d_qk"),
        read("dout", "g*V_q*d_v"),
        read("lse", "g*V_q", fp32=True),
        read("delta", "g*V_q", fp32=True),
        write("dk", "N_kv*d_qk"),
        write("dv", "N_kv*d_v"),
    ),
    floor=(*READ_ONCE, write("dk", "N_kv*d_qk"), write("dv", "N_kv*d_v")),
    shows=("dk", "dv"),
    described=("q", "dout"),
    supports=frozenset({"scores", "dropout"}),
)

BWD_DQ = KernelSpec(
    name="bwd_dq",
    template="two_pass/attention_bwd_dq.py.jinja",
    title="Attention backward: dq.",
    given=(*INPUTS, "softmax_scale"),
    made=("dq",),
    lines=(
        pointers(*INPUTS, "dq"),
        *_STRIDES,
        strides("dq"),
        sizes("num_heads_q seqlen_q seqlen_kv", "q k"),
        factor("softmax_scale"),
    ),
    grid=(("seqlen_q", "block_m"), ("num_heads_q", 1), ("batch", 1)),
    loop=Whole(
        keeps=("q", "dout"),
        streams=("k", "v"),
        accumulates=("dq",),
        products=("qk", "v", "qk"),  # S, dP; dQ += dS K
        score_tiles=2,
    ),
    traffic=(
        read("q", "g*N_q*d_qk"),
        read("dout", "g*N_q*d_v"),
        read("lse", "g*N_q", fp32=True),
        read("delta", "g*N_q", fp32=True),
        read("k", "g*V_kv*d_qk"),
        read("v", "g*V_kv*d_v"),
        write("dq", "g*N_q*d_qk"),
    ),
    floor=(*READ_ONCE, write("dq", "g*N_q*d_qk")),
    shows=("dq", "dt"),
    described=("k", "v"),
    supports=frozenset({"scores", "dropout", "training"}),
)


def run(
    launch: Mapping[str, Launch],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    *,
    panel_rows: int,
    wants_dq: bool = True,
    wants_dkdv: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Compute (dq, dk, dv); None for gradients that are not wanted."""
    dq = dk = dv = None
    if wants_dq:
        dq = launch[BWD_DQ.name](q, k, v, dout, lse, delta, scale)
    if wants_dkdv:
        dk, dv = launch[BWD_DKDV.name](q, k, v, dout, lse, delta, scale)
    return dq, dk, dv


TWO_PASS = FamilySpec(
    name="two_pass",
    direction="backward",
    kernels=(BWD_PREPROCESS, BWD_DKDV, BWD_DQ),
    run=run,
)

FAMILIES = (TWO_PASS,)
