"""Backward in two passes over the scores, without atomics: dK and dV with key-value tiles on chip,
dQ with query tiles on chip. FlashAttention-2 (Dao, arXiv 2307.08691)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tilegen.kernels.arguments import factor
from tilegen.kernels.config import BLOCK_SIZES
from tilegen.kernels.loops import OverRows, Whole
from tilegen.kernels.moved import read, write
from tilegen.kernels.panels import Launch
from tilegen.kernels.spec import FamilySpec, KernelSpec, Knobs
from tilegen.kernels.tensors import DELTA, DK, DOUT, DQ, DV, LSE, OUT, K, Q, V

if TYPE_CHECKING:
    import torch

INPUTS = (Q, K, V, DOUT, LSE, DELTA)
FLOOR = (
    read(Q, "g*n_q*d_qk"),
    read(K, "n_kv*d_qk"),
    read(V, "n_kv*d_v"),
    read(OUT, "g*n_q*d_v"),
    read(DOUT, "g*n_q*d_v"),
    read(LSE, "g*n_q"),
    write(DQ, "g*N_q*d_qk"),
    write(DK, "N_kv*d_qk"),
    write(DV, "N_kv*d_v"),
)
"""Tensors that any backward must move."""

BWD_PREPROCESS = KernelSpec(
    name="bwd_preprocess",
    template="two_pass/attention_bwd_preprocess.py.jinja",
    title="Attention backward, preprocess: delta = rowsum(out * dout).",
    inputs=(OUT, DOUT),
    outputs=(DELTA,),
    grid=(("seqlen_q", "block_m"), ("num_heads_q", 1), ("batch", 1)),
    loop=OverRows(),
    checked_by=("dq", "dk", "dv", "dt", "dsinks"),  # delta is seen in all of them
    knobs=Knobs(block_n=BLOCK_SIZES[:1], num_stages=(1,)),  # nothing to pipeline or stream
)

BWD_DKDV = KernelSpec(
    name="bwd_dkdv",
    template="two_pass/attention_bwd_dkdv.py.jinja",
    title="Attention backward: dk and dv.",
    inputs=(*INPUTS, factor("softmax_scale")),
    outputs=(DK, DV),
    grid=(("seqlen_kv", "block_n"), ("num_heads_kv", 1), ("batch", 1)),
    loop=Whole(
        stationary="columns",
        products=("qk", "v", "v", "qk"),  # S, dP; dV += P^T dO, dK += dS^T Q
        score_tiles=2,
    ),
    checked_by=("dk", "dv"),
    described=("q", "dout"),
    supports=frozenset({"scores", "dropout"}),
)

BWD_DQ = KernelSpec(
    name="bwd_dq",
    template="two_pass/attention_bwd_dq.py.jinja",
    title="Attention backward: dq.",
    inputs=(*INPUTS, factor("softmax_scale")),
    outputs=(DQ,),
    grid=(("seqlen_q", "block_m"), ("num_heads_q", 1), ("batch", 1)),
    loop=Whole(
        products=("qk", "v", "qk"),  # S, dP; dQ += dS K
        score_tiles=2,
    ),
    checked_by=("dq", "dt"),
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
    kernels: tuple[str, str] = (BWD_DKDV.name, BWD_DQ.name),
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Compute (dq, dk, dv) by two kernels; None for gradients that are not wanted."""
    dq = dk = dv = None
    dkdv_kernel, dq_kernel = kernels
    if wants_dq:
        dq = launch[dq_kernel](q, k, v, dout, lse, delta, scale)
    if wants_dkdv:
        dk, dv = launch[dkdv_kernel](q, k, v, dout, lse, delta, scale)
    return dq, dk, dv


TWO_PASS = FamilySpec(
    name="two_pass",
    direction="backward",
    kernels=(BWD_PREPROCESS, BWD_DKDV, BWD_DQ),
    run=run,
)

FAMILIES = (TWO_PASS,)
