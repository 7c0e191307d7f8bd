"""Measurements without a GPU, once each: kernels are compiled, and calls go up to the driver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import cpu, rows
from benchmarks.workloads import CATALOGUE, head
from tilegen.compiling.compiler import compile_for
from tilegen.problem import AttentionProblem


@pytest.mark.slow
def test_cpu_benchmarks_give_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("REPEATS", 1), ("TURNS", 1), ("CALLS", 20), ("COMPILED", 1)):
        monkeypatch.setattr(cpu, name, value)
    small = replace(head()[0], problem=AttentionProblem.parse("hq2 hkv1 q64 d16 fp16 causal"))
    monkeypatch.setattr(cpu, "CATALOGUE", CATALOGUE[:2])
    monkeypatch.setattr(cpu, "head", lambda: [small])
    # In this process: others would import PyTorch and Triton first.
    monkeypatch.setattr(
        cpu, "compile_many", lambda kernels, arch, workers: [compile_for(k, arch) for k in kernels]
    )
    path = tmp_path / "cpu.csv"
    cpu.main(csv=path)
    lines = rows.read(path)
    assert len(lines) == len({(row["benchmark"], row["baseline"]) for row in lines}) == 37
    assert all(float(row["value"]) > 0 for row in lines)
    assert capsys.readouterr().out.count("\n") == 38
    for kernel in cpu.PROPOSED:
        times = [row["value"] for row in lines if row["benchmark"].startswith(f"propose {kernel},")]
        assert len(times) == 2
    (call, *_) = [row for row in lines if row["benchmark"].startswith("attention()")]
    assert call["baseline"] == "SDPA of one row"
    assert float(call["ratio"]) > 0
