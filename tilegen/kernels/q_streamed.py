"""Forward for head dims that no tile holds: outputs stay on chip, and slices of the queries are
streamed again for every tile of keys."""

from __future__ import annotations

from dataclasses import replace

from tilegen.kernels.loops import Sliced
from tilegen.kernels.q_stationary import FWD, one_launch
from tilegen.kernels.spec import FamilySpec, Knobs

FWD_STREAMED = replace(
    FWD,
    name="fwd_streamed",
    template="q_streamed/attention_fwd_streamed.py.jinja",
    title="Attention forward, head dim streamed: out and lse.",
    loop=Sliced(rows="block_m", columns="block_n", depth="block_d", slices=("qk",), loops=True),
    described=(),
    supports=FWD.supports - {"aliases"},
    knobs=Knobs(block_m=(16, 32, 64, 128), block_n=(16, 32, 64), block_d=(32, 64, 128)),
)


Q_STREAMED = FamilySpec(
    name="q_streamed",
    direction="forward",
    kernels=(FWD_STREAMED,),
    run=one_launch(FWD_STREAMED),
    large_heads_only=True,
)

FAMILIES = (Q_STREAMED,)
