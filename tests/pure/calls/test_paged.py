"""Calls over the pages of a cache: what PyTorch computes of them on a CPU, what is refused, and
what batch-invariant calls choose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilegen
from tests.support.models import Decoder, served
from tests.support.models import dense as dense_tokens
from tilegen import pipeline
from tilegen.choose.families import kernels_of
from tilegen.choose.ranker import invariant_config
from tilegen.emit.render import render
from tilegen.errors import InvalidProblem, TilegenError, Unsupported
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.launch.changes import Changes, Pages
from tilegen.masks.tiles.tile_ranges import tile_ranges
from tilegen.problem import AttentionProblem
from tilegen.runtime import dispatch, paged_call, plans
from tilegen.task import KernelTask

H200 = gpu("h200")
BOTTOM = tilegen.causal("bottom_right")


def call(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {
        "q": torch.randn(3, 4, 2, 32, generator=generator),
        "k_pages": torch.randn(20, 16, 2, 32, generator=generator),
        "v_pages": torch.randn(20, 16, 2, 24, generator=generator),
        "block_table": torch.randperm(20, generator=generator)[:15].view(3, 5),
        "kv_lengths": torch.tensor([80, 2, 33]),
    }
    return given | changes


def dense(given: dict[str, Any], i: int, rows: torch.Tensor, **options: Any) -> torch.Tensor:
    """Compute attention for the rows (heads, rows, dim) of request i."""
    length = int(given["kv_lengths"][i])
    k, v = (
        given[name][given["block_table"][i]].flatten(0, 1)[:length].transpose(0, 1)[None]
        for name in ("k_pages", "v_pages")
    )
    return tilegen.attention(rows[None], k, v, **options)[0]


@pytest.mark.parametrize("mask", [None, BOTTOM, BOTTOM & tilegen.sliding_window(9, 0)])
def test_requests_equal_separate_attention(mask: tilegen.Mask | None) -> None:
    given = call()
    out, lse = tilegen.attention_paged(**given, mask=mask, return_lse=True)
    assert out.shape == (3, 4, 2, 24)
    assert lse.shape == (3, 4, 2)
    for i in range(3):
        torch.testing.assert_close(out[i], dense(given, i, given["q"][i], mask=mask))


def test_packed_queries() -> None:
    given = call(q=torch.randn(9, 4, 32), q_starts=torch.tensor([0, 7, 8, 9]), max_q_length=7)
    out = tilegen.attention_paged(**given, mask=BOTTOM, scale=-0.1)
    for i, (first, end) in enumerate([(0, 7), (7, 8), (8, 9)]):
        rows = given["q"][first:end].transpose(0, 1)
        expected = dense(given, i, rows, mask=BOTTOM, scale=-0.1).transpose(0, 1)
        torch.testing.assert_close(out[first:end], expected)


def test_a_request_without_keys_gives_nothing() -> None:
    given = call(kv_lengths=torch.tensor([0, 2, 3]))
    out, lse = tilegen.attention_paged(**given, return_lse=True)
    assert (out[0] == 0).all()
    assert (lse[0] == float("-inf")).all()
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out, lse = tilegen.attention_paged(**given, score=tilegen.sinks(logits), return_lse=True)
    assert (out[0] == 0).all()
    assert (lse[0] == logits[:, None]).all()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"layout": "DNH"}, "layout must be one of NHD, HND, got 'DNH'"),
    "dims of q": ({"q": torch.randn(4, 2, 32)}, r"q must be a tensor \(requests, .* got \(4, 2"),
    "no tensor": ({"block_table": [[1]]}, r"block_table must be a tensor \(requests, .* got list"),
    "dtypes": ({"k_pages": torch.randn(20, 16, 2, 32).half()}, "must have one dtype"),
    "fp8": (
        {
            name: torch.zeros(20, 16, 2, 32, dtype=torch.float8_e4m3fn)
            for name in ("k_pages", "v_pages")
        },
        "fp8 caches are not supported",
    ),
    "page": (
        {name: torch.randn(20, 24, 2, 32) for name in ("k_pages", "v_pages")},
        "a power of two of at most 256 keys, got 24",
    ),
    "no heads": ({"q": torch.randn(3, 0, 2, 32)}, r"q must not be empty, got .* \(3, 0, 2"),
    "heads": ({"v_pages": torch.randn(20, 16, 4, 24)}, "must have equal keys and heads"),
    "width": ({"k_pages": torch.randn(20, 16, 2, 40)}, "k_pages q's head dim"),
    "rows": ({"block_table": torch.zeros(2, 5).long()}, "block_table must have 3 rows"),
    "requests": ({"q": torch.randn(2, 4, 2, 32)}, "q must have 3 requests, got 2"),
    "floats": ({"kv_lengths": torch.rand(3)}, "must be integers, got torch.float32"),
    "too long": ({"kv_lengths": torch.tensor([81, 2, 3])}, r"kv_lengths must be 0\.\.80"),
    "negative": ({"kv_lengths": torch.tensor([-1, 2, 3])}, r"kv_lengths must be 0\.\.80"),
    "bound": ({"max_kv_length": 81}, r"max_kv_length must be 1\.\.80"),
    "no such page": ({"block_table": torch.full((3, 5), 20)}, r"must name pages 0\.\.19"),
    "starts": (
        {"q": torch.randn(9, 4, 32), "q_starts": torch.tensor([0, 9]), "max_q_length": 9},
        "q_starts must have 4 entries, got 2",
    ),
    "no bound": (
        {"q": torch.randn(9, 4, 32), "q_starts": torch.tensor([0, 7, 8, 9])},
        "max_q_length is needed",
    ),
    "bound of queries": (
        {
            "q": torch.randn(9, 4, 32),
            "q_starts": torch.tensor([0, 7, 8, 9]),
            "max_q_length": 6,
        },
        "q_starts must rise by at most 6",
    ),
    "beyond the queries": (
        {
            "q": torch.randn(8, 4, 32),
            "q_starts": torch.tensor([0, 7, 8, 9]),
            "max_q_length": 9,
        },
        r"q_starts must be 0\.\.8",
    ),
    "scale": ({"scale": float("nan")}, "scale must be a finite number"),
    "strides": (
        {"k_pages": torch.randn(20, 16, 32, 2).mT},
        "k_pages must have a dense last dimension",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_fit_together_are_refused(name: str) -> None:
    changes, error = WRONG[name]
    tilegen.attention_paged(**call())  # elements are checked for a plan that exists, too
    with pytest.raises(TilegenError, match=error) as raised:
        tilegen.attention_paged(**call(**changes))
    assert "the call was paged" in str(raised.value)


def test_gradients_are_refused() -> None:
    given = call(q=torch.randn(3, 4, 2, 32, requires_grad=True))
    with pytest.raises(Unsupported, match="attention over pages has no backward"):
        tilegen.attention_paged(**given)
    with torch.no_grad():
        tilegen.attention_paged(**given)
    trained = tilegen.sinks(torch.zeros(4, requires_grad=True))
    with pytest.raises(Unsupported, match="attention over pages has no backward"):
        tilegen.attention_paged(**call(), score=trained)


def test_sinks_of_another_number_of_heads_are_refused() -> None:
    with pytest.raises(InvalidProblem, match="sinks must have size 4 along query heads, got 3"):
        tilegen.attention_paged(**call(), score=tilegen.sinks(torch.zeros(3)))


def test_generation_over_pages_gives_the_tokens_of_dense_attention() -> None:
    model, prompts = Decoder(), [[*range(1, 20)], [20, 5, 3], [7]]
    expected = [dense_tokens(model, one, 12) for one in prompts]
    for chunk, drafts in ((5, 3), (64, 0), (1, 7)):
        assert served(model, prompts, 12, chunk=chunk, drafts=drafts) == expected


# --------------------------------------------------------------------------------------------------
# Plans


def test_calls_of_one_kind_have_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other lengths of the same bucket, other tables, layouts and contents decide nothing anew."""
    plans.forget()
    given = call()
    tilegen.attention_paged(**given, mask=BOTTOM)

    def fail(*_: Any) -> Any:
        raise AssertionError("decided again")

    monkeypatch.setattr(dispatch, "_new_plan", fail)
    others: list[dict[str, Any]] = [
        {"kv_lengths": torch.tensor([70, 1, 3])},
        {"block_table": given["block_table"].flip(0)},
        {"q": given["q"].transpose(1, 2).contiguous().transpose(1, 2)},
        {"layout": "HND"} | {n: given[n].transpose(1, 2) for n in ("k_pages", "v_pages")},
        {"max_kv_length": 80},
    ]
    for changed in others:
        options = {"layout": "NHD", "max_kv_length": None} | changed
        arguments = given | options
        out = tilegen.attention_paged(**arguments, mask=tilegen.causal("bottom_right"))
        assert out.shape == (3, 4, 2, 24)
    packed = torch.randn(5, 4, 32)
    starts = torch.tensor([0, 2, 3, 5])
    tilegen.attention_paged(**given | {"q": packed}, q_starts=starts, max_q_length=2, mask=BOTTOM)


@pytest.mark.parametrize(
    "changed",
    [
        {"q": torch.randn(3, 4, 3, 32)},
        {"max_kv_length": 60},
        {"q": torch.randn(3, 2, 2, 32)},
        {"v_pages": torch.randn(20, 16, 2, 32)},
        {n: torch.randn(20, 8, 2, 32) for n in ("k_pages", "v_pages")},
        {"mask": None},
        {"score": tilegen.softcap(2.0)},
        {"kv_lengths": torch.tensor([5, 2, 33, 1, 1]), "q": torch.randn(5, 4, 2, 32),
         "block_table": torch.arange(20).view(5, 4)},
    ],
    ids=["queries", "keys", "heads", "values", "page", "mask", "score", "requests"],
)  # fmt: skip
def test_other_kinds_have_other_plans(changed: dict[str, Any]) -> None:
    given = call(mask=BOTTOM, kv_lengths=torch.tensor([40, 2, 33]))
    plans.forget()
    tilegen.attention_paged(**given)
    assert len(plans.by_call) == 1
    tilegen.attention_paged(**given | changed)
    assert len(plans.by_call) == 2


def test_values_in_keys_are_of_a_kind_of_their_own() -> None:
    """After calls with values apart, which kernels for values in keys would not read."""
    keys = torch.randn(20, 16, 1, 48)
    given = call(q=torch.randn(3, 4, 2, 48), k_pages=keys, v_pages=keys[..., :32].clone())
    plans.forget()
    apart = tilegen.attention_paged(**given)
    inside = tilegen.attention_paged(**given | {"v_pages": keys[..., :32]})
    assert len(plans.by_call) == 2
    torch.testing.assert_close(inside, apart)


def test_addresses_and_strides_are_part_of_the_kind() -> None:
    """Kernels for aligned tensors are for no others, wherever the packed queries came from."""
    whole = torch.zeros(20 * 16 * 2 * 32 + 4)
    odd = whole[1:-3].view(20, 16, 2, 32)
    plain = call(kv_lengths=torch.tensor([60, 2, 33]))

    def key(**changed: Any) -> Any:
        q, k, v, table, lengths = (plain | changed).values()
        pages = Pages(table, lengths, None, None, None, "NHD", None)
        form = paged_call.PagedForm.of(q, k, v, pages)
        return form.is_aligned, form.key(q, Changes(tilegen.full(), pages=pages))

    (is_aligned, first), (still, second) = key(), key(q=torch.randn(3, 4, 2, 33)[..., :32])
    assert is_aligned
    assert still, "copied: heads do not lie inside of rows"
    assert first == second
    for name, changed in {
        "address": {"k_pages": odd},
        "stride": {"k_pages": torch.zeros(20, 16, 2, 33)[..., :32]},
        "queries": {"q": torch.zeros(3, 2, 4, 33)[..., :32].transpose(1, 2)},
    }.items():
        actual = key(**changed)
        assert not actual[0], name
        assert actual[1] != first, name
    narrow = {"v_pages": torch.zeros(20, 16, 2, 23)}
    assert not key(**narrow)[0]
    assert key(k_pages=torch.zeros(1, 16, 2, 32), v_pages=torch.zeros(1, 16, 2, 24))[0]


# --------------------------------------------------------------------------------------------------
# Problems and choices


def test_problems_say_their_pages() -> None:
    text = "b4 hq32 hkv8 q1 kv8192 d128 bf16 full page16"
    problem = AttentionProblem.parse(text)
    assert (problem.page, problem.key) == (16, text)
    assert problem.bucket.page == 16
    with pytest.raises(Unsupported, match="page must be a power of two of at most 256 keys"):
        AttentionProblem.parse("hq1 q1 d64 fp16 page24")


def test_pages_have_kernels_of_their_own() -> None:
    problem = AttentionProblem.parse("b4 hq32 hkv8 q1 kv8192 d128 bf16 full page16")
    assert kernels_of(problem, H200, "forward") == ("fwd_paged", "fwd_combine")
    with pytest.raises(Unsupported, match="two_pass does not read pages of a cache"):
        kernels_of(problem, H200, "backward")


@pytest.mark.parametrize(
    "mask, visited",
    [
        ("dilated(3)", "0, kv"),
        ("block_sparse(@:50,16)&causal(bottom_right)", "0, up to the diagonal"),
        ("documents(@q:64)&same_id(@q:64,@k:64)", "the document"),
        ("causal&(kv_prefix(5)|window(15,-1))|keep((q-k)%3==0)", "0, kv"),
        ("~block_sparse(@bh:50,16)&~causal", "from the diagonal"),
    ],
)
def test_listed_masks_visit_the_tiles_that_their_closed_forms_leave(
    mask: str, visited: str
) -> None:
    """No pair is lost, and none is taken for kept that is dropped."""
    listed = AttentionProblem.parse(f"hq32 hkv8 q40 kv100 d128 bf16 {mask} page16")
    normal = listed.normal()
    assert "unlisted(" in normal.key
    assert AttentionProblem.parse(normal.key).key == normal.key
    with pytest.raises(Unsupported, match="use the problem's normal form"):
        render(listed, TileConfig.parse("m16n64k1024w4s2"), "fwd_paged")
    ranges = tile_ranges(normal.mask, "rows", seqlen_q=40, seqlen_kv=100, block_m=10, block_n=10)
    counts = {
        "0, kv": [10, 10, 10, 10],
        "0, up to the diagonal": [7, 8, 9, 10],
        "the document": [7, 7, 7, 7],
        "from the diagonal": [10, 9, 8, 7],
    }
    assert ranges.visited[0, 0].tolist() == counts[visited]
    kept = normal.mask.pairs(40, 100).reshape(4, 10, 10, 10)
    tiles = np.arange(10)
    partial, full = (
        sum((tiles >= lo[0, 0][:, None]) & (tiles < hi[0, 0][:, None]) for lo, hi in pieces)
        for pieces in ranges.pieces
    )
    assert not kept.any((1, 3))[partial + full == 0].any()
    assert kept.all((1, 3))[full == 1].all()


def test_batch_invariant_calls_choose_one_config() -> None:
    """Whatever the batch, the lengths and the pages are."""
    texts = (
        "b1 hq16 hkv2 q1 kv100 d128 bf16 causal(bottom_right) invariant",
        "b64 hq16 hkv2 q1 kv131072 d128 bf16 causal(bottom_right) invariant",
        "b3 hq16 hkv2 q4096 kv4096 d128 bf16 causal(bottom_right) invariant",
        "b3 hq16 hkv2 q40 kv5000 d128 bf16 causal(bottom_right) invariant page16",
        "b3 hq16 hkv2 q40 kv5000 d128 bf16 causal(bottom_right) invariant page128",
    )
    configs: list[tuple[TileConfig, ...]] = []
    for text in texts:
        problem = AttentionProblem.parse(text)
        assert problem.key == text
        chosen = pipeline.choose(problem, H200, "forward")
        assert list(chosen)[1] == "fwd_combine"
        configs.append(tuple(one.config for one in chosen.values()))
    assert len(set(configs)) == 1
    assert configs[0][0] == invariant_config(
        KernelTask.of("fwd_split", AttentionProblem.parse(texts[0]), H200)
    )
    assert not configs[0][0].descriptors


def test_batch_invariant_problems_have_one_record() -> None:
    left, other = (
        AttentionProblem.parse(f"{sizes} d128 bf16 causal invariant")
        for sizes in ("b1 hq16 hkv2 q1 kv100", "b64 hq16 hkv2 q70 kv9000")
    )
    assert left.bucket == other.bucket


def test_no_other_family_takes_batch_invariant_problems() -> None:
    with pytest.raises(Unsupported, match="sums keys in a tile-dependent order"):
        kernels_of(AttentionProblem.parse("hq4 q64 d64 fp16 causal dropout invariant"), H200)


def test_starts_of_queries_are_made_once() -> None:
    tilegen.attention_paged(**call())
    before = len(paged_call._starts)  # pyright: ignore[reportPrivateUsage]
    tilegen.attention_paged(**call())
    assert len(paged_call._starts) == before  # pyright: ignore[reportPrivateUsage]
