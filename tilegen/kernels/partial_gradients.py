"""Partial gradients that several programs store in fp32, and the kernel that sums them. The order
of the sum is fixed, so every run gives the same bits. The sum is scaled, not the parts."""

from __future__ import annotations

from tilegen.kernels.arguments import factor
from tilegen.kernels.loops import OverRows
from tilegen.kernels.spec import KernelSpec, Knobs
from tilegen.kernels.tensors import DQ, NOT_WRITTEN, Tensor

TILES = Knobs(block_m=(16, 32, 64, 128), block_n=(16, 32, 64, 128))
"""Tiles of kernels that store parts: no larger than the smallest part."""
_OF_QUERIES = "batch num_heads_q num_splits seqlen_q"
_OF_KEYS = "batch num_heads_kv num_splits seqlen_kv"
_HAS = f": 0 {NOT_WRITTEN.format(part='parts are')}"
PARTIAL_DQ = Tensor("partial_dq", f"{_OF_QUERIES} head_dim_qk", ", not scaled", "fp32")
HAS_DQ = Tensor("has_dq", _OF_QUERIES, _HAS, "fp32")
PARTIAL_DK = Tensor("partial_dk", f"{_OF_KEYS} head_dim_qk", ", not scaled", "fp32")
PARTIAL_DV = Tensor("partial_dv", f"{_OF_KEYS} head_dim_v", "", "fp32")
HAS_DKDV = Tensor("has_dkdv", _OF_KEYS, _HAS, "fp32")

BWD_DQ_SUM = KernelSpec(
    name="bwd_dq_sum",
    template="partial_gradients/attention_bwd_sum.py.jinja",
    title="Attention backward, keys split over programs: dq of all splits together.",
    inputs=(PARTIAL_DQ, HAS_DQ, DQ, factor("softmax_scale")),
    outputs=(DQ,),
    grid=(("seqlen_q", "block_m"), ("num_heads_q", 1), ("batch", 1)),
    loop=OverRows(joins=True),
    checked_by=("dq",),
    knobs=Knobs(block_m=(1, 2, 4, 8, 16), block_n=(2, 4, 8, 16), num_warps=(4,), num_stages=(1,)),
)
