"""Packed documents under TILEGEN_BATCH_INVARIANT=1: each has the bits that it has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilegen
from tilegen.errors import Unsupported
from tilegen.masks import Mask, causal, documents, sliding_window

MASKS: dict[str, Mask | None] = {
    "full": None,
    "causal": causal(),
    "window": causal("bottom_right") & sliding_window(20, 0),
}


@pytest.fixture(autouse=True)
def _invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_BATCH_INVARIANT", "1")


def tokens(count: int, heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, heads, 16, generator=generator)


def attended(cuts: list[int], given: tuple[torch.Tensor, ...], **options: Any) -> tuple[Any, Any]:
    (q, k, v), cu = given, torch.tensor(cuts, dtype=torch.int32)
    with torch.no_grad():
        return tilegen.attention_varlen(q, k, v, cu, return_lse=True, **options)


@pytest.mark.slow
# Paged and whole keys are two kernels. Where their sums are the same, LLVM fuses the same products
# and sums at level 2, as for users, but not at level 0.
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("score", [None, lambda s, b, h, q, k: s + (q - k) / 8])
@pytest.mark.parametrize("name", MASKS)
def test_bits_do_not_depend_on_the_documents_before(name: str, score: Any) -> None:
    given = tuple(tokens(150, heads, seed) for seed, heads in enumerate((4, 2, 2)))
    cuts = [0, 29, 29, 120, 150]
    out, lse = attended(cuts, given, mask=MASKS[name], score=score)
    for first, end in ((0, 29), (29, 120), (120, 150)):
        alone = tuple(one[first:end] for one in given)
        expected = attended([0, end - first], alone, mask=MASKS[name], score=score)
        assert torch.equal(out[first:end], expected[0])
        assert torch.equal(lse[:, first:end], expected[1])
        q, k, v = (one.transpose(0, 1)[None] for one in alone)
        whole = tilegen.attention(q, k, v, mask=MASKS[name], score=score)
        assert torch.equal(out[first:end], whole[0].transpose(0, 1))


def test_documents_of_other_queries_than_keys() -> None:
    q, k, v = tokens(40, 4, 0), tokens(90, 2, 1), tokens(90, 2, 2)
    cu_q, cu_kv = torch.tensor([0, 7, 40]), torch.tensor([0, 35, 90])
    mask = causal("bottom_right")
    with torch.no_grad():
        out = tilegen.attention_varlen(q, k, v, cu_q, cu_kv, mask=mask)
        alone = tilegen.attention_varlen(
            *(q[7:], k[35:], v[35:], torch.tensor([0, 33]), torch.tensor([0, 55])), mask=mask
        )
    assert torch.equal(out[7:], alone)


def test_calls_that_cannot_begin_tiles_at_documents_are_refused() -> None:
    q, k, v = (tokens(40, 2, seed) for seed in range(3))
    with pytest.raises(Unsupported, match="unset TILEGEN_BATCH_INVARIANT"):
        tilegen.attention_varlen(q.requires_grad_(), k, v, torch.tensor([0, 13, 40]))
    ids = (torch.arange(40) > 12).int()
    q, k, v = (one.detach().transpose(0, 1)[None] for one in (q, k, v))
    with pytest.raises(Unsupported, match="unset TILEGEN_BATCH_INVARIANT"):
        tilegen.attention(q, k, v, mask=documents(ids))
