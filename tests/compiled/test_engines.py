"""Batches of vLLM and sglang through emitted kernels, against dense attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tilegen
from tests.support import engine_batches as batches
from tests.support.engine_batches import QUERIES, Kept, Tokens
from tests.support.engine_classes import sglang_classes
from tests.support.engine_latents import Latent, Latents, Prompts, merged
from tests.support.engine_stand_ins import install
from tilegen.runtime import plans

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
TOLERANCE = {"atol": 3e-6, "rtol": 3e-6}


@pytest.mark.parametrize("capture", [False, True])
def test_a_mixed_batch_of_vllm(monkeypatch: pytest.MonkeyPatch, capture: bool) -> None:
    theirs = install(monkeypatch, "vllm")
    from tilegen.integrations import vllm_backend

    classes = SimpleNamespace(**theirs | vars(vllm_backend))
    tokens = Tokens.of(QUERIES)
    layer = {"sliding_window": 7, "logits_soft_cap": 1.5, "sinks": SINKS}
    output, _ = batches.vllm_forward(classes, tokens, layer, capture=capture)
    expected = tokens.expected(Kept(left=6, cap=1.5, sinks=SINKS))
    torch.testing.assert_close(output[: len(expected)].double(), expected, **TOLERANCE)
    assert (output[len(expected) :] == -7).all(), "what is padding was written"


@pytest.mark.parametrize("causal, drafts", [(True, [3, 1, 2]), (False, [3, 3, 3])])
def test_latent_attention_of_vllm(
    monkeypatch: pytest.MonkeyPatch, causal: bool, drafts: list[int]
) -> None:
    theirs = install(monkeypatch, "vllm")
    from tilegen.integrations import vllm_latent

    classes = SimpleNamespace(**theirs | vars(vllm_latent))
    requests = [*zip(drafts, [37, 5, 50], strict=True), (0, 0)]
    latent = Latent(requests, rank=128, drafts=2)
    plans.forget()
    out = latent.decode(classes, causal=causal, capture=True, padding=2)
    assert [key[0].latent for key in plans.by_problem._values] == [True]  # pyright: ignore
    expected = latent.expected(causal=causal)
    torch.testing.assert_close(out[: len(expected)].double(), expected, **TOLERANCE)


def test_prompts_of_latent_attention_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = install(monkeypatch, "vllm")
    from tilegen.integrations import vllm_latent

    prompts = Prompts()
    parts = prompts.parts(prompts.backend(SimpleNamespace(**theirs | vars(vllm_latent))))
    assert all(x.is_contiguous() for part in parts for x in part)
    torch.testing.assert_close(merged(parts), prompts.expected(), **TOLERANCE)


@pytest.mark.parametrize("mode, page", [("MIXED", 16), ("DECODE", 1)])
def test_batches_of_sglang(monkeypatch: pytest.MonkeyPatch, mode: str, page: int) -> None:
    theirs = install(monkeypatch, "sglang")
    from tilegen.integrations.sglang_backend import TilegenAttnBackend

    tokens = Tokens.of(QUERIES if mode == "MIXED" else [1])
    runner = batches.sglang_runner(tokens, page)
    backend = TilegenAttnBackend(runner)
    batch = batches.sglang_batch(runner, tokens, theirs["ForwardMode"][mode])
    backend.init_forward_metadata(batch)
    decoder = theirs["AttentionType"].DECODER
    layer = batches.sglang_layer(0, decoder, sliding_window_size=6, logit_cap=1.5)
    run = backend.forward_decode if mode == "DECODE" else backend.forward_extend
    out = run(*batches.sglang_new(tokens), layer, batch, sinks=SINKS)
    expected = tokens.expected(Kept(left=6, cap=1.5, sinks=SINKS)).flatten(1)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE)


def test_trees_of_drafts_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = install(monkeypatch, "sglang")
    from tilegen.integrations.sglang_backend import TilegenAttnBackend

    tokens = Tokens.drafts([37, 9], 6)
    trees = list(tilegen.ancestors(torch.tensor([[-1, 0, 0, 1, 1, 2], [-1, -1, 0, 1, -1, 4]])))
    runner = batches.sglang_runner(tokens, 16)
    backend = TilegenAttnBackend(runner)
    batch = batches.sglang_drafts(runner, tokens, theirs["ForwardMode"].TARGET_VERIFY, trees)
    backend.init_forward_metadata(batch)
    layer = batches.sglang_layer(0, theirs["AttentionType"].DECODER, sliding_window_size=20)
    out = backend.forward_extend(*batches.sglang_new(tokens), layer, batch)
    expected = tokens.expected(Kept(left=20, trees=trees)).flatten(1)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE)


@pytest.mark.parametrize("mode", ["DECODE", "MIXED", "TARGET_VERIFY", "EXTEND"])
def test_latent_attention_of_sglang(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Whole prompts have keys and values of each head, other batches read the cache, values with
    keys."""
    plans.forget()
    sglang = sglang_classes("stand-in", monkeypatch)
    trees = list(tilegen.ancestors(torch.tensor([[-1, 0, 0, 1, 1, 2], [-1, -1, 0, 1, -1, 4]])))
    queries = {"DECODE": [1, 1], "MIXED": [9, 1], "TARGET_VERIFY": [6, 6], "EXTEND": [37, 9]}[mode]
    latents = Latents.of(queries, [37, 9])
    runner = latents.runner(16, sglang.Latents)
    backend = sglang.Backend(runner)
    batch = latents.batch(runner, sglang.Mode[mode], trees)
    backend.init_forward_metadata(batch)
    if mode == "EXTEND":
        layer = latents.layer(sglang.Type.DECODER, absorbed=False)
        new = (x.float() for x in batches.sglang_new(latents.heads))
        out = backend.forward_extend(*new, layer, batch, save_kv_cache=False)
    else:
        layer = latents.layer(sglang.Type.DECODER, absorbed=True)
        run = backend.forward_decode if mode == "DECODE" else backend.forward_extend
        out = latents.of_heads(run(*batches.sglang_new(latents.absorbed), layer, batch))
    (key,) = plans.by_problem._values  # pyright: ignore[reportPrivateUsage]
    assert key[0].latent == (mode != "EXTEND")
    kept = Kept(right=float("inf"), trees=trees) if mode == "TARGET_VERIFY" else Kept()
    torch.testing.assert_close(out.double(), latents.expected(kept), **TOLERANCE)
