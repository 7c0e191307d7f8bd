"""tilegen's back end for vLLM, against what vLLM asks of one: its recorded interface everywhere,
the package itself where it is installed."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine_batches import (
    LENGTHS,
    ORDERS,
    QUERIES,
    SLOPES,
    Kept,
    Tokens,
    drawn,
    vllm_forward,
)
from tests.support.engine_contracts import methods, parameters, recorded, written
from tests.support.engine_stand_ins import forget, install, no_waiting
from tilegen.errors import Unsupported
from tilegen.runtime import slots

MODULE = "vllm.v1.attention.backend"
NAMES = recorded("vllm")["names"]
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
TOLERANCE = {"atol": 2e-6, "rtol": 2e-6}


@pytest.fixture(params=["stand-in", *["installed"] * bool(find_spec("vllm"))])
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return our classes and those of vLLM's that a batch is made of."""
    if request.param == "installed":
        forget(monkeypatch, "vllm")
    else:
        install(monkeypatch, "vllm")
    from vllm.v1.attention import backend as theirs  # pyright: ignore

    from tilegen.integrations import vllm_backend as ours

    names = [name.partition(":")[2] for name in NAMES if name.startswith(MODULE)]
    return SimpleNamespace(
        **{name: getattr(theirs, name) for name in names if hasattr(theirs, name)},
        **{name: getattr(ours, name) for name in vars(ours) if name.startswith("Tilegen")},
        envs=ours.envs,
    )


# --------------------------------------------------------------------------------------------------
# The interface


@pytest.mark.parametrize(
    "ours, theirs, added",
    [
        ("TilegenBackend", ["AttentionBackend"], {}),
        ("TilegenMetadataBuilder", ["AttentionMetadataBuilder"], {}),
        ("TilegenImpl", ["AttentionImplBase", "AttentionImpl"], {"__init__": ["sinks="]}),
    ],
)
def test_methods_have_the_parameters_that_vllm_gives(
    vllm: Any, ours: str, theirs: list[str], added: dict[str, list[str]]
) -> None:
    asked = {k: v for one in theirs for k, v in methods(NAMES[f"{MODULE}:{one}"]).items()}
    results = {k: v for k, v in vars(getattr(vllm, ours)).items() if inspect.isroutine(v)}
    abstract = {name for name, line in asked.items() if "abstract" in line.partition("(")[0]}
    assert abstract <= set(results)
    assert not getattr(vllm, ours).__abstractmethods__
    for name in set(results) & set(asked):
        words = asked[name].partition("(")[0].split()
        assert isinstance(results[name], staticmethod) == ("static" in words), name
        assert isinstance(results[name], classmethod) == ("class" in words), name
        plain = getattr(results[name], "__func__", results[name])
        assert written(plain) == parameters(asked[name]) + added.get(name, []), name
    mine = {name for name in set(results) - set(asked) if not name.startswith("_")}
    # vLLM calls this one where `forward_includes_kv_cache_update` is False, and declares it nowhere
    # but for MLA.
    assert mine == ({"do_kv_cache_update"} if ours == "TilegenImpl" else set())


def test_fields_that_are_read_exist() -> None:
    path = Path(__file__).parents[3] / "tilegen" / "integrations" / "vllm_backend.py"
    read = {
        one.attr
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef) and function.name in ("build", "refuse_batches")
        for one in ast.walk(function)
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)
        if one.value.id == "common"
    }
    assert len(read) >= 9
    assert read <= set(NAMES[f"{MODULE}:CommonAttentionMetadata"]["names"])


def test_fields_and_levels_that_are_set_exist(vllm: Any) -> None:
    known = NAMES[f"{MODULE}:AttentionBackend"]["names"]
    results = {k for k, v in vars(vllm.TilegenBackend).items() if not inspect.isroutine(v)}
    assert (
        {k for k in results if not k.startswith("_")}
        == {*("supported_dtypes", "supported_kv_cache_dtypes", "forward_includes_kv_cache_update")}
        <= set(known)
    )
    assert "_cudagraph_support" in NAMES[f"{MODULE}:AttentionMetadataBuilder"]["names"]
    level = vllm.TilegenMetadataBuilder._cudagraph_support
    assert level is vllm.AttentionCGSupport.UNIFORM_BATCH


def test_the_installed_package_is_the_one_that_was_read() -> None:
    reason = (
        "needs the package vllm, whose requirements do not go with ours: pip install --no-deps "
        "vllm==0.33.0 psutil pyzmq cbor2 openai openai_harmony sniffio"
    )
    pytest.importorskip("vllm", reason=reason)
    assert importlib.metadata.version("vllm") == recorded("vllm")["version"]


def test_registering_twice_is_registering_once_and_takes_nothing_from_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = install(monkeypatch, "vllm")
    from tilegen.integrations import vllm as entry

    entry.register()
    entry.register()
    for names, path in (
        (theirs["AttentionBackendEnum"], "tilegen.integrations.vllm.Backend"),
        (
            theirs["MLAPrefillBackendEnum"],
            "tilegen.integrations.vllm_latent.TilegenPrefillBackend",
        ),
    ):
        assert names.CUSTOM.get_path() == path
    from tilegen.integrations.vllm_backend import TilegenBackend

    assert TilegenBackend.get_name() == "CUSTOM"
    entry.register_backend(theirs["AttentionBackendEnum"].CUSTOM, "another.Backend")
    entry.register()
    assert theirs["AttentionBackendEnum"].CUSTOM.get_path() == "another.Backend"
    assert "CUSTOM is another.Backend" in caplog.text


@pytest.mark.parametrize("package", ["vllm", "sglang"])
def test_without_the_package_there_is_one_error(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import tilegen.integrations.{package}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("Error") == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(("ModuleNotFoundError", "ImportError")), last
    assert package in last


# --------------------------------------------------------------------------------------------------
# What is supported


@pytest.mark.skipif(not find_spec("vllm"), reason="needs the package vllm, which judges")
def test_the_installed_package_lists_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, "vllm")
    from tilegen.integrations.vllm_backend import TilegenBackend

    common: dict[str, Any] = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": SimpleNamespace(major=9, minor=0),
        "attn_type": "decoder",
    }
    judge: Any = TilegenBackend.validate_configuration
    most = {"has_sliding_window": True, "use_non_causal": True, "use_batch_invariant": True}
    assert judge(**common, **most) == []
    refused = {
        "kv_cache_dtype": "fp8",
        "use_mla": True,
        "use_mm_prefix": True,
        "attn_type": "encoder",
        "head_size": 2048,
        "block_size": 24,
        "dtype": torch.float64,
        "device_capability": SimpleNamespace(major=7, minor=5),
    }
    for name, value in refused.items():
        assert len(judge(**common | {name: value})) == 1, name
    for name in ("use_rswa", "use_pcp", "use_dcp", "use_adaptive_verification"):
        assert len(judge(**common, **{name: True})) == 1, name


def test_combinations_are_refused_in_words(vllm: Any) -> None:
    def judge(head_size: int, dtype: torch.dtype, cache: str | None) -> str | None:
        given = (head_size, dtype, cache, 16, False, False, False, False, None)
        return vllm.TilegenBackend.supports_combination(*given)

    assert judge(512, torch.float32, "auto") is None
    assert "up to 512" in str(judge(1024, torch.float32, "auto"))
    assert judge(1024, torch.float16, "float16") is None
    assert judge(64, torch.float16, None) is None
    assert "not bfloat16" in str(judge(64, torch.float16, "bfloat16"))


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"attn_type": "encoder"}, "encoder"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "fp8_e4m3"),
    ],
)
def test_layers_that_are_refused(vllm: Any, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(Unsupported, match=named):
        vllm.TilegenImpl(4, 16, 1.0, 2, **changed)


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"causal": torch.ones(3, dtype=torch.int32)}, "causal"),
        ({"mm_req_doc_ranges": {0: [(1, 4)]}}, "images"),
        ({"rswa_prefix_lens": torch.ones(3)}, "R-SWA"),
    ],
)
def test_batches_that_are_refused(vllm: Any, changed: dict[str, Any], named: str) -> None:
    builder = vllm.TilegenMetadataBuilder(None, [], config(64), torch.device("cpu"))
    with pytest.raises(Unsupported, match=named):
        builder.build(0, batch(**changed))


def config(longest: int, drafts: int = 0) -> Any:
    """Return vLLM's configuration, as far as a back end reads it."""
    speculative = SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
    model = SimpleNamespace(max_model_len=longest)
    return SimpleNamespace(model_config=model, speculative_config=speculative)


def batch(**changed: Any) -> Any:
    """Return the fields of a batch that say nothing but what is changed."""
    plain = dict.fromkeys(NAMES[f"{MODULE}:CommonAttentionMetadata"]["names"])
    return SimpleNamespace(**plain | {"causal": True} | changed)


# --------------------------------------------------------------------------------------------------
# Batches


@pytest.mark.parametrize(
    "layer, kept",
    [
        ({}, Kept()),
        ({"sliding_window": 1}, Kept(left=0)),
        ({"sliding_window": 2}, Kept(left=1)),
        ({"sliding_window": 50}, Kept(left=49)),
        ({"logits_soft_cap": 1.5}, Kept(cap=1.5)),
        ({"logits_soft_cap": 0.0, "sinks": SINKS}, Kept(sinks=SINKS)),
        (
            {"alibi_slopes": SLOPES, "logits_soft_cap": 1.5, "sinks": SINKS, "sliding_window": 7},
            Kept(left=6, cap=1.5, slopes=SLOPES, sinks=SINKS),
        ),
    ],
    ids=["causal", "window1", "window2", "window50", "softcap", "sinks", "all"],
)
def test_a_mixed_batch_equals_dense_attention(vllm: Any, layer: dict[str, Any], kept: Kept) -> None:
    tokens = Tokens.of(QUERIES)
    with torch.inference_mode():
        output, _ = vllm_forward(vllm, tokens, layer)
    new = sum(QUERIES)
    torch.testing.assert_close(output[:new].double(), tokens.expected(kept), **TOLERANCE)
    assert (output[new:] == -7).all(), "what is padding was written"


@pytest.mark.parametrize("window, kept", [(None, Kept(right=99)), (4, Kept(left=3, right=3))])
def test_a_batch_that_is_not_causal(vllm: Any, window: int | None, kept: Kept) -> None:
    tokens = Tokens.of(QUERIES)
    output, _ = vllm_forward(vllm, tokens, {"sliding_window": window}, causal=False)
    out = output[: sum(QUERIES)].double()
    torch.testing.assert_close(out, tokens.expected(kept), **TOLERANCE)


@pytest.mark.parametrize("order", ORDERS)
def test_all_orders_of_the_cache_are_read_and_written_where_they_are(vllm: Any, order: str) -> None:
    tokens = Tokens.of(QUERIES, dim_v=8)
    output, cache = vllm_forward(vllm, tokens, {}, order=order, page=32)
    out = output[: sum(QUERIES)].double()
    torch.testing.assert_close(out, tokens.expected(Kept()), **TOLERANCE)
    (written,) = (~cache.isnan()).all(-1)[:, 0].sum().reshape(1).tolist()
    assert written == sum(LENGTHS), "keys that padding wrote"
    assert cache[0].isnan().all(), "block 0 is of no request"


def test_a_graph_is_captured_for_the_longest_sequence(vllm: Any) -> None:
    """Its kernels are those of the first such batch, which is run before it is captured."""
    tokens = Tokens.of([1, 4])
    plain, _ = vllm_forward(vllm, tokens, {})
    captured, _ = vllm_forward(vllm, tokens, {}, capture=True)
    torch.testing.assert_close(captured, plain)
    builder = vllm.TilegenMetadataBuilder(None, [], config(512, drafts=3), torch.device("cpu"))

    def longest(requests: int, queries: int) -> tuple[int, int]:
        common = batch(seq_lens=torch.ones(requests), max_query_len=queries, max_seq_len=7)
        built = builder.build(0, common).longest_kv
        return built, builder.build_for_cudagraph_capture(common).longest_kv

    for shape in ((2, 1), (2, 4), (3, 4)):
        assert longest(*shape) == (512, 512), shape
        assert longest(*shape) == (7, 512), shape
    assert longest(2, 300) == (7, 512), "prompts are not captured"


def test_a_profiling_run_gives_zeros(vllm: Any) -> None:
    impl = vllm.TilegenImpl(4, 16, 1.0, 2)
    x, output = drawn(3, 4, 16, 0), drawn(3, 4, 16, 1)
    assert impl.forward(None, x, x, x, torch.tensor([]), None, output) is output
    assert not output.any()


def test_output_is_not_quantised(vllm: Any) -> None:
    impl = vllm.TilegenImpl(4, 16, 1.0, 2)
    x = drawn(3, 4, 16, 0)
    with pytest.raises(Unsupported, match="quantise"):
        impl.forward(None, x, x, x, x, None, x, output_scale=torch.ones(1))


def test_the_host_waits_for_nothing(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for `forward`: on a CPU PyTorch computes, which looks at lengths. New tokens are written
    as on a GPU, up to the launch."""
    looked: list[str] = []
    monkeypatch.setattr(slots, "is_checked", lambda x: False)
    monkeypatch.setattr(slots, "_runs_kernel", lambda k: True)
    monkeypatch.setattr(slots, "_launch", lambda *given, slots: looked.append("launch"))

    def watch(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def watched(*given: Any) -> Any:
            looked.append(name)
            with pytest.MonkeyPatch.context() as patch:
                no_waiting(patch)
                return method(*given)

        monkeypatch.setattr(owner, name, watched)

    monkeypatch.setattr(vllm.TilegenImpl, "forward", lambda *given, output: output)
    watch(vllm.TilegenImpl, "do_kv_cache_update")
    watch(vllm.TilegenMetadataBuilder, "build")
    vllm_forward(vllm, Tokens.of(QUERIES), {})
    write = ["do_kv_cache_update", "launch"]
    assert looked == [*write * 4, "build", *write]


def test_batch_invariance_is_vllms_setting(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_BATCH_INVARIANT", "0")
    assert vllm.TilegenBackend.supports_batch_invariance()
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", False)
    vllm.TilegenImpl(4, 16, 1.0, 2)
    assert os.environ["TILEGEN_BATCH_INVARIANT"] == "0"
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True)
    vllm.TilegenImpl(4, 16, 1.0, 2)
    assert os.environ["TILEGEN_BATCH_INVARIANT"] == "1"
