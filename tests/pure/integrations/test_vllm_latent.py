"""tilegen's back ends for vLLM's models with multi-head latent attention (MLA), against what vLLM
asks of them: its recorded interface everywhere, the package itself where it is installed."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine_batches import HEADS, ORDERS, SLOPES, Kept, dense, drawn
from tests.support.engine_contracts import methods, parameters, recorded, written
from tests.support.engine_latents import (
    DIM_V,
    FORMS,
    NOPE_VLLM,
    ROPE,
    SCALE,
    Latent,
    Prompts,
    latent_classes,
    merged,
    needs_vllm,
)
from tests.support.engine_stand_ins import no_waiting
from tilegen.errors import Unsupported

NAMES = recorded("vllm")["names"]
LAYER = "vllm.model_executor.layers.attention.mla_attention"
PREFILL = "vllm.v1.attention.backends.mla.prefill"
TOLERANCE = {"atol": 5e-6, "rtol": 5e-6}


@pytest.fixture(params=FORMS)
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return our classes, and those of vLLM's that a batch is made of."""
    return latent_classes(request.param, monkeypatch)


# --------------------------------------------------------------------------------------------------
# The interface


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ("TilegenLatentBackend", "vllm.v1.attention.backend:AttentionBackend"),
        ("TilegenLatentMetadataBuilder", f"{LAYER}:MLACommonMetadataBuilder"),
        ("TilegenLatentImpl", f"{LAYER}:MLACommonImpl"),
        ("TilegenPrefillBackend", f"{PREFILL}.base:MLAPrefillBackend"),
    ],
)
def test_methods_have_the_parameters_that_vllm_gives(vllm: Any, ours: str, theirs: str) -> None:
    asked = methods(NAMES[theirs])
    results = {k: v for k, v in vars(getattr(vllm, ours)).items() if inspect.isroutine(v)}
    assert not getattr(vllm, ours).__abstractmethods__
    for name in set(results) & set(asked):
        words = asked[name].partition("(")[0].split()
        assert isinstance(results[name], staticmethod) == ("static" in words), name
        assert isinstance(results[name], classmethod) == ("class" in words), name
        plain = getattr(results[name], "__func__", results[name])
        every = inspect.signature(plain).parameters.values()
        rest = {one.name for one in every if one.kind is one.VAR_KEYWORD}
        taken = [one for one in written(plain) if one not in rest]
        others = parameters(asked[name])[len(taken) :]
        assert [*taken, *others] == parameters(asked[name]), name
        assert rest or all(one.endswith("=") for one in others), name
    assert {one for one in set(results) - set(asked) if not one.startswith("_")} == set()


def test_levels_that_are_set(vllm: Any) -> None:
    builder = vllm.TilegenLatentMetadataBuilder
    known = NAMES[f"{LAYER}:MLACommonMetadataBuilder"]["names"]
    assert {"query_len_support", "supports_non_causal_multi_token_decode"} <= set(known)
    assert builder.query_len_support is vllm.Levels.VARLEN
    assert builder._cudagraph_support is vllm.Graphs.UNIFORM_BATCH
    known = NAMES["vllm.v1.attention.backend:AttentionBackend"]["names"]
    assert {"supported_dtypes", "forward_includes_kv_cache_update"} <= set(known)
    assert vllm.TilegenLatentBackend.get_name() == vllm.TilegenPrefillBackend.get_name() == "CUSTOM"
    assert vllm.TilegenLatentBackend.is_mla()
    assert vllm.TilegenLatentBackend.forward_includes_kv_cache_update, "as vLLM's own for MLA"
    assert vllm.TilegenLatentBackend.get_builder_cls() is builder
    assert vllm.TilegenLatentBackend.get_impl_cls() is vllm.TilegenLatentImpl


# --------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"attn_type": "encoder"}, "encoder"),
        ({"kv_cache_dtype": "fp8"}, "not fp8"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "fp8_ds_mla"),
        ({"alibi_slopes": SLOPES}, "no ALiBi"),
        ({"sliding_window": 128}, "no sliding windows"),
        ({"logits_soft_cap": 1.5}, "no soft caps"),
        ({"indexer": object()}, "sparse"),
    ],
)
def test_layers_that_are_refused(vllm: Any, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(Unsupported, match=named):
        Latent([(1, 5)]).impl(vllm, **changed)


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"causal": torch.ones(1, dtype=torch.int32)}, "causal"),
        ({"mm_req_doc_ranges": {0: [(1, 4)]}}, "images"),
        ({"rswa_prefix_lens": torch.ones(1)}, "R-SWA"),
    ],
)
def test_batches_that_are_refused(vllm: Any, changed: dict[str, Any], named: str) -> None:
    latent = Latent([(1, 5)])
    with pytest.raises(Unsupported, match=named):
        latent.builder(vllm).build(0, latent.batch(vllm, **changed))


def test_batch_invariance_is_vllms_setting_without_cached_prefixes(
    vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    latent = Latent([(1, 5)])
    config = latent.config()
    monkeypatch.setattr(latent, "config", lambda: config)
    monkeypatch.setenv("TILEGEN_BATCH_INVARIANT", "0")
    config.cache_config.enable_prefix_caching = True
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", False)
    latent.impl(vllm)
    Prompts().backend(vllm)
    assert os.environ["TILEGEN_BATCH_INVARIANT"] == "0"
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True)
    with pytest.raises(Unsupported, match="--no-enable-prefix-caching"):
        latent.impl(vllm)
    config.cache_config.enable_prefix_caching = False
    for make in (latent.impl, Prompts().backend):
        monkeypatch.setenv("TILEGEN_BATCH_INVARIANT", "0")
        make(vllm)
        assert os.environ["TILEGEN_BATCH_INVARIANT"] == "1"


# --------------------------------------------------------------------------------------------------
# What is decoded

BATCHES = {
    "tokens": Latent([(1, 37), (1, 1), (1, 16)]),
    "drafts": Latent([(3, 37), (3, 3), (3, 50)], drafts=2),
    "drafts of any number": Latent([(3, 37), (1, 20), (2, 2)], drafts=2),
    "padded": Latent([(3, 37), (3, 48), (0, 0), (0, 0)], drafts=2),
    "a head size of 576": Latent([(1, 20), (1, 5)], rank=512, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("capture", [False, True])
def test_a_batch_equals_dense_attention(vllm: Any, name: str, capture: bool) -> None:
    batch = BATCHES[name]
    out = batch.decode(vllm, capture=capture, padding=3 if name == "padded" else 0)
    expected = batch.expected()
    allowed = TOLERANCE if batch.dtype == torch.float32 else {"atol": 2e-3, "rtol": 8e-3}
    torch.testing.assert_close(out[: len(expected)].double(), expected, **allowed)


@pytest.mark.parametrize("drafts", [2, 1])
def test_drafts_that_all_see_all(vllm: Any, drafts: int) -> None:
    """Of any number, more than are verified, too."""
    batch = replace(BATCHES["drafts"], drafts=drafts)
    out = batch.decode(vllm, causal=False).double()
    torch.testing.assert_close(out, batch.expected(causal=False), **TOLERANCE)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("page", [16, 64])
def test_all_orders_of_the_cache_are_read_where_they_are(vllm: Any, order: str, page: int) -> None:
    batch = BATCHES["drafts"]
    out = batch.decode(vllm, order=order, page=page).double()
    torch.testing.assert_close(out, batch.expected(), **TOLERANCE)


def test_queries_may_come_in_one_piece(vllm: Any) -> None:
    batch = BATCHES["tokens"]
    made = batch.builder(vllm).build(0, batch.batch(vllm))
    out, _ = batch.impl(vllm).forward_mqa(torch.cat(batch.q), batch.cache(), made, None)
    torch.testing.assert_close(out.double(), batch.expected(), **TOLERANCE)


def test_decoded_requests_have_as_many_tokens_as_are_verified(vllm: Any) -> None:
    """What has more is a prompt, and lies behind; `max_query_len` is its."""
    latent = Latent([(3, 37), (2, 20), (9, 9)], drafts=2)
    builder = latent.builder(vllm)
    builder._prefill_backend = SimpleNamespace(get_name=str, prepare_metadata=lambda made: None)
    lengths = torch.tensor(latent.lengths, dtype=torch.int32)
    made = builder.build(0, latent.batch(vllm, seq_lens_cpu_upper_bound=lengths))
    assert (made.num_decodes, made.decode.longest_q) == (2, 3)
    assert made.decode.q_starts.tolist() == [0, 3, 5]
    out, _ = latent.impl(vllm).forward_mqa(torch.cat(latent.q)[:5], latent.cache(), made, None)
    torch.testing.assert_close(out.double(), latent.expected()[:5], **TOLERANCE)


def test_a_graph_is_captured_for_the_longest_sequence(vllm: Any) -> None:
    """Its kernels are those of the first such batch, which is run before it is captured."""
    own = BATCHES["drafts"]
    builder, batch = own.builder(vllm), own.batch(vllm, max_seq_len=52)

    def longest() -> tuple[int, int]:
        captured = builder.build_for_cudagraph_capture(batch)
        return builder.build(0, batch).decode.longest_kv, captured.decode.longest_kv

    assert builder.build(0, batch).decode.longest_kv == 64
    assert longest() == (52, 64)


@needs_vllm
def test_the_host_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own, vllm = BATCHES["drafts of any number"], latent_classes("installed", monkeypatch)
    builder, batch = own.builder(vllm), own.batch(vllm)
    no_waiting(monkeypatch)
    assert builder.build(0, batch).decode.seq_lens.data_ptr() == batch.seq_lens.data_ptr()


# --------------------------------------------------------------------------------------------------
# Prompts


def test_prompts_and_the_chunks_that_are_cached_of_them(vllm: Any) -> None:
    """Merged by lse, as vLLM does, they are the whole."""
    prompts = Prompts()
    backend = prompts.backend(vllm)
    alone = backend.run_prefill_new_tokens(prompts.q, *prompts.own, return_softmax_lse=False)
    parts = prompts.parts(backend)
    for out, lse in parts:
        assert out.is_contiguous()
        assert lse.is_contiguous()
        assert (lse.dtype, lse.shape) == (torch.float32, prompts.q.shape[1::-1])
    assert torch.equal(alone, parts[0][0])
    torch.testing.assert_close(alone.double(), prompts.expected(cached=False), **TOLERANCE)
    torch.testing.assert_close(merged(parts), prompts.expected(), **TOLERANCE)


@needs_vllm
def test_a_layer_of_vllm_equals_attention_of_projected_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of drafts, which are computed on latent keys, and of a prompt, which is not."""
    vllm = latent_classes("installed", monkeypatch)
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention  # pyright: ignore

    latent = Latent([(3, 37), (3, 20), (9, 9)], drafts=2)
    lengths = torch.tensor(latent.lengths, dtype=torch.int32)
    up = drawn(latent.rank, HEADS, NOPE_VLLM + DIM_V, 5) / latent.rank**0.5
    builder = latent.builder(vllm)
    builder._prefill_backend = Prompts().backend(vllm)
    made = builder.build(0, latent.batch(vllm, seq_lens_cpu_upper_bound=lengths))
    q = drawn(int(latent.starts[-1]), HEADS, NOPE_VLLM + ROPE, 6)
    keys = torch.cat([k[len(k) - len(new) :] for k, new in zip(latent.keys, latent.q, strict=True)])
    impl = latent.impl(vllm, kv_b_proj=lambda c: ((c @ up.flatten(1)),))
    layer = SimpleNamespace(
        **{"impl": impl, "num_heads": HEADS, "v_head_dim": DIM_V, "kv_lora_rank": latent.rank},
        **{"qk_nope_head_dim": NOPE_VLLM, "qk_rope_head_dim": ROPE, "kv_cache_dtype": "auto"},
        **dict.fromkeys(
            ("use_pcp", "is_aiter_triton_fp4_bmm_enabled", "is_amx_bmm_enabled"), False
        ),
        **dict.fromkeys(("q_pad_num_heads", "prefill_backend", "_k_scale"), None),
        is_aiter_triton_fp8_bmm_enabled=False,
        W_UK_T=up[..., :NOPE_VLLM].permute(1, 2, 0),
        W_UV=up[..., NOPE_VLLM:].transpose(0, 1),
    )
    layer._v_up_proj = partial(MLAAttention._v_up_proj, layer)
    given = q, keys[:, : latent.rank], keys[:, None, latent.rank :], latent.cache(), made
    out = torch.full((len(q), HEADS * DIM_V), float("nan"))
    assert MLAAttention.forward_impl(layer, *given, output=out) is out
    for i, key in enumerate(latent.keys):
        rows = slice(*latent.starts[i : i + 2])
        projected = torch.einsum("kr,rhc->khc", key[:, : latent.rank].double(), up.double())
        rotated = key[:, None, latent.rank :].expand(-1, HEADS, -1)
        k = torch.cat([projected[..., :NOPE_VLLM], rotated], -1)
        expected = dense(q[rows], k, projected[..., NOPE_VLLM:], Kept(), scale=SCALE).flatten(1)
        torch.testing.assert_close(out[rows].double(), expected, atol=1e-5, rtol=1e-5)


def test_output_of_prompts_is_not_quantised(vllm: Any) -> None:
    prompts = Prompts()
    with pytest.raises(Unsupported, match="quantise"):
        prompts.backend(vllm).run_prefill_new_tokens(
            prompts.q, *prompts.own, return_softmax_lse=False, output_scale=torch.ones(1)
        )
