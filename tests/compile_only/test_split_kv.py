"""Kernels that split the keys, compiled: the first choice of a call is usable on each family of
GPUs."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

import tilegen
from benchmarks import decode
from benchmarks.rows import read
from tilegen import pipeline
from tilegen.compiling.acceptable import acceptable
from tilegen.errors import BuildFailed
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem

CASES = [
    ("a100", "b1 hq64 hkv8 q1 kv8192 d128 bf16"),
    ("rtx5090", "b1 hq16 hkv2 q8 kv131072 d128 bf16 causal(bottom_right)"),
    ("b200", "b1 hq8 hkv1 q8 kv131072 d256 bf16 causal(bottom_right)"),
    ("h200", "b1 hq64 hkv1 q1 kv131072 d576/512 bf16 latent"),
    ("h200", "b1 hq32 hkv8 q64 kv65536 d128 bf16 tree(@b:64)"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, text", CASES)
def test_first_choices_compile_to_usable_kernels(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    spec = gpu(name)
    chosen = pipeline.choose(AttentionProblem.parse(text), spec, "forward", may_compile=True)
    assert list(chosen) == ["fwd_split", "fwd_combine"]
    for kernel, choice in chosen.items():
        built = choice.tried[choice.config]
        assert not isinstance(built, BuildFailed)
        assert acceptable(built, spec), (name, kernel, built)
    # The join is chosen for the splits that were settled, by whoever asks.
    joins = chosen["fwd_combine"]
    assert joins.ranked.task.joined == chosen["fwd_split"].config
    (proposed,) = tilegen.propose(text, name, kernel="fwd_combine", top=1, compile=True)
    assert proposed.config == joins.config
    if "tree" not in text:  # whose table has no values here
        (told,) = tilegen.explain(text, name, kernel="fwd_combine").values
        assert TileConfig(**told["config"]) == joins.config


@pytest.mark.slow
@pytest.mark.skipif(
    version("triton") != "3.7.1", reason="needs Triton 3.7.1, by which the table was made"
)
def test_the_table_of_decoding_has_compiled_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    name = "prefill-q256-128k-8h"
    (target,) = (one for one in decode.TARGETS if one.workload.name == name)
    (kept,) = (one for one in read(decode.PREDICTED) if one["name"] == name)
    row = decode.as_compiled(decode.predict(target))
    assert (row.compiled, f"{row.compiled_us:.5g}") == (kept["compiled"], kept["compiled_us"])
    assert row.compiled_us < row.goal_us, "README says so"
