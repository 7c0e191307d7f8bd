"""Kinds of calls: nested tensors, autocast, narrow heads, FlexAttention's forms."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

import tilegen
from tilegen.calls import maxima
from tilegen.check.reference import attention_reference, dense_mask
from tilegen.errors import InvalidProblem, Unsupported


def random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def jagged(lengths: tuple[int, ...] = (5, 30, 1), seed: int = 0) -> torch.Tensor:
    parts = [random(n, 4, 16, seed=seed) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


# --------------------------------------------------------------------------------------------------
# Nested tensors


def test_the_lse_of_jagged_tensors_is_nested() -> None:
    q, k, v = (jagged(seed=seed) for seed in range(3))
    out, lse = tilegen.attention(q, k, v, mask=tilegen.causal(), return_lse=True)
    assert lse.shape[:2] == (3, 4)
    for item in zip(q.unbind(), k.unbind(), v.unbind(), out.unbind(), lse.unbind(), strict=True):
        expected = attention_reference(*(x[None] for x in item[:3]), mask=tilegen.causal())
        torch.testing.assert_close(item[3][None], expected[0])
        torch.testing.assert_close(item[4][None], expected[1])


def test_jagged_tensors_must_be_dense_with_equal_lengths() -> None:
    q, k = jagged(), jagged((6, 2, 3))
    for v in (jagged((3, 6, 2)), jagged((6, 2, 4))):
        with pytest.raises(InvalidProblem, match="k and v must have sequences of the same lengths"):
            tilegen.attention(q, k, v)
    padded = random(2, 8, 4, 16)
    starts, lengths = torch.tensor([0, 3]), torch.tensor([3, 5])
    holes = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged).transpose(1, 2)
    for x in (holes, q.transpose(1, 2)):
        with pytest.raises(InvalidProblem, match="ragged, dim\\) without holes"):
            tilegen.attention(x, x, x)


def test_jagged_tensors_take_no_kv_lengths() -> None:
    q = jagged()
    with pytest.raises(InvalidProblem, match="their own lengths"):
        tilegen.attention(q, q, q, kv_lengths=torch.tensor([3, 3, 1]))


@pytest.mark.parametrize("lengths", [[10, 3], [-1, 3]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_are_those_of_columns_that_are_there(lengths: list[int], dtype: Any) -> None:
    q = random(2, 2, 9, 16)
    said = re.escape(f"kv_lengths must be 0..9, got {lengths}")
    with pytest.raises(InvalidProblem, match=said):
        tilegen.attention(q, q, q, kv_lengths=torch.tensor(lengths, dtype=dtype))


@pytest.mark.parametrize("kind", ["attention", "packed", "paged"])
def test_tracing_by_torch_jit_is_refused_in_one_line(kind: str) -> None:
    """A trace keeps the choices of the call that it has seen: kernels, lengths, masks."""
    q, pages = random(2, 2, 9, 16), random(4, 16, 2, 16)
    tables, starts = (torch.tensor([[0, 1], [2, 3]]), torch.tensor([20, 30])), torch.tensor([0, 9])
    calls: dict[str, tuple[Any, Any]] = {
        "attention": (lambda q: tilegen.attention(q, q, q), q),
        "packed": (lambda q: tilegen.attention_varlen(q, q, q, starts), random(9, 2, 16)),
        "paged": (lambda q: tilegen.attention_paged(q, pages, pages, *tables), q),
    }
    call, given = calls[kind]
    with pytest.raises(Unsupported, match=r"torch.jit.trace .* torch.export"):
        torch.jit.trace(call, (given,), check_trace=False)


@pytest.mark.parametrize(
    "lengths, message",
    [
        (torch.ones(2, 2, dtype=torch.int32), r"shape \(batch,\)"),
        (torch.ones(2), "must be integers, got torch.float32"),
        ([3, 3], r"must be a dense tensor of shape \(batch,\)"),
        (torch.tensor([3, 3, 3]), "size 2 along batch, got 3"),
    ],
    ids=["two dimensions", "floats", "a list", "three"],
)
def test_lengths_are_looked_at_in_each_call(lengths: Any, message: str) -> None:
    q = random(2, 2, 9, 16)
    right = torch.tensor([4, 9])
    mask = tilegen.causal()
    for _ in range(2):
        with pytest.raises(InvalidProblem, match=f"{message}.*the call was .*, kv_lengths "):
            tilegen.attention(q, q, q, mask=mask, kv_lengths=lengths)
        out = tilegen.attention(q, q, q, mask=mask, kv_lengths=right)
        both = tilegen.attention(q, q, q, mask=mask & tilegen.kv_lengths(right))
        assert torch.equal(out, both)
        right[0] += 3


# --------------------------------------------------------------------------------------------------
# Masks, scales, autocast


def test_masks_are_not_joined_by_and() -> None:
    for join in (
        lambda: tilegen.causal() and tilegen.sliding_window(3, 0),
        lambda: tilegen.causal() or tilegen.full(),
        lambda: not tilegen.causal(),
    ):
        with pytest.raises(InvalidProblem, match="join masks with"):
            join()


@pytest.mark.parametrize("scale", [1e300, -3e38, float("inf"), float("nan")])
def test_scales_that_fp32_cannot_hold(scale: float) -> None:
    q = random(1, 1, 9, 16)
    with pytest.raises(InvalidProblem, match="scale must be"):
        tilegen.attention(q, q, q, scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_followed_as_pytorch_does(dtype: torch.dtype) -> None:
    q, k, v = (random(1, 2, 20, 16, seed=seed).requires_grad_() for seed in range(3))
    with torch.autocast("cpu", dtype=dtype):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        ours, lse = tilegen.attention(q, k, v, return_lse=True)
        flex = tilegen.flex_attention(q, k, v)
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        varlen = tilegen.attention_varlen(*packed, torch.tensor([0, 20]))
    assert ours.dtype == flex.dtype == varlen.dtype == theirs.dtype == dtype
    assert lse.dtype == torch.float32
    low = [x.detach().to(dtype) for x in (q, k, v)]
    expected, expected_lse = tilegen.attention(*low, return_lse=True)
    assert torch.equal(ours, expected)
    assert torch.equal(lse, expected_lse)  # in fp32 inside, as it is without autocast
    assert torch.equal(flex, ours)
    ours.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    with torch.autocast("cpu", enabled=False):
        assert tilegen.attention(q, k, v).dtype == torch.float32


# --------------------------------------------------------------------------------------------------
# Narrow heads


@pytest.mark.parametrize("d_qk, d_v", [(1, 1), (3, 7), (5, 16), (16, 2)])
def test_head_dims_below_eight(d_qk: int, d_v: int) -> None:
    q, k, v = (
        random(1, 2, 20, dim, seed=seed).requires_grad_()
        for seed, dim in enumerate((d_qk, d_qk, d_v))
    )
    out = tilegen.attention(q, k, v, mask=tilegen.causal(), return_lse=True)
    expected = attention_reference(q, k, v, mask=tilegen.causal())
    torch.testing.assert_close(out, expected)
    weights = random(*expected[0].shape, seed=5)
    torch.testing.assert_close(
        torch.autograd.grad((out[0] * weights).sum(), [q, k, v]),
        torch.autograd.grad((expected[0] * weights).sum(), [q, k, v]),
    )
    with pytest.raises(InvalidProblem, match="head_dim"):
        tilegen.attention(q, random(1, 2, 20, d_qk + 1), v)


# --------------------------------------------------------------------------------------------------
# FlexAttention's forms


def capped(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 3.0 * torch.tanh(s / 3.0) + 0.01 * (kv_idx - q_idx)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("max_scores", [False, True])
def test_return_aux(lse: bool, max_scores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maxima, "PAIRS", 300)  # several panels
    q, k, v = random(2, 4, 40, 16), random(2, 2, 50, 16, seed=1), random(2, 2, 50, 16, seed=2)
    mask = tilegen.causal("bottom_right") & tilegen.sliding_window(9, None) & ~tilegen.causal()
    out, aux = tilegen.flex_attention(
        *(q, k, v, capped, mask),
        enable_gqa=True,
        return_aux=AuxRequest(lse=lse, max_scores=max_scores),
    )
    score = tilegen.score(capped)
    expected = attention_reference(q, k, v, mask=mask, score=score)
    torch.testing.assert_close(out, expected[0])
    assert (aux.lse is not None, aux.max_scores is not None) == (lse, max_scores)
    if lse:
        torch.testing.assert_close(aux.lse, expected[1])
    if max_scores:
        b, h, i, j = torch.meshgrid(*map(torch.arange, (2, 4, 40, 50)), indexing="ij")
        s = capped(q @ k.repeat_interleave(2, 1).mT / 4, b, h, i, j)
        s = s.masked_fill(~dense_mask(mask, 40, 50), float("-inf"))
        torch.testing.assert_close(aux.max_scores, s.amax(-1))


def test_return_aux_and_return_lse_are_one_of_two() -> None:
    q = random(1, 1, 9, 16)
    with pytest.raises(InvalidProblem, match="got both"):
        tilegen.flex_attention(q, q, q, return_lse=True, return_aux=AuxRequest())


def test_one_batch_of_keys_serves_all_queries() -> None:
    q = random(3, 4, 20, 16)
    k, v = (random(1, 2, 30, 16, seed=seed).requires_grad_() for seed in (1, 2))
    out = tilegen.flex_attention(q, k, v, enable_gqa=True)
    expected, _ = attention_reference(q, *(x.expand(3, -1, -1, -1) for x in (k, v)))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), [k, v]), torch.autograd.grad(expected.sum(), [k, v])
    )


@pytest.mark.parametrize("block", [(128, 64), (32, 128), (96, 64)])
def test_a_layout_of_rectangular_blocks(block: tuple[int, int]) -> None:
    rows, columns = -(-200 // block[0]), -(-300 // block[1])
    layout = torch.rand(1, 2, rows, columns, generator=torch.Generator().manual_seed(3)) < 0.6
    counts, order = layout.sum(-1), layout.int().sort(dim=-1, descending=True, stable=True).indices
    block_mask = BlockMask.from_kv_blocks(
        counts.int(), order.int(), BLOCK_SIZE=block, seq_lengths=(200, 300)
    )
    actual = dense_mask(tilegen.from_block_mask(block_mask), 200, 300, heads=2)
    expected = layout.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)
    assert torch.equal(actual, expected[0, :, :200, :300])


@pytest.mark.parametrize("odd", [-1, 3])
def test_blocks_that_do_not_exist_are_refused(odd: int) -> None:
    """Of those listed: indices beyond the count mean nothing."""
    for is_listed in (False, True):
        indices = torch.tensor([0, 1, odd], dtype=torch.int32).expand(1, 1, 3, 3).clone()
        block_mask = BlockMask.from_kv_blocks(
            torch.full((1, 1, 3), 2, dtype=torch.int32), indices.clamp(0, 2), BLOCK_SIZE=128
        )
        block_mask.kv_indices = indices
        block_mask.kv_num_blocks = block_mask.kv_num_blocks + is_listed
        if is_listed:
            with pytest.raises(InvalidProblem, match=f"blocks from 0 to 2, got {odd}"):
                tilegen.from_block_mask(block_mask)
        else:
            assert dense_mask(tilegen.from_block_mask(block_mask), 384, 384).sum(-1).unique() == 256


def test_document_ids_longer_than_the_sequence() -> None:
    q, k, v = (random(1, 2, 48, 16, seed=seed) for seed in range(3))
    for ids in (torch.arange(64) // 7, torch.arange(64) // 7 % 3):

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, ids: torch.Tensor = ids) -> Any:
            return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

        block_mask = create_block_mask(mask_mod, None, None, 48, 48, device="cpu")
        out = tilegen.flex_attention(q, k, v, block_mask=block_mask)
        keep = (ids[:48, None] == ids[:48]).tril()
        expected, _ = attention_reference(q, k, v, mask=tilegen.from_bool(keep))
        torch.testing.assert_close(out, expected)
        assert torch.equal(dense_mask(tilegen.documents(ids), 48, 64)[:, :48].tril(), keep)
    with pytest.raises(InvalidProblem, match="size 48 along query rows, got 40"):
        tilegen.attention(q, k, v, mask=tilegen.documents(torch.arange(40) // 7))


class ApplyMask(torch.autograd.Function):
    """One of FlexAttention's own tests."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Any, mask: Any) -> Any:  # type: ignore[override]
        return torch.where(mask, a, -float("inf"))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(inputs[1])

    @staticmethod
    def backward(ctx: Any, i: Any) -> Any:  # type: ignore[override]
        return i, None


def test_an_autograd_function_that_marks_results_without_gradient() -> None:
    q, k, v = (random(1, 2, 20, 16, seed=seed) for seed in range(3))

    def score_mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ApplyMask.apply(s, q_idx <= kv_idx)

    out = tilegen.flex_attention(q, k, v, score_mod=score_mod)
    upper = tilegen.from_bool(torch.ones(20, 20).triu() > 0)
    expected, _ = attention_reference(q, k, v, mask=upper)
    torch.testing.assert_close(out, expected)


# --------------------------------------------------------------------------------------------------
# What is no tensor

TOKENS = torch.zeros(64, 2, 16)
CU_SEQLENS = torch.tensor([0, 20, 64])
NO_TENSORS = {
    "cu_seqlens in a list": (
        lambda: tilegen.attention_varlen(TOKENS, TOKENS, TOKENS, [0, 20, 64]),
        "cu_seqlens_q must be a tensor of integers, got list",
    ),
    "cu_seqlens of keys in a tuple": (
        lambda: tilegen.attention_varlen(TOKENS, TOKENS, TOKENS, CU_SEQLENS, (0, 20, 64)),
        "cu_seqlens_kv must be a tensor of integers, got tuple",
    ),
    "no cu_seqlens": (
        lambda: tilegen.attention_varlen(TOKENS, TOKENS, TOKENS, None),
        "cu_seqlens_q must be a tensor of integers, got NoneType",
    ),
    "tokens in a list": (
        lambda: tilegen.attention_varlen([[1.0]], TOKENS, TOKENS, CU_SEQLENS),
        r"q must be a tensor \(tokens, heads, head_dim\), got list",
    ),
    "a mask by a number": (
        lambda: tilegen.attention_varlen(TOKENS, TOKENS, TOKENS, CU_SEQLENS, mask=1),
        "mask must be a tilegen mask such as .* got int",
    ),
    "a slope": (lambda: tilegen.alibi(0.5), "expected slopes to be a floating tensor, got float"),
    "slopes in a list": (lambda: tilegen.alibi([0.5]), "slopes to be a floating tensor, got list"),
    "a temperature": (lambda: tilegen.temperature(2.0), "temperature to be a floating tensor"),
    "a bias": (lambda: tilegen.bias(1.0), "bias to be a floating tensor"),
    "a table in a list": (lambda: tilegen.relative_bias([1.0, 2.0, 3.0]), "table to be a floating"),
    "no sinks": (lambda: tilegen.sinks(None), "sinks to be a floating tensor, got NoneType"),
    "a cap by its name": (lambda: tilegen.softcap("much"), "expected a positive cap, got str"),
    "many caps": (lambda: tilegen.softcap(torch.ones(2)), "expected a positive cap, got Tensor"),
    "no lengths": (lambda: tilegen.kv_lengths(None), "values must be a tensor, or lists"),
    "no layout": (lambda: tilegen.block_sparse(None, 32), "layout must be a tensor, or lists"),
    "ragged ids": (lambda: tilegen.documents([[0, 1], [2]]), "must be a tensor, or lists"),
}


@pytest.mark.parametrize("name", NO_TENSORS)
def test_arguments_that_are_not_tensors_are_refused_in_a_line(name: str) -> None:
    call, message = NO_TENSORS[name]
    with pytest.raises(InvalidProblem, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


IDS, PLACES = torch.tensor([0, 0, 1, 1, 2, 2]), torch.arange(6)
LAYOUT, PARENTS, WIDTHS = torch.eye(3) > 0, PLACES - 1, torch.tensor([1, 2])
MASKS: dict[str, Any] = {
    "documents": lambda: tilegen.documents(IDS),
    "documents anywhere": lambda: tilegen.documents(IDS % 2),
    "cu_seqlens": lambda: tilegen.documents(cu_seqlens=torch.tensor([0, 2, 6], device="cpu")),
    "a look-up": lambda: tilegen.predicate(lambda b, h, q, k: PLACES[q] >= PLACES[k]),
    "joined": lambda: ~tilegen.documents(IDS) | tilegen.causal(),
    "windows": lambda: tilegen.sliding_window(tilegen.values(WIDTHS, "h"), 0),
    "blocks": lambda: tilegen.block_sparse(LAYOUT, 2),
    "tree": lambda: tilegen.tree(PARENTS),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_default_device_is_not_that_of_a_mask(name: str) -> None:
    """Tables stay where they are."""
    q, k, v = (random(1, 2, 6, 8, seed=seed) for seed in range(3))
    expected = tilegen.attention(q, k, v, mask=MASKS[name]())
    with torch.device("meta"):
        mask = MASKS[name]()
        out = tilegen.attention(q, k, v, mask=mask)
        drawn = mask.show(6)
    assert torch.equal(out, expected)
    assert drawn == MASKS[name]().show(6)


def test_dropout_draws_alike_under_a_default_device() -> None:
    q, k, v = (random(1, 2, 6, 8, seed=seed) for seed in range(3))
    torch.manual_seed(1)
    expected = tilegen.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    with torch.device("meta"):
        assert torch.equal(tilegen.attention(q, k, v, dropout_p=0.5), expected)
