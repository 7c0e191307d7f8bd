"""Backwards that split streamed rows, compiled: the first choice of a call is usable, on one GPU
each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilegen import pipeline
from tilegen.compiling.acceptable import acceptable
from tilegen.errors import BuildFailed
from tilegen.gpus.spec import gpu
from tilegen.kernels.registry import BACKWARD
from tilegen.problem import AttentionProblem

CASES = [
    ("b1 hq10 hkv10 q4096 kv77 d64 bf16", "split_dkdv", "rtx5090"),
    ("b1 hq16 hkv4 q16 kv65536 d64 bf16 causal(bottom_right)", "split_dq", "a100"),
    ("b1 hq2 hkv1 q2048 kv2048 d128 bf16 causal", "split_backward", "h200"),
]


@pytest.mark.slow
@pytest.mark.parametrize("text, family, name", CASES, ids=[family for _, family, _ in CASES])
def test_first_choices_compile_to_usable_kernels(
    text: str, family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    spec = gpu(name)
    chosen = pipeline.choose(AttentionProblem.parse(text), spec, "backward", may_compile=True)
    assert tuple(chosen) == BACKWARD[family].names
    for kernel, choice in chosen.items():
        built = choice.tried[choice.config]
        assert not isinstance(built, BuildFailed)
        assert acceptable(built, spec), (name, kernel, built)
