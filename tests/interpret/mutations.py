"""Ways to break each kernel on purpose: what to replace in its emitted text, and by what.

Each is a mistake that somebody has shipped in some attention kernel. test_mutations.py shows that
the checks every kernel test goes through notice every one of them.
"""

from dataclasses import dataclass

from tilegen.config import Kernel


@dataclass(frozen=True)
class Mutation:
    name: str
    kernel: Kernel
    old: str
    new: str


def _everywhere(name: str, old: str, new: str) -> list[Mutation]:
    return [Mutation(f"{name}-{kernel}", kernel, old, new) for kernel in ("fwd", "bwd_dq")]


MUTATIONS = [
    # Which pairs count.
    *_everywhere("drop-the-mask", "keep &= (k_idx <= q_idx)\n", "keep &= k_idx >= 0\n"),
    *_everywhere("diagonal-off-by-one", "keep &= (k_idx <= q_idx)\n", "keep &= (k_idx < q_idx)\n"),
    *_everywhere("ignore-the-end", "keep = k_exists[None, :]\n", "keep = offs_n[None, :] >= 0\n"),
    Mutation(
        "drop-the-mask-dkdv", "bwd_dkdv", "keep &= (k_idx <= q_idx)\n", "keep &= k_idx >= 0\n"
    ),
    Mutation("window-edge-off-by-one", "fwd", "(q_idx - 20 <= k_idx)", "(q_idx - 20 < k_idx)"),
    Mutation("window-edge-dkdv", "bwd_dkdv", "(q_idx - 20 <= k_idx)", "(q_idx - 21 <= k_idx)"),
    # Which tiles are visited, and how.
    *_everywhere(
        "skip-the-last-full-tile", "range(full_lo, full_hi)", "range(full_lo, full_hi - 1)"
    ),
    *_everywhere("skip-the-last-tile", "tile_hi - full_hi)", "tile_hi - 1 - full_hi)"),
    *_everywhere(
        "diagonal-tile-counted-full", "kept_hi = tl.minimum(q_first", "kept_hi = tl.minimum(q_last"
    ),
    *_everywhere("left-edge-tile-counted-full", "kept_lo = q_last", "kept_lo = q_first"),
    *_everywhere(
        "start-too-late", "tile_lo = live_lo // BLOCK_N", "tile_lo = live_lo // BLOCK_N + 1"
    ),
    *_everywhere("right-partial-tile-misplaced", "full_hi - num_left + i", "full_hi + i"),
    Mutation("skip-a-query-tile", "bwd_dkdv", "range(full_lo *", "range((full_lo + 1) *"),
    Mutation("skip-a-group-member", "bwd_dkdv", "head_first + i - step", "head_first + 0 * i"),
    # Which head, which row.
    *_everywhere("wrong-gqa-head", "head // GROUP_SIZE", "head % (num_heads_q // GROUP_SIZE)"),
    *_everywhere("key-stride-for-values", "v_row = stride_vn", "v_row = stride_kn"),
    Mutation("wrong-head-dkdv", "bwd_dkdv", "head_kv * GROUP_SIZE", "head_kv"),
    Mutation("query-stride-for-dout", "bwd_dkdv", "dout_row = stride_dom", "dout_row = stride_qm"),
    # The online softmax.
    Mutation("forget-to-rescale-acc", "fwd", "acc = acc * alpha[:, None]", "acc = acc * 1.0"),
    Mutation("forget-to-rescale-sum", "fwd", "l_i = l_i * alpha +", "l_i = l_i +"),
    Mutation(
        "no-care-for-empty-rows", "fwd", 'tl.where(m_new == float("-inf"), 0.0, m_new)', "m_new"
    ),
    Mutation("divide-by-an-empty-sum", "fwd", "l_safe = tl.where(empty, 1.0, l_i)", "l_safe = l_i"),
    Mutation("no-normalisation", "fwd", "acc / l_safe[:, None]", "acc"),
    Mutation("natural-exponent", "fwd", "softmax_scale * math.log2(math.e)", "softmax_scale"),
    Mutation("lse-in-base-2", "fwd", "* LN_2)", "* 1.0)"),
    Mutation("lse-without-the-sum", "fwd", "(m_i + tl.log2(l_safe))", "m_i"),
    Mutation(
        "query-rounded-after-scaling",
        "fwd",
        "s = tl.dot(q, tl.trans(k))",
        "s = tl.dot((q * softmax_scale_log2).to(tl.float16), tl.trans(k)) / softmax_scale_log2",
    ),
    Mutation("weights-in-8-bits", "fwd", "p.to(tl.float16)", "p.to(tl.float8e5).to(tl.float16)"),
    # The gradients.
    Mutation(
        "delta-in-fp16", "bwd_preprocess", "out.to(tl.float32) * dout.to(tl.float32)", "out * dout"
    ),
    Mutation("delta-of-itself", "bwd_preprocess", "* dout.to(tl.float32)", "* out.to(tl.float32)"),
    Mutation(
        "lse-taken-for-base-2", "bwd_dkdv", "q_exists, other=0.0) * LOG2_E", "q_exists, other=0.0)"
    ),
    Mutation("lse-taken-for-base-2-dq", "bwd_dq", "other=0.0) * LOG2_E", "other=0.0)"),
    Mutation("delta-forgotten", "bwd_dkdv", "ds = p * (dp - delta[None, :])", "ds = p * dp"),
    Mutation("delta-forgotten-dq", "bwd_dq", "ds = p * (dp - delta[:, None])", "ds = p * dp"),
    Mutation("scale-forgotten-dk", "bwd_dkdv", "(dk * softmax_scale)", "dk"),
    Mutation("scale-forgotten-dq", "bwd_dq", "(dq * softmax_scale)", "dq"),
    Mutation("empty-rows-weigh", "bwd_dkdv", "p = tl.where(keep, ", "p = tl.where(keep | True, "),
    Mutation("empty-rows-weigh-dq", "bwd_dq", "p = tl.where(keep, ", "p = tl.where(keep | True, "),
    Mutation("dv-from-unrounded-scores", "bwd_dkdv", "dv = tl.dot(p.to", "dv = tl.dot(s.to"),
]
