"""Where PyTorch computes, documents and padded entries are as if each were alone: NaN and
infinities in rows that a query may not see reach nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import tilegen
from tilegen.masks import causal, documents

CUTS = [0, 5, 18, 24]
BAD = [float("nan"), float("inf"), float("-inf")]
Results = tuple[torch.Tensor, ...]


def inputs(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator) for _ in range(4)]


def differentiated(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]], given: list[torch.Tensor]
) -> Results:
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    out, lse = run(*leaves)
    return out, lse, *torch.autograd.grad(out, leaves, given[3])


def alone(*given: torch.Tensor, is_causal: bool) -> Results:
    """Return the results of (heads, rows, dim) tensors in fp64."""
    rows, columns = given[0].shape[-2], given[1].shape[-2]
    keep = torch.ones(rows, columns, dtype=torch.bool)
    keep = keep.tril() if is_causal else keep

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~keep, float("-inf"))
        return torch.softmax(s, -1) @ v, s.logsumexp(-1)

    return differentiated(run, [x.double() for x in given])


def agree(ours: Results, expected: Results) -> None:
    for left, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(left.double(), other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("poisoned", [0, 1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_documents_do_not_reach_each_other(is_causal: bool, poisoned: int) -> None:
    given = inputs(24, 2, 8)
    for x in given:
        x[CUTS[poisoned] : CUTS[poisoned + 1], :, 3] = BAD[poisoned]
    mask = causal() if is_causal else None

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = tilegen.attention_varlen(q, k, v, torch.tensor(CUTS), mask=mask, return_lse=True)
        return out, lse.mT

    ours = differentiated(run, given)
    for i in {0, 1, 2} - {poisoned}:
        here = slice(CUTS[i], CUTS[i + 1])
        expected = alone(*(x[here].transpose(0, 1) for x in given), is_causal=is_causal)
        agree(tuple(x[here] for x in ours), tuple(x.transpose(0, 1) for x in expected))
    assert not ours[0][CUTS[poisoned] : CUTS[poisoned + 1], :, 3].isfinite().any()


def test_ids_in_any_order_do_not_reach_each_other() -> None:
    given, ids = inputs(1, 2, 24, 8), torch.arange(24) % 3
    for x in given:
        x[:, :, ids == 1] = float("nan")
    mask = documents(ids)
    ours = differentiated(lambda *x: tilegen.attention(*x, mask=mask, return_lse=True), given)
    for i in (0, 2):
        expected = alone(*(x[0][:, ids == i] for x in given), is_causal=False)
        agree(tuple(x[0][:, ids == i] for x in ours), expected)


def test_keys_beyond_the_lengths_reach_nothing() -> None:
    given, lengths = inputs(3, 2, 24, 8), [24, 11, 0]
    for b, length in enumerate(lengths):
        given[1][b, :, length:], given[2][b, :, length:] = float("nan"), float("inf")
    ours = differentiated(
        lambda *x: tilegen.attention(*x, kv_lengths=torch.tensor(lengths), return_lse=True), given
    )
    for b, length in enumerate(lengths[:2]):
        q, k, v, dout = (x[b] for x in given)
        expected = alone(q, k[:, :length], v[:, :length], dout, is_causal=False)
        cut = [x[b] for x in ours]
        assert not cut[3][:, length:].any()
        assert not cut[4][:, length:].any()
        agree((*cut[:3], cut[3][:, :length], cut[4][:, :length]), expected)
    assert all(not x[2].any() for i, x in enumerate(ours) if i != 1)


def test_a_score_without_a_derivative_at_0_reaches_no_other_document() -> None:
    """Dropped pairs have score 0, where the derivative of this score is infinite."""
    given, ids = inputs(1, 2, 24, 8), torch.arange(24) // 9
    root = tilegen.score(lambda s, b, h, q, k: s.abs().sqrt())
    ours = differentiated(
        lambda *x: tilegen.attention(*x, mask=documents(ids), score=root, return_lse=True), given
    )
    for i in range(3):
        q, k, v, dout = (x[0][:, ids == i].double() for x in given)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            s = (q @ k.mT * 8**-0.5).abs().sqrt()
            return torch.softmax(s, -1) @ v, s.logsumexp(-1)

        for left, right in zip(ours, differentiated(run, [q, k, v, dout]), strict=True):
            # Derivatives near 0 are large, and so are the rounding errors that they multiply.
            torch.testing.assert_close(left[0][:, ids == i].double(), right, atol=1e-3, rtol=1e-3)


def test_other_masks_are_as_in_pytorch() -> None:
    """A key that a causal mask drops is seen by later rows, and 0 times NaN is NaN there."""
    q, k, v, _ = inputs(1, 1, 8, 8)
    v[:, :, 5] = float("nan")
    ours = tilegen.attention(q, k, v, mask=causal())
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.ones(8, 8, dtype=torch.bool).tril()
    )
    assert (ours.isnan() == theirs.isnan()).all()


def test_tokens_beyond_the_documents_of_transformers_are_0() -> None:
    integration = pytest.importorskip("tilegen.integrations.transformers")
    call = partial(integration.attention_forward, torch.nn.Identity())
    given = [x.requires_grad_() for x in inputs(1, 2, 5, 8)[:3]]
    poisoned = [torch.where(torch.arange(5)[:, None] < 3, x, torch.nan) for x in given]
    cu = torch.tensor([0, 1, 3])
    out, _ = call(*poisoned, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    expected, _ = call(*(x[:, :, :3] for x in given), None, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    assert not out[:, 3:].any()
    torch.testing.assert_close(out[:, :3], expected)
    grads = torch.autograd.grad(out.sum(), poisoned)
    assert not any(grad[:, :, 3:].any() for grad in grads)
