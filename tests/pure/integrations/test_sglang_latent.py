"""Latent attention (MLA) that sglang computes by tilegen's back end, against its definition: from
the cache in absorbed form, and whole prompts with keys and values of each head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilegen
from tests.support.engine_batches import LENGTHS, QUERIES, Kept, sglang_new
from tests.support.engine_classes import FORMS, fill_captured, sglang_classes
from tests.support.engine_latents import Latents
from tilegen.errors import Unsupported
from tilegen.runtime.call import values_in_keys

TOLERANCE = {"atol": 5e-6, "rtol": 5e-6}
PROMPTS = [37, 9, 1]
PARENTS = torch.tensor([[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4], [3, -1, 0, 1, 5, 1]])
DRAFTED = [37, 50, 6]


@pytest.fixture(params=FORMS)
def sglang(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return sglang_classes(request.param, monkeypatch)


def absorbed(backend: Any, latents: Latents, layer: Any, batch: Any, **given: Any) -> torch.Tensor:
    """Compute the model's result of a forward over the cache."""
    run = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
    out = run(*sglang_new(latents.absorbed), layer, batch, **given)
    assert out.shape == (sum(latents.absorbed.queries), layer.tp_q_head_num * layer.v_head_dim)
    return latents.of_heads(out)


def of_heads(backend: Any, latents: Latents, layer: Any, batch: Any, **given: Any) -> torch.Tensor:
    """Return a forward over keys and values of each head, a half of the same rows as in sglang."""
    q, k, v = (x.float() for x in sglang_new(latents.heads))
    v = torch.cat([torch.full_like(v, float("nan")), v], -1)[..., v.shape[2] :]
    return backend.forward_extend(q, k, v, layer, batch, save_kv_cache=False, **given)


def check(out: torch.Tensor, latents: Latents, kept: Kept) -> None:
    torch.testing.assert_close(out.double(), latents.expected(kept), **TOLERANCE)


@pytest.mark.parametrize("page", [1, 16, 48, 64])
@pytest.mark.parametrize("mode, queries", [("DECODE", [1, 1, 1, 1]), ("MIXED", QUERIES)])
def test_the_cache_is_read_in_absorbed_form(
    sglang: Any, mode: str, queries: list[int], page: int
) -> None:
    latents = Latents.of(queries, LENGTHS)
    runner = latents.runner(page, sglang.Latents)
    backend = sglang.Backend(runner)
    batch = latents.batch(runner, sglang.Mode[mode])
    backend.init_forward_metadata(batch)
    layer = latents.layer(sglang.Type.DECODER, absorbed=True)
    check(absorbed(backend, latents, layer, batch), latents, Kept())
    k, v = map(backend._pages, runner.token_to_kv_pool.get_kv_buffer(0))
    q = latents.absorbed.q[0][None]
    assert values_in_keys(*(x.transpose(1, 2) for x in (q, k, v))), "values are loaded apart"
    again = backend.forward_extend(sglang_new(latents.absorbed)[0], None, None, layer, batch)
    check(latents.of_heads(again), latents, Kept())


@pytest.mark.parametrize("mode, queries", [("DECODE", [1, 1]), ("EXTEND", [9, 4])])
def test_the_sizes_of_deepseek(sglang: Any, mode: str, queries: list[int]) -> None:
    latents = Latents.of(queries, [50, 23], heads=16, rank=512, rope=64, dtype=torch.bfloat16)
    runner = latents.runner(64, sglang.Latents)
    backend = sglang.Backend(runner)
    batch = latents.batch(runner, sglang.Mode[mode])
    backend.init_forward_metadata(batch)
    layer = latents.layer(sglang.Type.DECODER, absorbed=True)
    out = absorbed(backend, latents, layer, batch)
    torch.testing.assert_close(out, latents.expected(Kept()), atol=0.06, rtol=0.02)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("form", ["trees", "chains"])
def test_drafts_are_verified(sglang: Any, form: str, page: int) -> None:
    latents = Latents.of([6, 6, 6], DRAFTED)
    trees = list(tilegen.ancestors(PARENTS)) if form == "trees" else []
    runner = latents.runner(page, sglang.Latents)
    backend = sglang.Backend(runner)
    batch = latents.batch(runner, sglang.Mode.TARGET_VERIFY, trees or None)
    backend.init_forward_metadata(batch)
    layer = latents.layer(sglang.Type.DECODER, absorbed=True)
    kept = Kept(right=float("inf") if trees else 0, trees=trees)
    check(absorbed(backend, latents, layer, batch), latents, kept)


@pytest.mark.parametrize("form", ["decoding", "trees", "chains"])
def test_a_graph_reads_tensors_filled_before_each_replay(sglang: Any, form: str) -> None:
    tokens = 1 if form == "decoding" else 6
    latents = Latents.of([tokens] * 3, DRAFTED)
    trees = list(tilegen.ancestors(PARENTS)) if form == "trees" else []
    runner = latents.runner(16, sglang.Latents)
    backend = sglang.Backend(runner)
    backend.init_cuda_graph_state(4, 4 * tokens)
    mode = sglang.Mode.DECODE if form == "decoding" else sglang.Mode.TARGET_VERIFY
    batch = latents.batch(runner, mode, trees or None)
    fill_captured(backend, batch)
    layer = latents.layer(sglang.Type.DECODER, absorbed=True)
    kept = Kept(right=float("inf") if trees else 0, trees=trees)
    check(absorbed(backend, latents, layer, batch), latents, kept)


def test_whole_prompts_have_keys_of_each_head(sglang: Any) -> None:
    """The cache, which sglang writes itself, is neither read nor written."""
    latents = Latents.of(PROMPTS, PROMPTS)
    runner = latents.runner(16, sglang.Latents)
    backend = sglang.Backend(runner)
    batch = latents.batch(runner, sglang.Mode.EXTEND)
    backend.init_forward_metadata(batch)
    layer = latents.layer(sglang.Type.DECODER, absorbed=False)
    check(of_heads(backend, latents, layer, batch), latents, Kept())
    cached, _ = runner.token_to_kv_pool.get_kv_buffer(0)
    assert cached[16:].isnan().all()
    layer = latents.layer(sglang.Type.DECODER, absorbed=True)  # as deterministic inference has it
    check(absorbed(backend, latents, layer, batch), latents, Kept())


def test_one_head_of_a_rank_is_no_form(sglang: Any) -> None:
    """Heads say nothing of the form where a rank of many has one."""
    latents = Latents.of(PROMPTS, PROMPTS, heads=1)
    runner = latents.runner(1, sglang.Latents)
    backend = sglang.Backend(runner)
    batch = latents.batch(runner, sglang.Mode.EXTEND)
    backend.init_forward_metadata(batch)
    for run, is_absorbed in ((of_heads, False), (absorbed, True)):
        layer = latents.layer(sglang.Type.DECODER, absorbed=is_absorbed)
        check(run(backend, latents, layer, batch), latents, Kept())


def test_layers_with_one_number_keep_their_own_tensors(sglang: Any) -> None:
    latents = Latents.of(PROMPTS, PROMPTS)
    runner = latents.runner(16, sglang.Latents)
    backend = sglang.Backend(runner)
    batch = latents.batch(runner, sglang.Mode.EXTEND)
    backend.init_forward_metadata(batch)
    for left, cap in ((7, 0.0), (3, 1.5)):
        for run, is_absorbed in ((of_heads, False), (absorbed, True)):
            results = {"sliding_window_size": left, "logit_cap": cap}
            layer = latents.layer(sglang.Type.DECODER, absorbed=is_absorbed, **results)
            check(run(backend, latents, layer, batch), latents, Kept(left=left, cap=cap))


@pytest.mark.skipif(FORMS == ["stand-in"], reason="needs the package sglang, whose layers call")
@pytest.mark.parametrize("is_absorbed", [False, True])
def test_layers_of_sglang_call(monkeypatch: pytest.MonkeyPatch, is_absorbed: bool) -> None:
    """Before whole prompts models write to the pool that the back end of the forward has."""
    sglang = sglang_classes("installed", monkeypatch)
    from sglang.srt.layers.radix_attention import RadixAttention  # pyright: ignore
    from sglang.srt.model_executor import forward_context as theirs  # pyright: ignore

    latents = Latents.of(PROMPTS, PROMPTS)
    runner = latents.runner(16, sglang.Latents)
    backend = sglang.Backend(runner)
    batch = latents.batch(runner, sglang.Mode.EXTEND)
    batch.global_num_token_non_padded_cpu = None
    backend.init_forward_metadata(batch)
    attention_layer = latents.layer(sglang.Type.DECODER, absorbed=is_absorbed)
    heads = (
        attention_layer.tp_q_head_num,
        attention_layer.qk_head_dim,
        attention_layer.scaling,
        attention_layer.tp_k_head_num,
    )
    layer = RadixAttention(*heads, layer_id=0, v_head_dim=attention_layer.v_head_dim)
    new = latents.absorbed if is_absorbed else latents.heads
    with theirs.forward_context(theirs.ForwardContext(backend)):
        assert theirs.get_token_to_kv_pool() is runner.token_to_kv_pool
        assert theirs.get_req_to_token_pool() is runner.req_to_token_pool
        out = layer(*(x.float() for x in sglang_new(new)), batch, save_kv_cache=is_absorbed)
    check(latents.of_heads(out) if is_absorbed else out, latents, Kept())


def test_models_find_the_pools_by_their_names(sglang: Any) -> None:
    runner = Latents.of([1], [9]).runner(1, sglang.Latents)
    backend = sglang.Backend(runner)
    assert backend.token_to_kv_pool is runner.token_to_kv_pool
    assert backend.req_to_token_pool is runner.req_to_token_pool


# --------------------------------------------------------------------------------------------------
# What is refused


def test_caches_that_are_refused(sglang: Any) -> None:
    runner = Latents.of([1], [9]).runner(1, sglang.Latents)
    runner.token_to_kv_pool.use_dsa = True
    with pytest.raises(Unsupported, match="keys that an indexer chooses"):
        sglang.Backend(runner)
    runner.token_to_kv_pool = sglang.Windows(16, 1)
    with pytest.raises(Unsupported, match="pools for windows of latent attention"):
        sglang.Backend(runner)
    runner.token_to_kv_pool = SimpleNamespace()  # of which nothing is known
    with pytest.raises(Unsupported, match="keys that an indexer chooses"):
        sglang.Backend(runner)


@pytest.mark.parametrize(
    "mode, queries", [("EXTEND", [9, 4]), ("DECODE", [1, 1]), ("TARGET_VERIFY", [6, 6])]
)
def test_keys_of_each_head_are_those_of_whole_prompts(
    sglang: Any, mode: str, queries: list[int]
) -> None:
    latents = Latents.of(queries, [9, 23])
    runner = latents.runner(1, sglang.Latents)
    backend = sglang.Backend(runner)
    batch = latents.batch(runner, sglang.Mode[mode])
    backend.init_forward_metadata(batch)
    layer = latents.layer(sglang.Type.DECODER, absorbed=False)
    for before in (batch.extend_prefix_lens_cpu, None, [0, 0]):
        batch.extend_prefix_lens_cpu = before
        if mode == "EXTEND" and before == [0, 0]:
            continue
        with pytest.raises(Unsupported, match="keys of each head beside the latent cache"):
            of_heads(backend, latents, layer, batch)


def test_batch_invariance_has_one_form(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether prompts have keys per head depends on the rest of the batch: batch invariance refuses
    it."""
    monkeypatch.setenv("TILEGEN_BATCH_INVARIANT", "1")
    latents = Latents.of(PROMPTS, PROMPTS)
    runner = latents.runner(16, sglang.Latents)
    backend = sglang.Backend(runner)
    batch = latents.batch(runner, sglang.Mode.EXTEND)
    backend.init_forward_metadata(batch)
    with pytest.raises(Unsupported, match="keys of each head under TILEGEN_BATCH_INVARIANT=1"):
        of_heads(backend, latents, latents.layer(sglang.Type.DECODER, absorbed=False), batch)
    layer = latents.layer(sglang.Type.DECODER, absorbed=True)
    check(absorbed(backend, latents, layer, batch), latents, Kept())


def test_parts_of_queries_and_keys_come_joined(sglang: Any) -> None:
    latents = Latents.of([1, 1], [9, 23])
    runner = latents.runner(1, sglang.Latents)
    backend = sglang.Backend(runner)
    batch = latents.batch(runner, sglang.Mode.DECODE)
    backend.init_forward_metadata(batch)
    layer = latents.layer(sglang.Type.DECODER, absorbed=True)
    part = torch.ones(2, 1, 16)
    for name in ("q_rope", "k_rope", "topk_indices"):
        with pytest.raises(Unsupported, match=f"does not take {name}"):
            absorbed(backend, latents, layer, batch, **{name: part})
