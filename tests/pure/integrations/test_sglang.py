"""tilegen's back end for sglang, against what sglang asks of one: its recorded interface, and where
it is installed the package itself."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine_batches import (
    QUERIES,
    Kept,
    Pool,
    Tokens,
    sglang_batch,
    sglang_layer,
    sglang_new,
    sglang_runner,
    speculation,
)
from tests.support.engine_classes import FORMS, fill_captured, sglang_classes
from tests.support.engine_contracts import methods, parameters, recorded
from tests.support.engine_stand_ins import install
from tilegen.errors import Unsupported

NAMES = {name.partition(":")[2]: one for name, one in recorded("sglang")["names"].items()}
BASE = recorded("sglang")["names"]["sglang.srt.layers.attention.base_attn_backend:AttentionBackend"]
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
TOLERANCE = {"atol": 2e-6, "rtol": 2e-6}


@pytest.fixture(params=FORMS)
def sglang(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return sglang_classes(request.param, monkeypatch)


# --------------------------------------------------------------------------------------------------
# The interface


def written(function: Any) -> list[str]:
    """Return the parameters of a function of ours as the record has them."""
    stars = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    given = inspect.signature(function).parameters.values()
    return [
        stars.get(one.kind, "") + one.name + "=" * (one.default is not one.empty) for one in given
    ]


def test_methods_have_the_parameters_that_sglang_gives(sglang: Any) -> None:
    asked = methods(BASE)
    results = {k: v for k, v in vars(sglang.Backend).items() if inspect.isroutine(v)}
    public = {name for name in results if not name.startswith("_")}
    assert public == {
        "init_forward_metadata",
        "init_forward_metadata_out_graph",
        "init_cuda_graph_state",
        "get_cuda_graph_seq_len_fill_value",
        "forward_decode",
        "forward_extend",
    }
    for name in public:
        assert written(results[name]) == parameters(asked[name]), name
    assert "forward_metadata" in BASE["names"]


def test_fields_read_of_batches_and_layers_exist() -> None:
    path = Path(__file__).parents[3] / "tilegen" / "integrations" / "sglang_backend.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {one.name: one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}

    def read(where: str, name: str) -> set[str]:
        return {
            one.attr
            for one in ast.walk(functions[where])
            if isinstance(one, ast.Attribute)
            and isinstance(one.value, ast.Name)
            and one.value.id == name
        }

    batch = read("init_forward_metadata", "forward") | read("_batch", "forward")
    batch |= read("init_forward_metadata_out_graph", "forward")
    assert len(batch) >= 8
    for where in ("_drafts_of", "_seen", "_are_whole"):
        batch |= read(where, "forward")
    assert batch <= set(NAMES["ForwardBatch"]["names"])
    speculative = {
        one.attr
        for one in ast.walk(tree)
        if isinstance(one, ast.Attribute)
        and isinstance(one.value, ast.Attribute)
        and one.value.attr == "spec_info"
    }
    assert len(speculative) == 3
    assert speculative <= set(NAMES["SpecInput"]["names"])
    layer = read("_attend", "layer") | read("_changes_of", "layer")
    assert len(layer) >= 12
    assert layer <= set(NAMES["RadixAttention"]["assigned"])
    pool = {"get_kv_buffer", "set_kv_buffer"}
    assert pool <= set(methods(NAMES["MHATokenToKVPool"]))
    for latent in (NAMES["MLATokenToKVPool"], NAMES["HybridLinearKVPool"]):
        assert pool <= set(methods(latent))
        assert "use_dsa" in latent["assigned"]
    assert pool | {"translate_loc_from_full_to_swa"} <= set(methods(NAMES["SWAKVPool"]))
    assert {"layers_mapping", "swa_layer_nums"} <= set(NAMES["SWAKVPool"]["assigned"])
    assert "req_to_token" in NAMES["ReqToTokenPool"]["assigned"]
    runner = read("__init__", "model_runner")
    assert len(runner) >= 8
    assert runner <= set(NAMES["ModelRunner"]["assigned"])


def test_the_installed_package_is_the_one_that_was_read() -> None:
    reason = (
        "needs the package sglang, whose requirements do not go with ours: .ci/run installs it "
        "with the packages that an import needs"
    )
    pytest.importorskip("sglang", reason=reason)
    assert importlib.metadata.version("sglang") == recorded("sglang")["version"]


def test_registering_twice_is_registering_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = install(monkeypatch, "sglang")
    from tilegen.integrations import sglang as entry

    entry.register()
    entry.register()
    assert made["ATTENTION_BACKEND_CHOICES"] == ["triton", "tilegen"]
    backend = made["ATTENTION_BACKENDS"]["tilegen"](sglang_runner(Tokens.of([1]), 1))
    assert type(backend).__name__ == "TilegenAttnBackend"


@pytest.mark.skipif(FORMS == ["stand-in"], reason="needs the package sglang, which registers")
def test_the_installed_package_knows_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_classes("installed", monkeypatch)
    from sglang.srt.arg_groups import choices as arguments  # pyright: ignore
    from sglang.srt.layers.attention import attention_registry  # pyright: ignore
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # pyright: ignore

    from tilegen.integrations import sglang as entry
    from tilegen.integrations.sglang_backend import TilegenAttnBackend

    choices, backends = arguments.ATTENTION_BACKEND_CHOICES, attention_registry.ATTENTION_BACKENDS
    before = [*choices]
    monkeypatch.setitem(backends, "tilegen", None)  # and as it was after the test
    try:
        entry.register()
        entry.register()
        assert choices == [*before, "tilegen"]
    finally:
        choices[:] = before
    assert backends["tilegen"] is entry.create
    assert issubclass(TilegenAttnBackend, AttentionBackend)


# --------------------------------------------------------------------------------------------------
# What is supported


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "another dtype"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "unified pool"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "encoder"),
        ({"prefill_aware_swa": True}, "whole prompts"),
        ({}, "context parallelism"),
    ],
)
def test_models_that_are_refused(
    sglang: Any, changed: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = sglang_runner(Tokens.of([1]), 1)
    vars(runner).update(changed)
    if not changed:
        many = SimpleNamespace(attn_cp_size=1, attn_dcp_size=2)
        monkeypatch.setattr(sys.modules[sglang.Backend.__module__], "get_parallel", lambda: many)
    with pytest.raises(Unsupported, match=named):
        sglang.Backend(runner)


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"is_cross_attention": True}, "across"),
        ({"attn_type": "ENCODER_ONLY"}, "ENCODER_ONLY"),
        ({"attn_type": "DECODER_BIDIRECTIONAL"}, "DECODER_BIDIRECTIONAL"),
        ({"xai_temperature_len": 1024}, "xai_temperature_len"),
        ({"use_irope": True}, "use_irope"),
        ({"pos_encoding_mode": "ALIBI"}, "ALIBI"),
        ({"logit_cap": 1.0, "logit_capping_method": "softsign"}, "softsign"),
    ],
)
def test_layers_that_are_refused(sglang: Any, changed: dict[str, Any], named: str) -> None:
    if name := changed.get("attn_type"):
        changed = {"attn_type": sglang.Type[name]}
    with pytest.raises(Unsupported, match=named):
        forward(sglang, Tokens.of([1]), sglang_layer(0, sglang.Type.DECODER, **changed), "DECODE")


def test_arguments_that_are_refused(sglang: Any) -> None:
    layer = sglang_layer(0, sglang.Type.DECODER)
    tokens = Tokens.of([1])
    forward(sglang, tokens, layer, "DECODE", k_rope=None, return_lse=False)
    with pytest.raises(Unsupported, match="q_rope"):
        forward(sglang, tokens, layer, "DECODE", q_rope=torch.ones(3))


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2", "DLLM_EXTEND", "DECODE"])
def test_forwards_that_are_refused(sglang: Any, mode: str) -> None:
    """Among them a step of a drafter, which decodes with something speculative."""
    runner = sglang_runner(Tokens.of([1]), 1)
    backend = sglang.Backend(runner)
    batch = sglang_batch(runner, Tokens.of([1]), sglang.Mode[mode])
    if mode == "DECODE":
        batch.spec_info = speculation(1, None)
    with pytest.raises(Unsupported, match="verifies drafts, and makes none"):
        backend.init_forward_metadata(batch)
    backend.init_cuda_graph_state(4, 4)
    with pytest.raises(Unsupported, match=r"verif(ies|ying) drafts"):
        backend.init_forward_metadata_out_graph(batch)


def test_nothing_is_prepared_for_no_requests(sglang: Any) -> None:
    backend = sglang.Backend(sglang_runner(Tokens.of([1]), 1))
    backend.init_forward_metadata(SimpleNamespace(forward_mode=sglang.Mode.IDLE))
    assert backend.forward_metadata is None


# --------------------------------------------------------------------------------------------------
# Batches


def forward(
    sglang: Any,
    tokens: Tokens,
    layer: Any,
    mode: str,
    page: int = 1,
    pool: type[Pool] = Pool,
    **given: Any,
) -> torch.Tensor:
    runner = sglang_runner(tokens, page, pool)
    backend = sglang.Backend(runner)
    batch = sglang_batch(runner, tokens, sglang.Mode[mode])
    backend.init_forward_metadata(batch)
    with torch.inference_mode():
        run = backend.forward_decode if mode == "DECODE" else backend.forward_extend
        out = run(*sglang_new(tokens), layer, batch, **given)
    assert out.shape == (sum(tokens.queries), layer.tp_q_head_num * layer.v_head_dim)
    return out


def check(out: torch.Tensor, tokens: Tokens, kept: Kept) -> None:
    torch.testing.assert_close(out.double(), tokens.expected(kept).flatten(1), **TOLERANCE)


@pytest.mark.parametrize(
    "changed, given, kept",
    [
        ({}, {}, Kept()),
        ({"sliding_window_size": 0}, {}, Kept(left=0)),
        ({"sliding_window_size": 1}, {}, Kept(left=1)),
        ({"sliding_window_size": 49}, {}, Kept(left=49)),
        ({"sliding_window_size": None}, {}, Kept()),
        ({"logit_cap": 1.5}, {}, Kept(cap=1.5)),
        (
            {"logit_cap": 1.5, "sliding_window_size": 7},
            {"sinks": SINKS},
            Kept(left=7, cap=1.5, sinks=SINKS),
        ),
    ],
    ids=["causal", "window0", "window1", "window49", "none", "softcap", "all"],
)
def test_a_mixed_batch_equals_dense_attention(
    sglang: Any, changed: dict[str, Any], given: dict[str, Any], kept: Kept
) -> None:
    tokens = Tokens.of(QUERIES)
    layer = sglang_layer(0, sglang.Type.DECODER, **changed)
    check(forward(sglang, tokens, layer, "MIXED", **given), tokens, kept)


@pytest.mark.parametrize("page", [1, 16, 48, 64])
@pytest.mark.parametrize("mode, queries", [("EXTEND", [37, 9]), ("DECODE", [1])])
def test_pages_of_any_size(sglang: Any, mode: str, queries: list[int], page: int) -> None:
    tokens = Tokens.of(queries, dim_v=8)
    layer = sglang_layer(0, sglang.Type.DECODER, dim_v=8)
    check(forward(sglang, tokens, layer, mode, page), tokens, Kept())


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("layer_id, left", [(0, float("inf")), (1, 7)])
def test_layers_of_windows_have_a_pool_of_their_own(
    sglang: Any, layer_id: int, left: float, page: int
) -> None:
    tokens = Tokens.of(QUERIES)
    window = -1 if left == float("inf") else int(left)
    layer = sglang_layer(layer_id, sglang.Type.DECODER, sliding_window_size=window)
    out = forward(sglang, tokens, layer, "MIXED", page, sglang.Windows)
    check(out, tokens, Kept(left=left))


@pytest.mark.parametrize("windows", [False, True])
def test_a_graph_reads_tensors_filled_before_each_replay(sglang: Any, windows: bool) -> None:
    """What a forward was captured with, the tensors of its metadata, is what the next batch is
    written to."""
    tokens = Tokens.of([1])
    runner = sglang_runner(tokens, 16, sglang.Windows if windows else Pool)
    layer = sglang_layer(int(windows), sglang.Type.DECODER)
    backend = sglang.Backend(runner)
    backend.init_cuda_graph_state(4, 4)
    batch = sglang_batch(runner, tokens, sglang.Mode.DECODE)
    fill_captured(backend, batch)
    assert backend.forward_metadata.longest_kv == 64
    check(backend.forward_decode(*sglang_new(tokens), layer, batch), tokens, Kept())


def test_a_layer_reads_keys_that_another_wrote(sglang: Any) -> None:
    tokens = Tokens.of([9])
    runner = sglang_runner(tokens, 1)
    backend = sglang.Backend(runner)
    batch = sglang_batch(runner, tokens, sglang.Mode.EXTEND)
    backend.init_forward_metadata(batch)
    layer = sglang_layer(0, sglang.Type.DECODER)
    q, k, v = sglang_new(tokens)
    backend.forward_extend(q, k, v, layer, batch)
    check(backend.forward_extend(q, None, None, layer, batch), tokens, Kept())
    check(backend.forward_extend(q, k + 1, v, layer, batch, save_kv_cache=False), tokens, Kept())
