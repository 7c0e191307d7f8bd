"""Pages that a mask leaves nothing of, which engines free and fill with anything: NaN there reaches
no result. Judged by dense attention in fp64 without these pages."""

from __future__ import annotations

import math

import pytest
import torch

import tilegen
from tests.compiled.test_paged import BOTTOM, cache
from tilegen.masks import Mask
from tilegen.runtime import plans

LENGTH, PAGE = 91, 16
WINDOW = BOTTOM & tilegen.sliding_window(20, 0, "bottom_right")
MASKS: dict[str, Mask] = {
    "window": WINDOW,
    "sinks": BOTTOM
    & (tilegen.predicate(lambda b, h, q, k: k < 3) | tilegen.sliding_window(20, 0, "bottom_right")),
    "unlisted": WINDOW & tilegen.predicate(lambda b, h, q, k: k % 2 == 0),
}


def kept_pairs(name: str, queries: int) -> torch.Tensor:
    """Return the pairs (queries, LENGTH) that a mask keeps, written out."""
    q, k = torch.arange(LENGTH - queries, LENGTH)[:, None], torch.arange(LENGTH)
    near = (k <= q) & (q - k <= 20)
    if name == "sinks":
        return near | ((k < 3) & (k <= q))
    return near & (k % 2 == 0) if name == "unlisted" else near


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("road", ["kernels", "torch"])
@pytest.mark.parametrize("page", [4, PAGE, 64])
@pytest.mark.parametrize("name", MASKS)
def test_freed_pages_reach_nothing(
    name: str, page: int, road: str, bad: float, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CPU", road)
    plans.forget()
    k, v = (x.flatten(0, 1)[:LENGTH] for x in cache(6, PAGE, 2, (32, 16), torch.float32))
    q = torch.randn(1, 4, queries, 32, generator=torch.Generator().manual_seed(3))
    keep = kept_pairs(name, queries)
    seen = keep.any(0)
    pages = -(-LENGTH // page)
    table = 1 + torch.arange(pages)
    caches = [torch.full((pages + 1, page, *x.shape[1:]), bad) for x in (k, v)]  # 0: freed
    for at, x in zip(caches, (k, v), strict=True):
        at[1:].flatten(0, 1)[:LENGTH] = torch.where(seen[:, None, None], x, bad)
    for i in range(pages):
        if not seen[i * page : (i + 1) * page].any():
            table[i] = 0
    out = tilegen.attention_paged(q, *caches, table[None], torch.tensor([LENGTH]), mask=MASKS[name])
    rows = (x[seen].transpose(0, 1).repeat_interleave(2, 0).double() for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[0].double(), *rows, attn_mask=keep[:, seen]
    )
    torch.testing.assert_close(out[0].double(), expected, rtol=1e-5, atol=1e-5)
    plans.forget()


@pytest.mark.parametrize("road", ["kernels", "torch"])
def test_a_kept_key_behaves_as_in_pytorch(road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that keep a NaN are NaN."""
    monkeypatch.setenv("TILEGEN_CPU", road)
    plans.forget()
    k_pages, v_pages = cache(6, PAGE, 2, (32, 16), torch.float32)
    v_pages[5, 5] = math.nan
    q = torch.randn(1, 4, 1, 32, generator=torch.Generator().manual_seed(3))
    table, lengths = torch.arange(6)[None], torch.tensor([LENGTH])
    for mask in MASKS.values():
        keeps = mask is not MASKS["unlisted"]  # key 85 is odd
        out = tilegen.attention_paged(q, k_pages, v_pages, table, lengths, mask=mask)
        assert out.isnan().all() if keeps else out.isfinite().all()
    plans.forget()
