"""Forward for Hopper, whose warpgroups have roles: one loads, each other one computes 64 query
rows. The schedule of FlashAttention-3 (Shah et al., arXiv 2407.08608)."""

from __future__ import annotations

from tilegen.kernels.arguments import SCALE_IN_BASE_2, sizes
from tilegen.kernels.config import ROWS_OF_GROUP
from tilegen.kernels.loops import Whole
from tilegen.kernels.q_stationary import one_launch
from tilegen.kernels.spec import FamilySpec, KernelSpec, Knobs
from tilegen.kernels.tensors import LSE, OUT, K, Q, V

FWD_HOPPER = KernelSpec(
    name="fwd_hopper",
    template="hopper_forward/attention_fwd_hopper.py.jinja",
    title="Attention forward for Hopper: out and lse. One warpgroup loads, the others compute.",
    inputs=(Q, K, V, SCALE_IN_BASE_2),
    outputs=(OUT, LSE),
    own_sizes=sizes("batch num_heads_q seqlen_q seqlen_kv", (Q, K)),
    grid=(("seqlen_q", "block_m"), ("num_heads_q", 1), ("batch", 1)),
    loop=Whole(products=("qk", "v"), score_tiles=1),
    checked_by=("out", "lse"),
    described=("q", "k", "v", "out"),
    knobs=Knobs(
        block_m=(2 * ROWS_OF_GROUP, 3 * ROWS_OF_GROUP),
        block_n=(64, 128),
        num_warps=(8, 12),
        num_stages=(2, 3, 4),
    ),
    supports=frozenset({"scores", "sinks"}),
    requires=("sm_90",),
    specialised=True,
    persists=True,
    head_dims=((64, 64), (128, 128), (192, 128), (256, 256)),
)

HOPPER_FORWARD = FamilySpec(
    name="hopper_forward",
    direction="forward",
    kernels=(FWD_HOPPER,),
    run=one_launch(FWD_HOPPER),
    by_record=True,
)

FAMILIES = (HOPPER_FORWARD,)
