"""Benchmarks on a GPU, with small problems: GPU time is short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import decode, io_counters, rows, run
from benchmarks.providers import providers
from benchmarks.study import experiments
from benchmarks.workloads import Workload
from tests.support.problems import sized
from tilegen.gpus.spec import GpuSpec, detect
from tilegen.problem import AttentionProblem


@pytest.fixture(scope="module")
def spec() -> GpuSpec:
    actual = detect()
    assert actual is not None
    return actual


def measured(workloads: Sequence[Workload], path: Path, spec: GpuSpec) -> list[dict[str, str]]:
    """Return the rows of tilegen."""
    chosen = [p for p in providers() if p.name == "tilegen"]
    todo = run.cases(workloads, chosen)
    assert run.run(todo, path, deadline=float("inf"), seconds=0.01, spec=spec) == 0
    return rows.read(path)


@pytest.mark.parametrize(
    "masks",
    [
        ("kv_prefix(1)|block_sparse(@bh:4,16)", "causal&documents(@q:16)"),
        ("causal&same_id(@q:4,@k:4)", "dilated(4)&window(31,0)", "neighborhood(8x8,3x3)"),
        ("prefix_lm(16)", "causal&(kv_prefix(4)|window(15,-1))", "block_sparse(@:4,16)"),
    ],
    ids=["by head", "listed", "in closed form"],
)
def test_rows_under_masks_are_right(masks: Sequence[str], tmp_path: Path, spec: GpuSpec) -> None:
    problems = [AttentionProblem.parse(f"b2 hq2 hkv1 q64 d32 bf16 {mask}") for mask in masks]
    workloads = [Workload(name=one.key, problem=one, source="test") for one in problems]
    actual = measured(workloads, tmp_path / "rows.csv", spec)
    assert len(actual) == 2 * len(masks)
    assert {row["status"] for row in actual} == {"ok"}, [row["detail"] for row in actual]


def test_rows_of_few_queries_are_right(
    tmp_path: Path, spec: GpuSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("decode-8k-64h", "verify-q8-128k-d256", "mla-decode-128k-576")
    targets = [one for one in decode.TARGETS if one.workload.name in names]
    keys = sized(512, rehearsed=200)
    small = [
        replace(
            one,
            workload=replace(
                one.workload,
                problem=replace(
                    one.workload.problem, num_heads_q=8, num_heads_kv=1, seqlen_kv=keys
                ),
            ),
        )
        for one in targets
    ]
    monkeypatch.setattr(decode, "TARGETS", small)
    monkeypatch.setattr(decode, "PEERS", ("tilegen",))
    path = tmp_path / "rows.csv"
    decode.main(predicted=tmp_path / "predicted.csv", csv=path, seconds=0.01)
    lines = rows.read(path)
    assert [row["status"] for row in lines] == ["ok"] * 3, [row["detail"] for row in lines]


def test_profiled_programs_run(spec: GpuSpec) -> None:
    """Every family, of both passes."""
    small = AttentionProblem.parse("b1 hq2 hkv2 q64 kv64 d64 bf16 full")
    forward = experiments._families("E3", small, "forward", spec)
    backward = experiments._families("E4", small, "backward", spec)
    cases = [*forward, *backward]
    assert {case.experiment for case in cases} == {"E3", "E4"}
    for case in cases:
        io_counters._runner(experiments.Case.from_json(case.to_json()))()
