"""Cases in which other libraries have given wrong numbers without a word, as far as masks go.

Broadcast mask dims, lengths that are no multiple of a tile, rows that lose whole tiles, keys that
are not contiguous, masks longer than the sequence, odd group sizes, decoding, rows without keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import cycle

import pytest
import torch

import tilegen
from tests.support.mask_zoo import Judged
from tilegen.check.reference import attention_reference, dense_mask, make_inputs
from tilegen.check.verification import check, require, run
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.masks import (
    Mask,
    block_sparse,
    causal,
    dilated,
    documents,
    from_bool,
    full,
    global_tokens,
    kv_lengths,
    predicate,
    prefix_lm,
    sliding_window,
    values,
)
from tilegen.masks.usual import kv_prefix
from tilegen.problem import AttentionProblem

pytestmark = pytest.mark.portable

WHOLE_HEADS: dict[Kernel, TileConfig] = {
    "fwd": TileConfig(block_m=32, block_n=32),
    "bwd_preprocess": TileConfig(block_m=64, block_n=16),
    "bwd_dkdv": TileConfig(block_m=32, block_n=32),
    "bwd_dq": TileConfig(block_m=64, block_n=32),
}
SMALL_CACHE: dict[Kernel, TileConfig] = {
    "fwd_scores": TileConfig(block_m=32, block_n=64, block_d=32),
    "fwd_values": TileConfig(block_m=64, block_n=32, block_d=32),
    "bwd_preprocess": TileConfig(block_m=64, block_n=16),
    "bwd_scores": TileConfig(block_m=64, block_n=32, block_d=32),
    "bwd_columns": TileConfig(block_m=32, block_n=32, block_d=32),
    "bwd_rows": TileConfig(block_m=64, block_n=32, block_d=32),
}
STREAMED: dict[Kernel, TileConfig] = {
    "fwd_streamed": TileConfig(block_m=32, block_n=32, block_d=32)
}
FAMILIES = {"whole_heads": WHOLE_HEADS, "small_cache": SMALL_CACHE, "streamed": STREAMED}


def in_turns(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of a name and a family: whole heads for each name, and the others in turns."""
    named = list(names)
    others = cycle(("small_cache", "streamed"))
    return [(name, "whole_heads") for name in named] + list(zip(named, others, strict=False))


def problem(
    mask: Mask, seqlen_q: int, seqlen_kv: int, *, batch: int = 1, heads: int = 2, heads_kv: int = 1
) -> AttentionProblem:
    return AttentionProblem(
        batch=batch,
        num_heads_q=heads,
        num_heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim_qk=16,
        head_dim_v=16,
        dtype="fp32",
        mask=mask,
    )


def found(
    what: AttentionProblem, configs: Mapping[Kernel, TileConfig] = WHOLE_HEADS
) -> dict[str, torch.Tensor]:
    kernels = {kernel: render(what, config, kernel) for kernel, config in configs.items()}
    return run(kernels, make_inputs(what), 0.25)


def agrees(
    what: AttentionProblem,
    keep: torch.Tensor | None = None,
    configs: Mapping[Kernel, TileConfig] = WHOLE_HEADS,
) -> None:
    """Compare with the reference, which computes with `keep` where that is given."""
    kernels = {kernel: render(what, config, kernel) for kernel, config in configs.items()}
    judged = what.mask if keep is None else Judged(what.mask, keep)
    require(check(kernels, make_inputs(what), mask=judged))


# --------------------------------------------------------------------------------------------------
# Sizes


@pytest.mark.parametrize(
    "sizes, expanded",
    [
        *(((), True), ((1,), False), ((2,), True), ((1, 1), True)),
        *(((3, 1), False), ((3, 1), True), ((1, 2), False), ((3, 2), False)),
    ],
    ids=str,
)
def test_mask_dims_are_broadcast(sizes: tuple[int, ...], expanded: bool) -> None:
    generator = torch.Generator().manual_seed(len(sizes))
    keep = torch.rand((*sizes, 20, 33), generator=generator) < 0.3
    whole = keep.expand(3, 2, 20, 33)
    mask = from_bool(whole if expanded else keep)  # expanded: of stride 0
    agrees(problem(mask, 20, 33, batch=3), whole)


FORMS: dict[str, Mask] = {
    "one range": causal() & sliding_window(20),
    "several ranges": global_tokens(3) | sliding_window(9, 9),
    "lists": causal() & (dilated(3) | kv_prefix(2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_lengths_that_are_no_multiple_of_a_tile(name: str) -> None:
    for seqlen_q, seqlen_kv in ((1, 1), (1, 17), (15, 33), (33, 31), (64, 64)):
        agrees(problem(FORMS[name], seqlen_q, seqlen_kv))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [
        sliding_window(4095, 4095),
        prefix_lm(1000),
        global_tokens(999),
        kv_lengths([500]),
        block_sparse(torch.ones(40, 40, dtype=torch.bool), 16),
        from_bool(torch.ones(3000, 200, dtype=torch.bool)),
        prefix_lm(values(2**29, "")),
    ],
    ids=lambda mask: str(mask)[:20],
)
def test_a_mask_longer_than_the_sequence_is_cut(mask: Mask) -> None:
    what = problem(mask, 50, 33)
    agrees(what, torch.ones(50, 33, dtype=torch.bool))
    whole = found(replace(what, mask=full()))
    torch.testing.assert_close(found(what)["out"], whole["out"])


@pytest.mark.slow
@pytest.mark.parametrize("group, seqlen_q", [(3, 20), (5, 1), (7, 20)])
def test_odd_group_sizes_with_a_mask_for_each_head(group: int, seqlen_q: int) -> None:
    heads = group
    sides = [(7 * i) % 23 for i in range(heads)]
    keep = torch.tensor(
        [
            [[q + 20 - sides[h] <= k <= q + 20 for k in range(40)] for q in range(seqlen_q)]
            for h in range(heads)
        ]
    )
    wide = predicate(lambda b, h, q, k: (q + 20 - (7 * h) % 23 <= k) & (k <= q + 20))
    masks = [wide, from_bool(keep)]
    if seqlen_q == 20:
        masks[0] = sliding_window(values(sides, "h"), 0, "bottom_right")
    for mask in masks:
        agrees(problem(mask, seqlen_q, 40, heads=heads), keep[None])


@pytest.mark.slow
def test_decoding_with_a_length_for_each_batch() -> None:
    """One kernel, as the cache grows."""
    for length in (1, 16, 33, 60):
        lengths = [length, 1 + length // 2, 0]
        keep = torch.tensor([[[[k < n for k in range(60)]]] for n in lengths])
        agrees(problem(kv_lengths(lengths) & causal("bottom_right"), 1, 60, batch=3), keep)


# --------------------------------------------------------------------------------------------------
# Rows and columns that keep nothing


EMPTY_ROWS: dict[str, Mask] = {
    "one range": causal("bottom_right"),  # rows 0..27
    "several ranges": (causal() & sliding_window(5)) | (kv_prefix(0) & global_tokens(50)),
    "a range by batch": kv_lengths([0, 48]),
    "lists": block_sparse(torch.tensor([[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 1]]) > 0, 20),
    "look-ups": predicate(lambda b, h, q, k: torch.tensor([-1, 2, -1])[q // 32] == k // 16),
    "documents": documents([i // 20 for i in range(76)]) & ~sliding_window(19, 19),
    "nothing": ~full(),
    "nothing, in lists": dilated(2) & kv_prefix(0),
}


@pytest.mark.parametrize("name, family", in_turns(EMPTY_ROWS))
def test_rows_without_keys_are_exactly_empty(name: str, family: str) -> None:
    """Out 0, lse -inf, gradients 0, nothing that is not a number; as with 301 rows and 190 keys."""
    mask = EMPTY_ROWS[name]
    length = 76 if name == "documents" else 48
    what = problem(mask, 76, length, batch=2 if name == "a range by batch" else 1)
    batch = what.batch
    results = found(what, FAMILIES[family])
    keep = dense_mask(mask, 76, length, batch=batch, heads=2).expand(batch, 2, 76, length)
    rows, columns = ~keep.any(3), ~keep.any(1).any(1)
    assert rows.any()
    assert (results["out"][rows] == 0).all()
    assert (results["lse"][rows] == float("-inf")).all()
    assert results["lse"][~rows].isfinite().all()
    if "dq" in results:
        assert (results["dq"][rows] == 0).all()
        assert (results["dk"][:, 0][columns] == 0).all()
        assert (results["dv"][:, 0][columns] == 0).all()
    assert all(tensor.isfinite().all() for name, tensor in results.items() if name != "lse")


LOSING: dict[str, Mask] = {
    "one range": sliding_window(3),  # of 32 rows, most lose the first tile that is visited
    "several ranges": ~sliding_window(40, 0),
    "lists": causal() & block_sparse(torch.tensor([[1, 0], [0, 1]]) > 0, 50) & ~kv_prefix(7),
    "modular": causal() & predicate(lambda b, h, q, k: k % 32 >= 20),
}


@pytest.mark.parametrize("name, family", in_turns(LOSING))
def test_rows_that_lose_whole_tiles(name: str, family: str) -> None:
    agrees(problem(LOSING[name], 76, 76), configs=FAMILIES[family])


# --------------------------------------------------------------------------------------------------
# Tensors


@pytest.mark.parametrize(
    "mask",
    [documents([0] * 9 + [1] * 31), documents([i % 3 for i in range(40)])],
    ids=["ranges", "lists"],
)
def test_gradients_of_keys_that_are_not_contiguous(mask: Mask) -> None:
    """Heads inside of rows, a stride between rows, and a last dimension that is not dense."""
    x = make_inputs(problem(mask, 40, 40, heads=4, heads_kv=2))
    q, k, v = x.q, x.k, x.v
    expected_q, expected_k, expected_v = (t.clone().requires_grad_() for t in (q, k, v))
    out, _ = attention_reference(expected_q, expected_k, expected_v, mask=mask)
    expected = torch.autograd.grad(out, (expected_q, expected_k, expected_v), x.dout)
    views = [
        k.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([k, k], 3)[:, :, :, 0],
        k.mT.contiguous().mT,
    ]
    for view in views:
        leaf = view.detach().requires_grad_()
        assert not leaf.is_contiguous()
        ours = tilegen.attention(expected_q, leaf, expected_v, mask=mask)
        torch.testing.assert_close(ours, out, atol=2e-5, rtol=2e-5)
        gradients = torch.autograd.grad(ours, (expected_q, leaf, expected_v), x.dout)
        for left, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(left, other, atol=2e-5, rtol=2e-5)


def test_lists_follow_a_layout_that_is_changed_in_place() -> None:
    layout = torch.eye(3, dtype=torch.bool)
    mask = block_sparse(layout, 16)
    before = dense_mask(mask, 48, 48).clone()
    agrees(problem(mask, 48, 48), before)
    layout.logical_not_()
    agrees(problem(mask, 48, 48), ~before)


@pytest.mark.slow
def test_masked_values_cannot_leak() -> None:
    """Dropped keys may hold anything finite: in visited tiles, skipped tiles and beyond the end."""
    ids, mixed = [0] * 21 + [1] * 19, [i % 2 for i in range(40)]
    for mask in (
        documents(ids) & kv_prefix(21),
        documents(mixed) & kv_prefix(21),
        kv_lengths([21]),
    ):
        what = problem(mask, 40, 40)
        inputs = make_inputs(what)
        kernels = {kernel: render(what, config, kernel) for kernel, config in WHOLE_HEADS.items()}
        before = run(kernels, inputs, 0.2, mask=mask)
        inputs.k[:, :, 21:] = 1e18
        inputs.v[:, :, 21:] = -1e18
        after = run(kernels, inputs, 0.2, mask=mask)
        assert all(torch.equal(before[name], after[name]) for name in ("out", "lse", "dq"))
