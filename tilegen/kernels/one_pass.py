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

from tilegen.kernels.arguments import pointers
from tilegen.kernels.config import SPLITS
from tilegen.kernels.layout import empty_like
from tilegen.kernels.panels import Launch
from tilegen.kernels.partial_gradients import BWD_DQ_SUM, NOTES, PARTS_OF_QUERIES, TILES
from tilegen.kernels.spec import FamilySpec, read, write
from tilegen.kernels.two_pass import BWD_DKDV, BWD_PREPROCESS, INPUTS, READ_ONCE

if TYPE_CHECKING:
    import torch

BWD_ONE_PASS = replace(
    BWD_DKDV,
    name="bwd_one_pass",
    template="one_pass/attention_bwd_one_pass.py.jinja",
    title="Attention backward in one pass: dk and dv, and dq of each share of the keys.",
    made=(*BWD_DKDV.made, *PARTS_OF_QUERIES),
    parts=PARTS_OF_QUERIES,
    notes={
        **NOTES,
        "partial_dq": NOTES["partial_dq"].replace("splits", "shares"),
        "has_dq": "(batch, heads, shares, seqlen_q), fp32: 1",
    },
    lines=(
        pointers(*INPUTS, "dk", "dv", *PARTS_OF_QUERIES, fp32=PARTS_OF_QUERIES),
        *BWD_DKDV.lines[1:],
    ),
    grid=(("seqlen_kv", "split_kv"), ("num_heads_kv", 1), ("batch", 1)),
    loop=replace(
        BWD_DKDV.loop,
        products=("qk", "v", "v", "qk", "qk"),  # S, dP; dV += P^T dO, dK += dS^T Q, dQ += dS K
        shares=True,
    ),
    traffic=(
        *BWD_DKDV.traffic,
        write("partial_dq", "g*W_s*d_qk", fp32=True),  # zeros
        write("has_dq", "g*W_s", fp32=True),
        read("partial_dq", "g*V_q*d_qk", fp32=True),
        write("partial_dq", "g*V_q*d_qk", fp32=True),
    ),
    floor=(
        *READ_ONCE,
        write("dk", "N_kv*d_qk"),
        write("dv", "N_kv*d_v"),
        write("partial_dq", "g*N_q*d_qk", fp32=True),
    ),
    shows=("dq", "dk", "dv", "dt"),
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
        dq = empty_like(q, q.shape[3])
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
