"""Partial gradients that several programs store in fp32, and the kernel that sums them. The order
of the sum is fixed, so every run gives the same bits. The sum is scaled, not the parts."""

from __future__ import annotations

from tilegen.kernels.arguments import Argument, Line, factor, pointers, sizes, strides
from tilegen.kernels.loops import OverRows
from tilegen.kernels.results import NOT_WRITTEN
from tilegen.kernels.spec import KernelSpec, Knobs, read, write

TILES = Knobs(block_m=(16, 32, 64, 128), block_n=(16, 32, 64, 128))
"""Tiles of kernels that store parts: no larger than the smallest part."""
PARTS_OF_QUERIES = {"partial_dq": ("q", "k", "q"), "has_dq": ("q", "k")}
_HAS = f"fp32: 0 {NOT_WRITTEN.format(part='parts are')}"
NOTES = {
    "partial_dq": "(batch, heads, splits, seqlen_q, head_dim_qk), fp32, not scaled",
    "has_dq": f"(batch, heads, splits, seqlen_q), {_HAS}",
    "partial_dk": "(batch, heads_kv, splits, seqlen_kv, head_dim_qk), fp32, not scaled",
    "partial_dv": "(batch, heads_kv, splits, seqlen_kv, head_dim_v), fp32",
    "has_dkdv": f"(batch, heads_kv, splits, seqlen_kv), {_HAS}",
}


def sizes_of_sum(names: str, tensor: str, *, splits_of: str) -> Line:
    """Return the sizes that a kernel needs to sum parts."""
    count = Argument("num_splits", "i32", splits_of, "size", 2)
    return Line((*sizes(names, tensor).arguments, count))


BWD_DQ_SUM = KernelSpec(
    name="bwd_dq_sum",
    template="partial_gradients/attention_bwd_sum.py.jinja",
    title="Attention backward, keys split over programs: dq of all splits together.",
    given=(*PARTS_OF_QUERIES, "dq", "softmax_scale"),
    made=(),
    notes=NOTES,
    lines=(
        pointers(*PARTS_OF_QUERIES, "dq", fp32=PARTS_OF_QUERIES),
        strides("dq", "batch, head and row strides"),
        sizes_of_sum("num_heads_q seqlen_q", "dq", splits_of="has_dq"),
        factor("softmax_scale"),
    ),
    grid=(("seqlen_q", "block_m"), ("num_heads_q", 1), ("batch", 1)),
    loop=OverRows(works_on=("dq",), joins=True),
    traffic=(
        read("has_dq", "g*N_q*n_s", fp32=True),
        read("partial_dq", "g*W_s*d_qk", fp32=True),
        write("dq", "g*N_q*d_qk"),
    ),
    floor=(write("dq", "g*N_q*d_qk"),),
    shows=("dq",),
    knobs=Knobs(block_m=(1, 2, 4, 8, 16), block_n=(2, 4, 8, 16), num_warps=(4,), num_stages=(1,)),
)
