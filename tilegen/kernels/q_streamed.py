"""Forward for head dims that no tile holds: outputs stay on chip, slices of the queries stream past
again with every tile of keys."""

from __future__ import annotations

from tilegen.kernels.q_stationary import ARGUMENTS, FLOOR, one_launch
from tilegen.kernels.spec import FamilySpec, KernelSpec, Knobs, Sliced, read, write

FWD_STREAMED = KernelSpec(
    name="fwd_streamed",
    template="q_streamed/attention_fwd_streamed.py.jinja",
    title="Attention forward, head dim streamed: out and lse.",
    given=("q", "k", "v", "softmax_scale"),
    made=("out", "lse"),
    lines=ARGUMENTS,
    grid=(("seqlen_q", "block_m"), ("num_heads_q", 1), ("batch", 1)),
    loop=Sliced(rows="block_m", columns="block_n", depth="block_d", slices=("qk",), loops=True),
    traffic=(
        read("q", "g*W_q*d_qk"),
        read("k", "g*V_kv*d_qk"),
        read("v", "g*V_kv*d_v"),
        write("out", "g*N_q*d_v"),
        write("lse", "g*N_q", fp32=True),
    ),
    floor=FLOOR,
    shows=("out", "lse"),
    knobs=Knobs(block_m=(16, 32, 64, 128), block_n=(16, 32, 64), block_d=(32, 64, 128)),
    computes_scores=True,
    drops=True,
    has_sinks=True,
)


Q_STREAMED = FamilySpec(
    name="q_streamed",
    direction="forward",
    kernels=(FWD_STREAMED,),
    run=one_launch(FWD_STREAMED),
    large_heads_only=True,
)
