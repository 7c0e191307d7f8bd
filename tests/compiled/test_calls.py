"""Other ways to call: dilated masks regrouped, packed sequences, nested tensors, FlexAttention's
signature. Against the reference, forward and backward."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import tilegen
from tests.support.inputs import BIASES, MASKS, SCORES, refused_by_attention
from tilegen.check.reference import attention_reference
from tilegen.errors import InvalidProblem
from tilegen.masks import Mask
from tilegen.masks.score import Score
from tilegen.runtime import dispatch, plans


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).requires_grad_()


def require_same(
    tensor: torch.Tensor, expected: torch.Tensor, leaves: Sequence[torch.Tensor]
) -> None:
    weight = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad((tensor * weight).sum(), leaves)
    theirs = torch.autograd.grad((expected * weight).sum(), leaves)
    for left, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, other, rtol=1e-5, atol=1e-5)


DILATED = [
    tilegen.dilated(4),
    tilegen.causal() & tilegen.dilated(3),
    tilegen.sliding_window(20, 7) & tilegen.dilated(5),
]


@pytest.mark.any_triton
@pytest.mark.parametrize("mask", DILATED, ids=str)
@pytest.mark.parametrize("lengths", [(60, 60), (61, 61), (40, 83)])
def test_dilated_masks_regroup_rows_and_columns(
    mask: Mask, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[Any] = []
    kernels = dispatch.Kernels
    monkeypatch.setattr(
        dispatch,
        "Kernels",
        lambda problem, *rest: problems.append(problem) or kernels(problem, *rest),
    )
    plans.forget()
    seqlen_q, seqlen_kv = lengths
    q, k, v = leaf(2, 4, seqlen_q, 16), leaf(2, 2, seqlen_kv, 16), leaf(2, 2, seqlen_kv, 16, seed=1)
    out, lse = tilegen.attention(q, k, v, mask=mask, return_lse=True)
    expected, expected_lse = attention_reference(q, k, v, mask=mask)
    require_same(out, expected, [q, k, v])
    torch.testing.assert_close(lse, expected_lse)
    assert problems
    assert all("dilated" not in problem.key for problem in problems)


@pytest.mark.slow
def test_a_score_that_knows_its_place_is_not_regrouped() -> None:
    q, k, v = leaf(1, 2, 50, 16), leaf(1, 2, 50, 16, seed=1), leaf(1, 2, 50, 16, seed=2)
    score, mask = tilegen.alibi(torch.tensor([0.1, 0.3])), tilegen.dilated(4)
    out = tilegen.attention(q, k, v, mask=mask, score=score)
    require_same(out, attention_reference(q, k, v, mask=mask, score=score)[0], [q, k, v])


CU = torch.tensor([0, 13, 13, 50, 77])
CU_KV = torch.tensor([0, 20, 25, 50, 90])
INSIDE = [
    None,
    tilegen.causal(),
    tilegen.causal("bottom_right"),
    tilegen.sliding_window(7, 3, "bottom_right"),
    tilegen.prefix_lm(5),
    tilegen.causal() | tilegen.global_tokens(3),
]


def one_by_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_kv: torch.Tensor,
    mask: Mask | None,
    score: Score | None = None,
) -> torch.Tensor:
    """Each document alone."""
    ends = zip(CU[:-1], CU[1:], cu_kv[:-1], cu_kv[1:], strict=True)
    parts = [
        attention_reference(
            *(x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])),
            mask=mask,
            score=score,
            entry=number,
        )[0][0].transpose(0, 1)
        for number, (a, b, c, d) in enumerate(ends)
        if b > a
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("mask", INSIDE, ids=str)
@pytest.mark.parametrize("cu_kv", [CU, CU_KV], ids=["self", "cross"])
def test_packed_sequences_attend_within_documents(mask: Mask | None, cu_kv: torch.Tensor) -> None:
    total = int(cu_kv[-1])
    q, k, v = leaf(77, 4, 16), leaf(total, 2, 16), leaf(total, 2, 16, seed=1)
    out = tilegen.attention_varlen(q, k, v, CU, cu_kv, mask=mask)
    require_same(out, one_by_one(q, k, v, cu_kv, mask), [q, k, v])


LENGTHS, KEPT = torch.tensor([9, 2, 30, 11]), torch.arange(120) * 7 % 10 < 6
BLOCKS = (torch.arange(4 * 5 * 5).view(4, 1, 5, 5) * 5 % 8 < 5).expand(4, 4, 5, 5)
BY_PLACE = {
    "b": (tilegen.predicate(lambda b, h, q, k: (b % 2 == 0) | (k <= q)), None),
    "b of a table": (tilegen.predicate(lambda b, h, q, k: k < LENGTHS[b]), None),
    "lengths": (tilegen.kv_lengths(LENGTHS), lambda b, h, q, k: k < LENGTHS[b]),
    "q of a table": (tilegen.predicate(lambda b, h, q, k: KEPT[q] | (k < 3)), None),
    "k of a table": (tilegen.predicate(lambda b, h, q, k: KEPT[k]), None),
    "ids": (
        tilegen.documents(torch.arange(120) // 5),
        lambda b, h, q, k: q // 5 == k // 5,
    ),
    "ids as long as the longest": (
        tilegen.documents(torch.arange(40) % 3),
        lambda b, h, q, k: q % 3 == k % 3,
    ),
    "blocks": (
        tilegen.block_sparse(BLOCKS, 8) & tilegen.causal(),
        lambda b, h, q, k: BLOCKS[b, h, q // 8, k // 8] & (k <= q),
    ),
}
"""Masks, and the same masks written in another way."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_PLACE)
def test_masks_of_packed_sequences_see_their_document_and_places_in_it(name: str) -> None:
    """Before, b was 0 throughout, and tables were refused or read by places among all tokens."""
    mask, plain = BY_PLACE[name]
    q, k, v = leaf(77, 4, 16), leaf(90, 2, 16), leaf(90, 2, 16, seed=1)
    out = tilegen.attention_varlen(q, k, v, CU, CU_KV, mask=mask)
    expected = mask if plain is None else tilegen.predicate(plain)
    require_same(out, one_by_one(q, k, v, CU_KV, expected), [q, k, v])


@pytest.mark.slow
@pytest.mark.any_triton
def test_scores_of_packed_sequences_see_places_in_a_document() -> None:
    q, k, v = leaf(77, 4, 16), leaf(90, 2, 16), leaf(90, 2, 16, seed=1)
    # Not of k - q, which would shift whole rows: that softmax does not see.
    score = tilegen.score(lambda s, b, h, q, k: s + 3 * torch.sin(0.3 * q) * torch.sin(0.5 * k))
    out = tilegen.attention_varlen(q, k, v, CU, CU_KV, score=score)
    require_same(out, one_by_one(q, k, v, CU_KV, None, score), [q, k, v])


@pytest.mark.any_triton
def test_nested_tensors_are_packed_sequences() -> None:
    lengths = (5, 30, 1)
    parts = [[leaf(n, 4, 16, seed=s).detach() for n in lengths] for s in range(3)]
    q, k, v = (torch.nested.nested_tensor(p, layout=torch.jagged).transpose(1, 2) for p in parts)
    out = tilegen.attention(q, k, v, mask=tilegen.causal())
    for i, rows in enumerate(out.transpose(1, 2).unbind()):
        document = (x[i].transpose(0, 1)[None] for x in parts)
        expected, _ = attention_reference(*document, mask=tilegen.causal())
        torch.testing.assert_close(rows.transpose(0, 1)[None], expected)


DOCUMENT = torch.arange(150) // 37
MASK_MODS = {
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: (q >= k) & (DOCUMENT[q] == DOCUMENT[k]),
    "near": lambda b, h, q, k: (q - k).abs() < 30,
    "strided": lambda b, h, q, k: (q - k) % 7 == h % 7,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MASK_MODS)
def test_flex_attention_takes_pytorchs_arguments(name: str) -> None:
    q, k, v = leaf(1, 4, 150, 16), leaf(1, 2, 150, 16), leaf(1, 2, 150, 16, seed=1)
    fn = MASK_MODS[name]
    block_mask = create_block_mask(fn, None, 4, 150, 150, device="cpu")

    def score_mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 3.0 * torch.tanh(s / 3.0) + 0.01 * (kv_idx - q_idx)

    out, lse = tilegen.flex_attention(
        q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True, return_lse=True
    )
    b, h, i, j = torch.meshgrid(*map(torch.arange, (1, 4, 150, 150)), indexing="ij")
    s = q @ k.repeat_interleave(2, 1).mT * 0.25
    s = score_mod(s, b, h, i, j).masked_fill(~fn(b, h, i, j), float("-inf"))
    require_same(out, s.softmax(-1) @ v.repeat_interleave(2, 1), [q, k, v])
    torch.testing.assert_close(lse, s.logsumexp(-1))


@pytest.mark.slow
@pytest.mark.any_triton
def test_a_block_mask_with_a_layout_of_its_own() -> None:
    counts, indices = torch.tensor([[[1, 2]]]), torch.tensor([[[[1, 0], [0, 1]]]])
    block_mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128, seq_lengths=(200, 200))
    q, k, v = leaf(1, 2, 200, 16), leaf(1, 2, 200, 16, seed=1), leaf(1, 2, 200, 16, seed=2)
    keep = torch.ones(200, 200, dtype=torch.bool)
    keep[:128, :128] = False
    expected, _ = attention_reference(q, k, v, mask=tilegen.from_bool(keep))
    require_same(tilegen.flex_attention(q, k, v, block_mask=block_mask), expected, [q, k, v])


def test_a_block_mask_whose_unused_indices_name_listed_blocks() -> None:
    """Hand-made ones are padded with zeros; a block listed as whole keeps what its mask_mod
    drops."""
    counts = torch.tensor([[[1, 2, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 0, 0], [0, 1, 0], [2, 0, 0]]]], dtype=torch.int32)
    keep = torch.zeros(48, 48, dtype=torch.bool)
    for row, column in ((0, 0), (1, 0), (1, 1), (2, 2), (2, 0)):
        keep[16 * row : 16 * row + 16, 16 * column : 16 * column + 16] = True
    q = torch.randn(1, 1, 48, 16, generator=torch.Generator().manual_seed(0))
    for whole in (False, True):
        empty = (torch.zeros_like(counts), indices)
        partial, full = (empty, (counts, indices)) if whole else ((counts, indices), empty)
        block_mask = BlockMask.from_kv_blocks(
            *partial, *full, BLOCK_SIZE=16, mask_mod=lambda b, h, q, k: q >= k
        )
        out = tilegen.flex_attention(q, q, q, block_mask=block_mask)
        kept = keep if whole else keep.tril()
        expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=kept)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_unsupported_flex_attention_is_one_line() -> None:
    q, k = leaf(1, 4, 20, 16), leaf(1, 2, 20, 16)
    with pytest.raises(InvalidProblem, match="enable_gqa=True"):
        tilegen.flex_attention(q, k, k)
    with pytest.raises(InvalidProblem, match="return_aux must be an AuxRequest"):
        tilegen.flex_attention(q, q, q, return_aux=object())
    block_mask = create_block_mask(MASK_MODS["causal"], None, None, 150, 150, device="cpu")
    with pytest.raises(InvalidProblem, match="made for lengths"):
        tilegen.flex_attention(q, q, q, block_mask=block_mask)
    with pytest.raises(InvalidProblem, match="BlockMask"):
        tilegen.flex_attention(q, q, q, block_mask=object())


def test_cu_seqlens_must_fit() -> None:
    q = leaf(77, 2, 16)
    with pytest.raises(InvalidProblem, match="76 tokens"):
        tilegen.attention_varlen(q[:76], q[:76], q[:76], CU)
    with pytest.raises(InvalidProblem, match=r"q must be a tensor \(tokens, heads, head_dim\)"):
        tilegen.attention_varlen(q[None], q[None], q[None], CU)


def test_a_neighborhood_has_its_own_length() -> None:
    q = leaf(1, 1, 20, 16)
    with pytest.raises(InvalidProblem, match="16 points, got 20"):
        tilegen.attention(q, q, q, mask=tilegen.neighborhood((4, 4), (3, 3)))


def test_the_gradient_of_a_transposed_table_lies_where_its_elements_do() -> None:
    q, k, v = leaf(1, 2, 40, 16), leaf(1, 2, 50, 16, seed=1), leaf(1, 2, 50, 16, seed=2)
    table = torch.randn(41, 2, generator=torch.Generator().manual_seed(3)).mT.requires_grad_()
    assert not table.is_contiguous()
    score = tilegen.relative_bias(table)
    require_same(
        tilegen.attention(q, k, v, score=score),
        attention_reference(q, k, v, score=score)[0],
        [q, table],
    )


@pytest.mark.any_triton
def test_sinks_of_minus_infinity_where_nothing_is_kept() -> None:
    q, k = leaf(1, 2, 20, 16), leaf(1, 2, 9, 16)
    logits = torch.tensor([float("-inf"), 1.0], requires_grad=True)
    out = tilegen.attention(
        q, k, k, mask=tilegen.causal("bottom_right"), score=tilegen.sinks(logits)
    )
    (grads,) = torch.autograd.grad(out.sum(), logits)
    assert grads[0] == 0
    assert grads.isfinite().all()


@pytest.mark.slow
@pytest.mark.any_triton
@pytest.mark.parametrize("mask", [None, tilegen.causal("bottom_right")], ids=str)
def test_padded_batches(mask: Mask | None) -> None:
    q, k, v = leaf(3, 4, 20, 16), leaf(3, 2, 50, 16), leaf(3, 2, 50, 16, seed=1)
    lengths = torch.tensor([50, 7, 0])
    out = tilegen.attention(q, k, v, mask=mask, kv_lengths=lengths)
    whole = (tilegen.full() if mask is None else mask) & tilegen.kv_lengths(lengths)
    require_same(out, attention_reference(q, k, v, mask=whole)[0], [q, k, v])
    assert (out[2] == 0).all()
    keep = torch.arange(50)[None] < lengths[:, None]
    assert whole.stand_in.is_stand_in
    dense = tilegen.from_bool(keep[:, None, None].expand(3, 1, 20, 50))
    plain = attention_reference(q, k, v, mask=dense)
    if mask is None:
        torch.testing.assert_close(out, plain[0])


def test_invalid_lengths() -> None:
    q = leaf(2, 1, 9, 16)
    with pytest.raises(InvalidProblem, match="shape"):
        tilegen.attention(q, q, q, kv_lengths=torch.ones(2, 2, dtype=torch.int32))
    with pytest.raises(InvalidProblem, match="integers"):
        tilegen.attention(q, q, q, kv_lengths=torch.ones(2))
    with pytest.raises(InvalidProblem, match="size 2 along batch"):
        tilegen.attention(q, q, q, kv_lengths=torch.tensor([1, 2, 3]))


@pytest.mark.parametrize(
    "form", [torch.Tensor.int, torch.Tensor.long, lambda x: x.int().repeat_interleave(2)[::2]]
)
def test_lengths_changed_in_place_are_seen(form: Callable[[torch.Tensor], torch.Tensor]) -> None:
    q, k = leaf(2, 2, 20, 16), leaf(2, 2, 30, 16, seed=1)
    lengths = form(torch.tensor([30, 7]))
    for now in ([30, 7], [0, 29], [12, 12]):
        lengths.copy_(torch.tensor(now))
        out = tilegen.attention(q, k, k, kv_lengths=lengths)
        expected = attention_reference(q, k, k, mask=tilegen.kv_lengths(torch.tensor(now)))[0]
        torch.testing.assert_close(out, expected)
    lengths[1] = 2**30 if lengths.dtype == torch.int32 else 2**40
    with pytest.raises(InvalidProblem, match=r"kv_lengths must be 0..30"):
        tilegen.attention(q, k, k, kv_lengths=lengths)


def test_tables_with_too_few_heads_are_refused() -> None:
    q = leaf(1, 4, 9, 16)
    with pytest.raises(InvalidProblem, match="size 4 along query heads, got 3"):
        tilegen.attention(q, q, q, score=tilegen.alibi(torch.ones(3)))
    with pytest.raises(InvalidProblem, match="must not be empty"):
        tilegen.attention(q, q, q, score=tilegen.bias(torch.ones(0, 9)))


@pytest.mark.parametrize("name", [*SCORES, *BIASES, *MASKS])
def test_tensors_of_other_sizes_are_refused(name: str) -> None:
    refused_by_attention(name)


@pytest.mark.any_triton
@pytest.mark.parametrize("d_qk, d_v", [(1, 1), (3, 7), (5, 16)])
def test_narrow_heads_are_padded(d_qk: int, d_v: int) -> None:
    q, k, v = leaf(1, 2, 20, d_qk), leaf(1, 2, 30, d_qk, seed=1), leaf(1, 2, 30, d_v, seed=2)
    out = tilegen.attention(q, k, v, mask=tilegen.causal())
    require_same(out, attention_reference(q, k, v, mask=tilegen.causal())[0], [q, k, v])


def test_one_batch_of_keys_serves_all_queries() -> None:
    q, k, v = leaf(3, 4, 20, 16), leaf(1, 2, 30, 16, seed=1), leaf(1, 2, 30, 16, seed=2)
    expected, _ = attention_reference(q, *(x.expand(3, -1, -1, -1) for x in (k, v)))
    require_same(tilegen.flex_attention(q, k, v, enable_gqa=True), expected, [q, k, v])


@pytest.mark.slow
@pytest.mark.any_triton
def test_autocast_is_followed_through_the_backward() -> None:
    q, k, v = (leaf(1, 2, 20, 16, seed=seed) for seed in range(3))
    with torch.autocast("cpu", dtype=torch.float16):
        out, lse = tilegen.attention(q, k, v, return_lse=True)
    low = [x.detach().half().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = tilegen.attention(*low, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    grads = torch.autograd.grad(out.sum() + lse.sum(), [q, k, v])
    exact = torch.autograd.grad(expected.sum() + expected_lse.sum(), low)
    assert all(
        one.dtype == torch.float32 and torch.equal(one, other.float())
        for one, other in zip(grads, exact, strict=True)
    )


def test_gradients_reach_jagged_tensors_through_out_and_lse() -> None:
    parts = [[leaf(n, 4, 16, seed=s) for n in (5, 30, 1)] for s in range(3)]
    q, k, v = (torch.nested.as_nested_tensor(p, layout=torch.jagged) for p in parts)
    out, lse = tilegen.attention(*(x.transpose(1, 2) for x in (q, k, v)), return_lse=True)
    (out.values().sin().sum() + lse.values().sin().sum()).backward()
    for document in zip(*parts, strict=True):
        alone = [x.detach().transpose(0, 1)[None].requires_grad_() for x in document]
        expected = attention_reference(*alone)
        (expected[0].sin().sum() + expected[1].sin().sum()).backward()
        for x, other in zip(document, alone, strict=True):
            assert x.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(x.grad, other.grad[0].transpose(0, 1))
