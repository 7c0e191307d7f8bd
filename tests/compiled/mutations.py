"""Ways to break each kernel on purpose: what to replace in its emitted text, and by what.

Each is a mistake that somebody has shipped in some attention kernel. test_mutations.py shows that
the checks every kernel test goes through notice every one of them.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from tilegen import cpu
from tilegen.check.reference import Inputs
from tilegen.check.verification import check
from tilegen.emit.identity import RenderedKernel
from tilegen.errors import WrongResult
from tilegen.kernels.config import Kernel


@dataclass(frozen=True)
class Mutation:
    name: str
    kernel: Kernel
    old: str
    new: str


def noticed(
    kernels: Mapping[Kernel, RenderedKernel], inputs: Inputs, broken: Kernel, **given: Any
) -> bool:
    """Return True where a result is wrong, or the broken kernel uses an address outside of its
    tensor."""

    def executable(rendered: RenderedKernel, device: torch.device) -> ModuleType:
        # Checked builds take three times as long, and the other kernels are not in question.
        return cpu.load(rendered, "bounds" if rendered.kernel == broken else "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "executable", executable)
        try:
            return not all(one.ok for one in check(kernels, inputs, **given))
        except WrongResult:
            return True


def _in_turn(kernels: Sequence[Kernel], *changes: tuple[str, str, str]) -> list[Mutation]:
    """Return changes of text that all of these kernels share, each in one of them."""
    return [
        Mutation(f"{name}-{kernel}", kernel, old, new)
        for kernel, (name, old, new) in zip(itertools.cycle(kernels), changes, strict=False)
    ]


MUTATIONS = [
    # Which pairs count.
    *_in_turn(
        ("fwd", "bwd_dq"),
        ("drop-the-mask", "tl.minimum(q_idx + 1, seqlen_kv)\n", "seqlen_kv\n"),
        ("diagonal-off-by-one", "tl.minimum(q_idx + 1, s", "tl.minimum(q_idx, s"),
        ("ignore-the-end", "tl.minimum(q_idx + 4, seqlen_kv)\n", "q_idx + 4\n"),
    ),
    Mutation("drop-the-mask-dkdv", "bwd_dkdv", "keep = k_idx <= q_idx\n", "keep = k_idx >= 0\n"),
    Mutation("window-edge-off-by-one", "fwd", "q_idx - 20 <= k_idx", "q_idx - 20 < k_idx"),
    Mutation("window-edge-dkdv", "bwd_dkdv", "q_idx - 20 <= k_idx", "q_idx - 21 <= k_idx"),
    # Which tiles are visited, and how.
    *_in_turn(
        ("fwd", "bwd_dq"),
        ("skip-the-last-full-tile", "range(full_lo, full_hi)", "range(full_lo, full_hi - 1)"),
        ("skip-the-last-tile", "tile_hi - full_hi)", "tile_hi - 1 - full_hi)"),
        (
            "diagonal-tile-counted-full",
            "kept_hi = tl.minimum(q_first",
            "kept_hi = tl.minimum(q_last",
        ),
        ("left-edge-tile-counted-full", "kept_lo = q_last", "kept_lo = q_first"),
        ("start-too-late", "tile_lo = live_lo // BLOCK_N", "tile_lo = live_lo // BLOCK_N + 1"),
        ("right-partial-tile-misplaced", "full_hi - num_left + i", "full_hi + i"),
    ),
    Mutation("skip-a-query-tile", "bwd_dkdv", "range(full_lo *", "range((full_lo + 1) *"),
    Mutation("skip-a-group-member", "bwd_dkdv", "head_first + i - step", "head_first + 0 * i"),
    # Which head, which row.
    *_in_turn(
        ("fwd", "bwd_dq"),
        ("wrong-gqa-head", "head // GROUP_SIZE", "head % (num_heads_q // GROUP_SIZE)"),
        ("key-stride-for-values", "v_row = stride_vn", "v_row = stride_kn"),
    ),
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
    Mutation("lse-in-base-2", "fwd", "* LN_2)", "* 1.0)"),
    Mutation("lse-without-the-sum", "fwd", "(m_i + tl.log2(l_safe))", "m_i"),
    Mutation(
        "query-rounded-after-scaling",
        "fwd",
        "s = tl.dot(q, tl.trans(k))",
        "s = tl.dot((q * softmax_scale_log2).to(tl.float16), tl.trans(k)) / softmax_scale_log2",
    ),
    Mutation(  # as tl.float8e5 has them, which the compiler for the CPU does not know
        "weights-in-8-bits",
        "fwd",
        "p.to(tl.float16)",
        "((p.to(tl.int32, bitcast=True) + 0x100000) & -0x200000)"
        ".to(tl.float32, bitcast=True).to(tl.float16)",
    ),
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
    # Kernels that share panels. Those that read one mask it again, for the tiles never written.
    Mutation("drop-the-mask-scores", "fwd_scores", "k_idx <= q_idx", "k_idx <= q_idx + 1"),
    Mutation(
        "tile-counted-full",
        "fwd_scores",
        "kept_hi = tl.minimum(q_first",
        "kept_hi = tl.minimum(q_last",
    ),
    *_in_turn(
        ("fwd_scores", "fwd_values", "bwd_scores", "bwd_rows"),
        *itertools.chain.from_iterable(
            itertools.repeat(change, 2)
            for change in (
                ("other-head", "head = (head_first + slot)", "head = (head_first + 0 * slot)"),
                ("row-of-the-panel", "(q_first - row_first)", "(q_first * 0)"),
                ("wrong-gqa-head", "head // GROUP_SIZE", "head % GROUP_SIZE"),
            )
        ),
    ),
    *_in_turn(
        ("fwd_scores", "fwd_streamed", "bwd_scores"),
        (
            "forget-a-slice",
            "range(0, HEAD_DIM_QK, BLOCK_D)",
            "range(BLOCK_D, HEAD_DIM_QK, BLOCK_D)",
        ),
        (
            "beyond-the-head-dim",
            "d_exists = d_first + offs_d < HEAD_DIM_QK",
            "d_exists = offs_d < 99",
        ),
        ("skip-the-last-tile", "(tile_n >= tile_hi)", "(tile_n >= tile_hi - 1)"),
    ),
    Mutation(
        "no-care-for-empty-rows-scores", "fwd_scores", 'tl.where(m == float("-inf"), 0.0, m)', "m"
    ),
    Mutation("sums-of-other-rows", "fwd_scores", "tl.sum(p, 1)", "tl.max(p, 1)"),
    Mutation(
        "maxima-not-kept",
        "fwd_scores",
        "tl.store(maxima_ptr + note, m,",
        "tl.store(maxima_ptr + note, m * 0.0,",
    ),
    Mutation("weights-not-rescaled", "fwd_values", "w * tl.exp2(m - m_i)[:, None]", "w * 1.0"),
    Mutation(
        "maximum-of-another-tile",
        "fwd_values",
        "BLOCK_N // score_width * num_rows",
        "BLOCK_N // score_width * 0",
    ),
    Mutation("sums-not-rescaled", "fwd_values", "sums * tl.exp2(m - m_safe[:, None])", "sums"),
    Mutation("no-normalisation-values", "fwd_values", "acc / l_safe[:, None]", "acc"),
    Mutation("lse-in-base-2-values", "fwd_values", "* LN_2)", "* 1.0)"),
    Mutation("lse-never-stored", "fwd_values", "tile_d == 0", "tile_d == 99"),
    Mutation(
        "unwritten-tiles-used", "fwd_values", "p = tl.where(keep, ", "p = tl.where(keep | True, "
    ),
    Mutation("lse-taken-for-base-2-scores", "bwd_scores", "other=0.0) * LOG2_E", "other=0.0)"),
    Mutation(
        "delta-forgotten-scores", "bwd_scores", "ds = p * (dp - delta[:, None])", "ds = p * dp"
    ),
    Mutation("weights-are-gradients", "bwd_scores", "tl.store(ds_ptr", "tl.store(weights_ptr"),
    Mutation("carry-forgotten", "bwd_columns", "tl.where(begins == 0", "tl.where(begins == 2"),
    Mutation("ends-too-early", "bwd_columns", "(acc * factor)", "(acc * (1 - begins) * factor)"),
    Mutation("scale-forgotten-columns", "bwd_columns", "(acc * factor)", "(acc * 1.0)"),
    Mutation(
        "panel-not-transposed", "bwd_columns", "part_lo = row_first // BLOCK_M", "part_lo = 0"
    ),
    Mutation(
        "group-member-skipped",
        "bwd_columns",
        "slot = slot_first + i - step * num_slots",
        "slot = slot_first + 0 * i",
    ),
    Mutation(
        "unwritten-tiles-used-columns",
        "bwd_columns",
        "w = tl.where(keep, ",
        "w = tl.where(keep | True, ",
    ),
    Mutation(
        "skip-a-query-tile-columns", "bwd_columns", "range(full_lo *", "range((full_lo + 1) *"
    ),
    Mutation("scale-forgotten-rows", "bwd_rows", "(dq * softmax_scale)", "dq"),
    Mutation(
        "forget-to-rescale-streamed",
        "fwd_streamed",
        "acc = acc * alpha[:, None]",
        "acc = acc * 1.0",
    ),
    Mutation("drop-the-mask-streamed", "fwd_streamed", "k_idx <= q_idx", "k_idx <= q_idx + 1"),
    # Keys split over programs.
    Mutation("drop-the-mask-split", "fwd_split", "k_idx <= q_idx", "k_idx <= q_idx + 1"),
    Mutation(
        "a-tile-less-in-a-split", "fwd_split", "part_hi = part_lo + ", "part_hi = part_lo - 1 + "
    ),
    Mutation(
        "splits-overlap", "fwd_split", "part_lo = split * ", "part_lo = tl.maximum(split, 1) * "
    ),
    Mutation("other-head-split", "fwd_split", "head + offs_m // BLOCK_M", "head + offs_m * 0"),
    Mutation(
        "wrong-gqa-head-split", "fwd_split", "head = head_kv * GROUP_SIZE", "head = head_kv * 1"
    ),
    Mutation(
        "row-of-another-split", "fwd_split", "heads) * num_splits + split", "heads) * num_splits"
    ),
    Mutation("lse-without-the-sum-split", "fwd_split", "m_i + tl.log2(l_safe)", "m_i"),
    Mutation(
        "empty-rows-weigh-split", "fwd_split", "tl.where(empty, NOTHING,", "tl.where(empty, 0.0,"
    ),
    Mutation("a-split-less", "fwd_combine", "offs_n < num_splits", "offs_n < num_splits - 1"),
    Mutation("splits-not-weighed", "fwd_combine", "partial * weights[:, None]", "partial"),
    Mutation("sum-of-splits", "fwd_combine", "tl.sum(weights, 0)", "tl.max(weights, 0)"),
    Mutation("lse-in-base-2-combine", "fwd_combine", "* LN_2)", "* 1.0)"),
    Mutation("no-normalisation-combine", "fwd_combine", "acc / l_safe", "acc"),
    Mutation("unwritten-splits-read", "fwd_combine", "0.0, tl.exp2(lse - m_safe)", "1.0, 1.0"),
    # What streams past a backward split over programs.
    *_in_turn(
        ("bwd_dkdv_split", "bwd_dq_split"),
        ("a-tile-less-in-a-split", "part_hi = part_lo + ", "part_hi = part_lo - 1 + "),
        ("splits-overlap", "part_lo = split * ", "part_lo = tl.maximum(split, 1) * "),
        ("row-of-another-split", "num_splits + split)", "num_splits)"),
        ("empty-splits-count", "part_rows, tl.zeros(", "part_rows, 1.0 + tl.zeros("),
        ("no-split-counts", "], 1.0, tl.float32), mask", "], 0.0, tl.float32), mask"),
    ),
    Mutation("other-split-of-queries", "bwd_dkdv_split", "num_tiles % num_splits", "num_tiles % 2"),
    Mutation(
        "other-head-of-the-group",
        "bwd_dq_split",
        "num_tiles % GROUP_SIZE\n",
        "num_tiles % GROUP_SIZE * 0\n",
    ),
    Mutation("wrong-group", "bwd_dq_split", "head = group * GROUP_SIZE", "head = group * 1"),
    Mutation("dv-for-dk", "bwd_dkdv_split", "partial_dv_ptr + part_at", "partial_dk_ptr + part_at"),
    *_in_turn(
        ("bwd_dkdv_sum", "bwd_dq_sum"),
        ("a-split-less", "split < num_splits", "split < num_splits - 1"),
        ("the-first-splits-only", "range(0, num_splits, BLOCK_N)", "range(0, 1, BLOCK_N)"),
        ("last-of-the-splits", " += tl.sum(", " = tl.sum("),
        ("unwritten-splits-added", "other=0.0) != 0.0", "other=0.0) > -1.0"),
        ("rows-of-a-tile-mixed", "offs % BLOCK_M", "offs % BLOCK_M * 0"),
    ),
    Mutation("scale-forgotten-sum-of-dk", "bwd_dkdv_sum", "(dk * softmax_scale)", "dk"),
    Mutation("scale-forgotten-sum-of-dq", "bwd_dq_sum", "(dq * softmax_scale)", "dq"),
    Mutation("sums-swapped", "bwd_dkdv_sum", "tl.load(partial_dv_ptr", "tl.load(partial_dk_ptr"),
    # A backward in one pass.
    *(
        Mutation(f"{name}-one-pass", "bwd_one_pass", old, new)
        for name, old, new in (
            (
                "a-tile-of-keys-less",
                "cdiv(seqlen_kv, BLOCK_N), num",
                "cdiv(seqlen_kv, BLOCK_N) - 1, num",
            ),
            ("shares-overlap", "range(share, ", "range(tl.maximum(share, 1) - 1, "),
            ("dq-of-another-share", "num_shares + share) * seqlen_q", "num_shares) * seqlen_q"),
            ("dq-of-another-head", "GROUP_SIZE + head) * num_shares", "GROUP_SIZE) * num_shares"),
            (
                "dq-not-added-up",
                "tl.trans(ds.to(tl.float16)), k, dq",
                "tl.trans(ds.to(tl.float16)), k, dq * 0.0",
            ),
            ("dq-not-zero-at-first", "nothing = tl.zeros(", "nothing = 1.0 + tl.zeros("),
            ("no-share-counts", "tl.full([BLOCK_M], 1.0", "tl.full([BLOCK_M], 0.0"),
            ("dq-from-weights", "tl.trans(ds.to(", "tl.trans(p.to("),
            ("keys-beyond-the-end-kept", "& k_exists[:, None]\n", "\n"),
            (
                "a-query-tile-of-dq-less",
                "range(0, tl.cdiv(seqlen_q, BLOCK_M))",
                "range(1, tl.cdiv(seqlen_q, BLOCK_M))",
            ),
        )
    ),
]

CHANGED = [
    # Masks of several ranges, with tensors, and of lists.
    Mutation("skip-a-full-tile", "fwd", "range(0, num_full)", "range(0, num_full - 1)"),
    Mutation("skip-a-partial-tile", "fwd", "range(0, num_partial)", "range(1, num_partial)"),
    Mutation("values-beyond-the-end", "bwd_dkdv", "t2_ptr + k_idx,", "t2_ptr + k_idx + 1,"),
    Mutation("list-of-another-tile", "fwd", "entry = (head * tiles_sh + ", "entry = (0 * head + "),
    Mutation("list-of-another-head", "bwd_dkdv", "head * tiles_sh", "head_first * tiles_sh"),
    Mutation(
        "full-and-partial-mixed", "fwd", "tiles_ptr + full_at + i", "tiles_ptr + partial_at + i"
    ),
    Mutation("tree-counted-full", "fwd", "kept_hi = seqlen_kv - seqlen_q", "kept_hi = seqlen_kv"),
    Mutation("tree-of-another-token", "fwd", "k_idx + seqlen_q - s", "k_idx + seqlen_q - 1 - s"),
    Mutation(
        "tree-transposed",
        "fwd",
        "(batch * t0_n1 + q_idx) * t0_n2 + m0",
        "(batch * t0_n1 + m0) * t0_n2 + q_idx",
    ),
    Mutation("tree-of-the-first-request", "fwd", "(batch * t0_n1 + q_idx)", "(q_idx)"),
    Mutation(
        "last-token-before-the-tree", "fwd", "k_idx < seqlen_kv - s", "k_idx < seqlen_kv - 1 - s"
    ),
    Mutation(
        "prefix-dropped-dkdv", "bwd_dkdv", "(k_idx < seqlen_kv - seqlen_q) |", "(k_idx < 0) |"
    ),
    # Scores.
    Mutation("not-scaled", "fwd", "s *= softmax_scale\n", "s *= 1.0\n"),
    Mutation("not-in-base-2", "fwd", "(s - m_safe[:, None]) * LOG2_E", "(s - m_safe[:, None])"),
    Mutation("slope-forgotten", "bwd_dq", "ds * slope", "ds"),
    Mutation("slope-forgotten-dkdv", "bwd_dkdv", "ds * slope", "ds"),
    Mutation("score-of-another-head", "fwd", "head * c0_n1", "head // 2 * c0_n1"),
    Mutation("score-of-another-head-dkdv", "bwd_dkdv", "head * c0_n1", "head // 2 * c0_n1"),
    Mutation("indices-swapped", "bwd_dkdv", "k_idx - q_idx", "q_idx - k_idx"),
    Mutation(
        "sink-forgotten", "fwd", "l_i = tl.full([BLOCK_M], 1.0", "l_i = tl.full([BLOCK_M], 0.0"
    ),
    Mutation(
        "sink-not-in-base-2",
        "fwd",
        "tl.load(sinks_ptr + head) * LOG2_E",
        "tl.load(sinks_ptr + head)",
    ),
    Mutation("sink-of-another-head", "fwd", "sinks_ptr + head)", "sinks_ptr + head_kv)"),
    # Dropout.
    Mutation("nothing-is-dropped", "fwd", "p *= times", "p *= 1.0"),
    Mutation("sum-of-what-is-left", "fwd", "share > 0.0, 1.0 / share", "share > 0.0, 1.0"),
    Mutation("heads-drop-alike", "fwd", "offset, batch * num_heads_q + head", "offset, batch"),
    Mutation("tiles-drop-alike", "fwd", "head, q_first, tile_n * BLOCK_N", "head, q_first, 0"),
    Mutation("another-offset", "fwd", "offset = tl.load(dropout_ptr + 1)", "offset = seed"),
    Mutation("words-swapped", "bwd_dkdv", "first_column, c, d", "first_column, d, c"),
    Mutation("weights-not-dropped", "bwd_dkdv", "p_left = p * times", "p_left = p"),
    Mutation("gradients-not-dropped", "bwd_dkdv", "dp *= times", "dp *= 1.0"),
    Mutation("gradients-not-dropped-dq", "bwd_dq", "dp *= times", "dp *= 1.0"),
    Mutation("panel-not-dropped", "bwd_scores", "(p * times)", "(p * 1.0)"),
    Mutation("gradients-not-dropped-scores", "bwd_scores", "dp *= times", "dp *= 1.0"),
    Mutation("panel-not-dropped-fwd", "fwd_scores", "p *= times", "p *= 1.0"),
    Mutation("streamed-not-dropped", "fwd_streamed", "p *= times", "p *= 1.0"),
]
"""The same for masks, scores and dropout, which bring code of their own."""
