"""Backward in one pass over the scores, with five matrix products per tile; two passes have seven.

A program keeps keys, values and their gradients on chip, and adds to dQ in memory. It works on the
key tiles of one share. Each share has its own dQ, in fp32, which no other program adds to: there
are no atomics, and every run gives the same bits. Key tiles are dealt out in turn, which balances
the shares under a causal mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tilegen.kernels.allocation import allocator
from tilegen.kernels.config import SPLITS
from tilegen.kernels.layout import strides_like
from tilegen.kernels.moved import read, write
from tilegen.kernels.panels import Launch
from tilegen.kernels.partial_gradients import BWD_DQ_SUM, HAS_DQ, PARTIAL_DQ, TILES
from tilegen.kernels.spec import FamilySpec
from tilegen.kernels.two_pass import BWD_DKDV, BWD_PREPROCESS

if TYPE_CHECKING:
    import torch

_SHARES = PARTIAL_DQ.shape.replace("splits", "shares")
SHARED_DQ = replace(PARTIAL_DQ, shape=_SHARES)
SHARED_HAS_DQ = replace(HAS_DQ, shape=_SHARES.rsplit(" ", 1)[0], note=": 1")

BWD_ONE_PASS = replace(
    BWD_DKDV,
    name="bwd_one_pass",
    template="one_pass/attention_bwd_one_pass.py.jinja",
    title="Attention backward in one pass: dk and dv, and dq of each share of the keys.",
    outputs=(*BWD_DKDV.outputs, SHARED_DQ, SHARED_HAS_DQ),
    grid=(("seqlen_kv", "split_kv"), ("num_heads_kv", 1), ("batch", 1)),
    loop=replace(
        BWD_DKDV.loop,
        products=("qk", "v", "v", "qk", "qk"),  # S, dP; dV += P^T dO, dK += dS^T Q, dQ += dS K
        shares=True,
    ),
    own_traffic=(
        *BWD_DKDV.traffic,
        write(SHARED_DQ, "g*W_s*d_qk"),  # zeros
        write(SHARED_HAS_DQ, "g*W_s"),
        read(SHARED_DQ, "g*V_q*d_qk"),
        write(SHARED_DQ, "g*V_q*d_qk"),
    ),
    own_floor=(*BWD_DKDV.floor, write(SHARED_DQ, "g*N_q*d_qk")),
    checked_by=("dq", "dk", "dv", "dt"),
    knobs=replace(TILES, split_kv=SPLITS[SPLITS.index(TILES.block_n[-1]) :]),
    supports=BWD_DKDV.supports | {"training"},
    like=BWD_DKDV.name,
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
    """Compute (dq, dk, dv) together; None for gradients that are not wanted."""
    dq = None
    dk, dv, *parts = launch[BWD_ONE_PASS.name](q, k, v, dout, lse, delta, scale)
    if wants_dq:
        empty = allocator(is_cuda=q.is_cuda)
        dq = empty((*q.shape,), strides_like(q, q.shape[3]), q.dtype)
        launch[BWD_DQ_SUM.name](*parts, dq, scale)
    return (dq, dk, dv) if wants_dkdv else (dq, None, None)


ONE_PASS = FamilySpec(
    name="one_pass",
    direction="backward",
    kernels=(BWD_PREPROCESS, BWD_ONE_PASS, BWD_DQ_SUM),
    run=run,
    for_cpus=True,
)
FAMILIES = (ONE_PASS,)
