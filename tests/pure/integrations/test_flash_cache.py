"""flash-attn's functions over caches, against its functions over whole keys and values."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.integrations import flash_attn

HEADS, HEADS_KV, DIM, ROOM = 4, 2, 16, 48
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (5, 0), "softcap": 3.0},
    {"alibi_slopes": torch.tensor([1.0, 0.5, 0.25, 0.125]), "softmax_scale": 0.1},
]


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def expected_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of one entry of the batch."""
    actual = flash_attn.flash_attn_func(
        q[None], k[None, :length], v[None, :length], **options, return_attn_probs=True
    )
    return actual[0][0], actual[1][0]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("new", [0, 3])
def test_a_cache_of_whole_rows_grows_and_is_read(options: dict[str, Any], new: int) -> None:
    q, caches = random(2, 3, HEADS, DIM), [random(4, ROOM, HEADS_KV, DIM) for _ in "kv"]
    chosen, lengths = torch.tensor([3, 1]), torch.tensor([20, 7], dtype=torch.int32)
    added = [random(2, new, HEADS_KV, DIM) * x for x in (1, 2)] if new else [None, None]
    before = [x.clone() for x in caches]
    out, lse = flash_attn.flash_attn_with_kvcache(
        *(q, *caches, *added),
        cache_seqlens=lengths,
        cache_batch_idx=chosen,
        return_softmax_lse=True,
        **options,
    )
    for i in range(2):
        whole = [x[chosen[i]].clone() for x in before]
        length = int(lengths[i])
        for row, tokens in zip(whole, added, strict=True):
            if tokens is not None:
                row[length : length + new] = tokens[i]
        for cache, row in zip(caches, whole, strict=True):
            assert torch.equal(cache[chosen[i]], row), "written in place"
        actual = expected_of(q[i], *whole, length + new, options)
        torch.testing.assert_close((out[i], lse[i]), actual)


def test_pages_and_one_length_for_all() -> None:
    q, pages = random(2, 1, HEADS, DIM), [random(9, 16, HEADS_KV, DIM) for _ in "kv"]
    table = torch.tensor([[3, 0, 8], [1, 7, 2]], dtype=torch.int32)
    for lengths, length in ((33, 33), (None, 48)):
        out = flash_attn.flash_attn_with_kvcache(
            q, *pages, cache_seqlens=lengths, block_table=table, causal=True
        )
        for i in range(2):
            k, v = (x[table[i].long()].flatten(0, 1) for x in pages)
            torch.testing.assert_close(out[i], expected_of(q[i], k, v, length, {})[0])


def test_packed_queries_over_pages() -> None:
    q, pages = random(6, HEADS, DIM), [random(9, 16, HEADS_KV, DIM) for _ in "kv"]
    table = torch.tensor([[3, 0, 8], [1, 7, 2]])
    starts, keys = torch.tensor([0, 5, 6]), torch.tensor([0, 20, 60])
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        *(q, *pages, starts, keys, 5, 40),
        causal=True,
        block_table=table,
        return_attn_probs=True,
    )
    for i, (first, end, length) in enumerate(((0, 5, 20), (5, 6, 40))):
        k, v = (x[table[i]].flatten(0, 1) for x in pages)
        actual = expected_of(q[first:end], k, v, length, {"causal": True})
        torch.testing.assert_close((out[first:end], lse[:, first:end]), actual)
    with pytest.raises(Unsupported, match="leave dropout_p out and pass max_seqlen_q"):
        flash_attn.flash_attn_varlen_func(
            q, *pages, starts, keys, 5, 40, dropout_p=0.1, block_table=table
        )


def test_signature_is_that_of_flash_attn() -> None:
    parameters = inspect.signature(flash_attn.flash_attn_with_kvcache).parameters
    assert list(parameters) == [
        *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens"),
        *("cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale", "causal"),
        *("window_size", "softcap", "rotary_interleaved", "alibi_slopes", "num_splits"),
        "return_softmax_lse",
    ]


@pytest.mark.parametrize(
    "options, error",
    [
        ({"rotary_cos": torch.zeros(1)}, "rotate q and k before the call"),
        ({"cache_leftpad": torch.zeros(2)}, "keys begin at the first"),
        ({"k": torch.zeros(2, 1, HEADS_KV, DIM)}, "expected k and v together"),
        (
            {"block_table": torch.zeros(2, 1), "cache_batch_idx": torch.zeros(2)},
            "leave cache_batch_idx out",
        ),
        ({"cache_batch_idx": torch.tensor([-1, 0])}, "cache_batch_idx must be 0..1"),
        ({"cache_batch_idx": torch.tensor([2, 0])}, "cache_batch_idx must be 0..1"),
        ({"cache_batch_idx": torch.tensor([1.0, 0.0])}, "must be integers, got torch.float32"),
        ({"cache_batch_idx": torch.tensor([1])}, r"cache_batch_idx must be \(2,\), got \(1,\)"),
        ({"q": torch.zeros(3, 1, HEADS, DIM)}, "must hold at least 3 caches, got 2"),
        ({"v_cache": torch.zeros(ROOM, 2, HEADS_KV, DIM)}, "as many caches, keys and heads"),
    ],
)
def test_unsupported_arguments_are_refused(options: dict[str, Any], error: str) -> None:
    given = {name: random(2, ROOM, HEADS_KV, DIM) for name in ("k_cache", "v_cache")}
    given |= {"q": random(2, 1, HEADS, DIM)} | options
    with pytest.raises((InvalidProblem, Unsupported), match=error):
        flash_attn.flash_attn_with_kvcache(**given)


def test_a_cache_may_have_room_for_a_larger_batch() -> None:
    q, caches = random(2, 1, HEADS, DIM), [random(3, ROOM, HEADS_KV, DIM) for _ in "kv"]
    out = flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=5)
    for i in range(2):
        actual = expected_of(q[i], *(x[i] for x in caches), 5, {})
        torch.testing.assert_close(out[i], actual[0])


def test_caches_that_have_no_pages_in_common_are_refused() -> None:
    q, k = random(2, 1, HEADS, DIM), random(2, ROOM, HEADS_KV, DIM)
    inside = random(ROOM, 2, HEADS_KV, DIM).transpose(0, 1)
    odd = random(2, ROOM * HEADS_KV * DIM + 8)[:, :-8].view(2, ROOM, HEADS_KV, DIM)
    longer = random(2, 128, HEADS_KV, DIM)[:, :ROOM]
    for caches in ((inside, k), (k, inside), (odd, odd), (k, longer)):
        with pytest.raises(Unsupported, match="k_cache and v_cache must have equal strides"):
            flash_attn.flash_attn_with_kvcache(q, *caches)


@pytest.mark.parametrize("length", [40, 100, 48, 33])
@pytest.mark.parametrize("form", ["sliced", "transposed", "both"])
def test_caches_are_taken_where_they_lie(length: int, form: str) -> None:
    def cache(room: int) -> torch.Tensor:
        if form == "sliced":
            return random(3, room, HEADS_KV, DIM)[:, :length]
        if form == "transposed":
            return random(3, HEADS_KV, length, DIM).transpose(1, 2)
        return random(3, HEADS_KV, room, DIM).transpose(1, 2)[:, :length]

    q, lengths = random(2, 3, HEADS, DIM), torch.tensor([length - 2, 17])
    k, v = cache(128), cache(128)
    v += 1
    added = [random(2, 2, HEADS_KV, DIM) * x for x in (1, 2)]
    expected = [x.clone() for x in (k, v)]
    for whole, tokens in zip(expected, added, strict=True):
        for i in range(2):
            whole[i, lengths[i] : lengths[i] + 2] = tokens[i]
    actual = flash_attn.flash_attn_with_kvcache(
        q, k, v, *added, cache_seqlens=lengths, causal=True, return_softmax_lse=True
    )
    assert torch.equal(k, expected[0]), "written in place"
    assert torch.equal(v, expected[1])
    for i in range(2):
        item = expected_of(q[i], *(x[i] for x in expected), int(lengths[i]) + 2, {"causal": True})
        torch.testing.assert_close((actual[0][i], actual[1][i]), item)
