"""Attention over the pages of a cache: right, reading no more than it may, and as the model
counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilegen
from tests.support.counted import counted, predicted
from tests.support.splits import COMBINE
from tilegen.check.reference import attention_reference
from tilegen.check.verification import require, verify
from tilegen.choose import ranker
from tilegen.emit.render import render
from tilegen.kernels.config import TileConfig
from tilegen.masks import Mask
from tilegen.masks.grouping import packed_heads
from tilegen.masks.score import Score, alibi, sinks, softcap
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans
from tilegen.task import KernelTask
from tilegen.tuning.bench import Timed, check_config

PAGES = (1, 4, 16, 32, 64, 256)
CASES = [
    "b3 hq4 hkv2 q5 kv300 d32 fp16 causal(bottom_right)",
    "b2 hq4 hkv4 q1 kv70 d40/24 bf16 full",
    "b2 hq2 hkv1 q40 kv130 d16 fp32 window(40,0,bottom_right)",
]


def configs(problem: AttentionProblem, keys: int = 64, block_n: int = 32) -> dict[str, TileConfig]:
    heads = packed_heads(problem)
    split = TileConfig(block_m=16 // heads, heads=heads, block_n=block_n, split_kv=keys)
    return {"fwd_paged": split, "fwd_combine": COMBINE}


@pytest.mark.parametrize("page", PAGES)
def test_pages_smaller_and_larger_than_a_tile(page: int) -> None:
    """Elements beyond the last key of a page are NaN, which shows if they are read."""
    for text in CASES[PAGES.index(page) % 2 :: 2]:
        problem = AttentionProblem.parse(f"{text} page{page}")
        require(verify(problem, configs(problem)))


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("mask", ["full", "causal(bottom_right)", "global(5)|window(9,9)"])
def test_bytes_equal_the_model(mask: str, page: int) -> None:
    problem = AttentionProblem.parse(f"b2 hq4 hkv2 q9 kv100 d16 fp16 {mask} page{page}")
    kernels = configs(problem)
    assert counted(problem, kernels) == predicted(problem, kernels)


@pytest.mark.parametrize("pages", ["", " page16"])
@pytest.mark.parametrize("kernel", ["split", "fwd_combine"])
def test_the_tuner_runs_and_checks_them(kernel: str, pages: str) -> None:
    problem = AttentionProblem.parse(f"b2 hq4 hkv2 q2 kv600 d16 fp16 full{pages}")
    name = ("fwd_paged" if pages else "fwd_split") if kernel == "split" else kernel
    config = COMBINE if kernel == "fwd_combine" else configs(problem)["fwd_paged"]
    assert check_config(problem, name, config) is None
    Timed.of(KernelTask.of(name, problem, tilegen.gpu("h200")), "cpu").runs(config)()


# --------------------------------------------------------------------------------------------------
# Calls


def cache(pages: int, page: int, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(pages, page, heads, dim, generator=generator).to(dtype) for dim in dims
    )


def expected_of(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    pages: torch.Tensor,
    length: int,
    mask: Mask | None,
    score: Score | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of one request (heads, rows, dim) in fp64."""
    k, v = (
        x[pages.long()].flatten(0, 1)[:length].transpose(0, 1)[None].double()
        for x in (k_pages, v_pages)
    )
    scale = q.shape[-1] ** -0.5
    return attention_reference(q[None].double(), k, v, mask=mask, score=score, scale=scale)


BOTTOM = tilegen.causal("bottom_right")
BLOCKS = torch.arange(3 * 8).view(3, 8) * 5 % 7 < 4
IDS = torch.arange(128) * 11 % 3


@pytest.mark.parametrize(
    "mask, score",
    [
        (BOTTOM, None),
        (BOTTOM & tilegen.sliding_window(30, 0, "bottom_right"), None),
        (None, softcap(3.0)),
        (BOTTOM, sinks(torch.tensor([0.5, -1.0, 2.0, 0.0]))),
        (BOTTOM, alibi(torch.tensor([1.0, 0.5, 0.25, 0.125]))),
        (tilegen.dilated(3), None),
        (tilegen.block_sparse(BLOCKS, 16) & BOTTOM, None),
        (tilegen.documents(IDS) | BOTTOM, None),
        (tilegen.predicate(lambda b, h, q, k: ((k // 4) ^ (q // 4)) % 2 == h % 2), None),
    ],
    ids=[
        *("causal", "window", "softcap", "sinks", "alibi"),
        *("dilated", "blocks", "ids", "bits"),
    ],
)
def test_prompts_chunks_and_decoding_in_one_call(mask: Mask | None, score: Score | None) -> None:
    page, heads, queries = 16, 4, [1, 17, 0, 40, 1]
    lengths = torch.tensor([33, 80, 50, 40, 1])
    k_pages, v_pages = cache(30, page, 2, (32, 16), torch.float32)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(2))
    table = torch.full((5, 8), 10**6)  # what is no page of a request is never looked up
    used = 0
    for i, length in enumerate(lengths.tolist()):
        count = -(-length // page)
        table[i, :count] = order[used : used + count]
        used += count
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()])
    q = torch.randn(sum(queries), heads, 32, generator=torch.Generator().manual_seed(3))
    for i, length in enumerate(lengths.tolist()):  # poison what no request has
        if rest := -length % page:
            k_pages[table[i, (length - 1) // page], page - rest :] = float("nan")
            v_pages[table[i, (length - 1) // page], page - rest :] = float("nan")
    k_pages[order[used:]], v_pages[order[used:]] = float("nan"), float("nan")
    out, lse = tilegen.attention_paged(
        *(q, k_pages, v_pages, table, lengths),
        q_starts=starts,
        max_q_length=40,
        mask=mask,
        score=score,
        return_lse=True,
    )
    assert out.shape == (sum(queries), heads, 16)
    assert lse.shape == (heads, sum(queries))
    for i, (first, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        if first == end:
            continue
        length = int(lengths[i])
        pages = table[i, : -(-length // page)]
        rows = q[first:end].transpose(0, 1)
        actual = expected_of(rows, k_pages, v_pages, pages, length, mask, score)
        torch.testing.assert_close(
            out[first:end].transpose(0, 1)[None].double(), actual[0], atol=2e-6, rtol=2e-6
        )
        torch.testing.assert_close(
            lse[:, first:end][None].double(), actual[1], atol=2e-6, rtol=2e-6
        )


@pytest.mark.parametrize("layout", ["NHD", "HND", "one tensor", "fused"])
def test_layouts(layout: str) -> None:
    k_pages, v_pages = cache(12, 16, 2, (32, 32), torch.float16)
    table, lengths = torch.arange(12).view(3, 4).flip(0), torch.tensor([64, 20, 1])
    q = torch.randn(3, 4, 2, 32, generator=torch.Generator().manual_seed(3)).half()
    plain = tilegen.attention_paged(q, k_pages, v_pages, table, lengths, mask=BOTTOM)
    if layout == "HND":
        given = [x.transpose(1, 2).contiguous() for x in (k_pages, v_pages)]
    elif layout == "one tensor":  # (2, pages, page, heads, dim)
        given = [*torch.stack([k_pages, v_pages])]
    elif layout == "fused":  # vLLM's [pages, heads, page, 2 * dim]
        whole = torch.cat([k_pages, v_pages], -1).transpose(1, 2).contiguous()
        given = [whole[..., :32], whole[..., 32:]]
    else:
        given = [k_pages, v_pages]
    named = "HND" if layout in ("HND", "fused") else "NHD"
    out = tilegen.attention_paged(q, *given, table, lengths, mask=BOTTOM, layout=named)
    assert torch.equal(out, plain)


def test_out_is_written_in_place() -> None:
    k_pages, v_pages = cache(12, 16, 2, (32, 32), torch.float16)
    table, lengths = torch.arange(12).view(3, 4).flip(0), torch.tensor([64, 20, 1])
    q = torch.randn(5, 4, 32, generator=torch.Generator().manual_seed(3)).half()
    packed = {"q_starts": torch.tensor([0, 2, 4, 5]), "max_q_length": 2, "mask": BOTTOM}
    plain = tilegen.attention_paged(q, k_pages, v_pages, table, lengths, **packed)
    for width in (32, 33):  # rows at multiples of 16 bytes, and not
        whole = torch.full((6, 4, width), 7.0).half()
        out = whole[:5, :, :32]
        ours = tilegen.attention_paged(q, k_pages, v_pages, table, lengths, **packed, out=out)
        assert ours is out
        assert torch.equal(out, plain)
        assert (whole[5:] == 7).all()
        assert (whole[..., 32:] == 7).all()


def test_a_bound_of_the_keys_changes_nothing_but_the_work() -> None:
    k_pages, v_pages = cache(12, 16, 2, (32, 32), torch.float32)
    table, lengths = torch.arange(12).view(2, 6), torch.tensor([33, 20])
    q = torch.randn(2, 4, 1, 32, generator=torch.Generator().manual_seed(3))
    given = q, k_pages, v_pages, table, lengths
    whole = tilegen.attention_paged(*given)
    bounded = tilegen.attention_paged(*given, max_kv_length=40)
    torch.testing.assert_close(whole, bounded)
    with pytest.raises(tilegen.errors.InvalidProblem, match=r"kv_lengths must be 0\.\.30"):
        tilegen.attention_paged(*given, max_kv_length=30)


# --------------------------------------------------------------------------------------------------
# Batch-invariant


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have calls be batch-invariant."""
    small = TileConfig(block_m=8, heads=2, block_n=16, split_kv=32)  # so that splits are several
    configs = {"fwd_combine": COMBINE}
    monkeypatch.setattr(ranker, "invariant_config", lambda task: configs.get(task.kernel, small))
    monkeypatch.setenv("TILEGEN_BATCH_INVARIANT", "1")
    plans.forget()
    yield
    plans.forget()


@pytest.mark.slow
@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("mask", ["causal", "window", "sinks"])
def test_bits_do_not_hang_on_batch_padding_chunks_or_pages(mask: str) -> None:
    """A prompt of 70 tokens alone, in a batch, padded, in pages, and in chunks of any sizes."""
    kept = {
        "causal": BOTTOM,
        "window": BOTTOM & tilegen.sliding_window(20, 0, "bottom_right"),
        "sinks": BOTTOM & (tilegen.global_tokens(3) | tilegen.sliding_window(20, 20)),
    }[mask]
    page, tokens = 16, 70
    k_pages, v_pages = cache(16, page, 2, (16, 16), torch.float16)
    q = torch.randn(1, 4, tokens, 16, generator=torch.Generator().manual_seed(3)).half()
    table = torch.arange(15).view(3, 5)
    k, v = (x[:5].flatten(0, 1)[:tokens].transpose(0, 1)[None] for x in (k_pages, v_pages))
    whole = tilegen.attention(q, k, v, mask=kept)

    # In a batch, with other batch entries and padding.
    others = [torch.cat([x, torch.randn_like(x)]) for x in (q, k, v)]
    assert torch.equal(tilegen.attention(*others, mask=kept)[:1], whole)

    # In pages, whose table has room for more.
    paged = tilegen.attention_paged(
        q, k_pages, v_pages, table[:1], torch.tensor([tokens]), mask=kept
    )
    assert torch.equal(paged, whole)

    if mask == "sinks":  # whose windows are counted from the first query of a call
        return
    for chunks in ([1, 1, 68], [33, 37], [16, 54]):
        first = 0
        for size in chunks:
            end = first + size
            part = tilegen.attention_paged(
                *(q[:, :, first:end], k_pages, v_pages, table[:1]),
                torch.tensor([end]),
                mask=kept,
            )
            assert torch.equal(part, whole[:, :, first:end]), (chunks, first)
            first = end


@pytest.mark.slow
@pytest.mark.usefixtures("invariant", "optimised")
@pytest.mark.parametrize("tokens, padding", [(70, 7), (70, 58), (64, 64), (131, 1)])
@pytest.mark.parametrize("mask", ["full", "window", "sinks", "odd", "dilated"])
def test_bits_do_not_hang_on_padded_keys(mask: str, tokens: int, padding: int) -> None:
    """Keys alone, cut by `kv_lengths`, and in pages, by masks of one interval, of several, and by
    lists."""
    kept = {
        "full": tilegen.full(),
        "window": tilegen.sliding_window(20, 0),
        "sinks": tilegen.causal() & (tilegen.global_tokens(3) | tilegen.sliding_window(20, 0)),
        "odd": tilegen.causal() & tilegen.predicate(lambda b, h, q, k: k % 2 == 0),
        "dilated": tilegen.causal() & tilegen.dilated(3),
    }[mask]
    k_pages, v_pages = cache(16, 16, 2, (16, 16), torch.float32)
    q = torch.randn(1, 4, tokens, 16, generator=torch.Generator().manual_seed(3))
    longer = [x.flatten(0, 1)[: tokens + padding].transpose(0, 1)[None] for x in (k_pages, v_pages)]
    whole = tilegen.attention(q, *(x[:, :, :tokens] for x in longer), mask=kept)
    lengths = torch.tensor([tokens])
    assert torch.equal(tilegen.attention(q, *longer, mask=kept, kv_lengths=lengths), whole)
    table = torch.arange(16)[None]
    assert torch.equal(
        tilegen.attention_paged(q, k_pages, v_pages, table, lengths, mask=kept), whole
    )


@pytest.mark.slow
@pytest.mark.usefixtures("invariant")
def test_a_decoding_step_gives_the_row_of_the_prompt() -> None:
    k_pages, v_pages = cache(16, 64, 2, (16, 16), torch.bfloat16)
    q = torch.randn(1, 4, 300, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    k, v = (x[:5].flatten(0, 1)[:300].transpose(0, 1)[None] for x in (k_pages, v_pages))
    whole = tilegen.attention(q, k, v, mask=BOTTOM)
    table = torch.arange(16).view(1, 16)
    for token in (0, 63, 64, 255, 256, 299):
        step = tilegen.attention_paged(
            *(q[:, :, token : token + 1], k_pages, v_pages, table),
            torch.tensor([token + 1]),
            mask=BOTTOM,
        )
        assert torch.equal(step, whole[:, :, token : token + 1]), token


def test_other_forwards_do_hang_on_it() -> None:
    """The effect of the mode: full tiles are computed first, in another way."""
    problem = AttentionProblem.parse("b1 hq4 hkv2 q16 kv128 d16 fp16 causal(bottom_right)")
    plain, ordered = (
        render(one, configs(problem)["fwd_paged"], "fwd_split").source
        for one in (problem, AttentionProblem.parse(f"{problem.key} invariant"))
    )
    assert "# Full tiles" in plain
    assert "range(tile_lo, tile_hi)" in ordered
    assert "# Full tiles" not in ordered


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("score", [None, softcap(3.0)], ids=["plain", "softcap"])
def test_copies_are_made_anew_on_each_call(layout: str, score: Score | None) -> None:
    """Kernels cannot read these queries, tables and lengths, nor write the result. The second call
    takes the plan of the first."""
    k_pages, v_pages = cache(12, 16, 2, (32, 16), torch.float32)
    given = k_pages, v_pages
    if layout == "HND":
        given = tuple(x.transpose(1, 2).contiguous() for x in given)
    wide = torch.full((3, 4, 5, 32), 7.0)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(3, 4, 5, 32, generator=generator)  # heads outside of rows
        table = torch.randperm(12, generator=generator).view(3, 4).short().repeat_interleave(2, 1)
        lengths = torch.tensor([64, 5 + seed, 33], dtype=torch.int16)
        out, lse = tilegen.attention_paged(
            *(q, *given, table[:, ::2], lengths),
            mask=BOTTOM,
            score=score,
            layout=layout,
            return_lse=True,
            out=wide[..., :16],
        )
        assert out.data_ptr() == wide.data_ptr()
        assert (wide[..., 16:] == 7).all()
        for i, length in enumerate(lengths.tolist()):
            actual = out[i], lse[i]
            of_request = q[i], k_pages, v_pages, table[i, ::2], length
            expected = expected_of(*of_request, BOTTOM, score)
            for left, other in zip(actual, expected, strict=True):
                torch.testing.assert_close(left, other[0].float(), rtol=1e-5, atol=1e-5)
