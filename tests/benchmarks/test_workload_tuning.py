"""The tuning of all workloads: its order, its time, and records packed as they come."""

from __future__ import annotations

import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tune
from benchmarks.summary import summarise
from tests.benchmarks.cases import PROBLEM, a_workload
from tests.support.records import H200, record
from tilegen.errors import NoRecord
from tilegen.problem import AttentionProblem
from tilegen.store import record_path, save
from tilegen.task import KernelTask

WINDOW = AttentionProblem.parse("b1 hq2 hkv2 q256 kv256 d32 fp16 window(15,0)")


def test_forward_is_tuned_first_and_serving_problems_have_no_backward() -> None:
    trained, served = (
        replace(a_workload(n), problem=p) for n, p in (("t", PROBLEM), ("s", WINDOW))
    )
    trained = replace(trained, directions=("forward", "backward"))
    assert tune.jobs([trained, served], H200) == [
        *((PROBLEM, "fwd"), (WINDOW, "fwd")),
        *((PROBLEM, "bwd_preprocess"), (PROBLEM, "bwd_dkdv"), (PROBLEM, "bwd_dq")),
    ]


def test_tuned_kernels_are_packed_and_not_tuned_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "cache"))
    given: list[tuple[str, float]] = []

    def fake_tune(task: KernelTask, *, seconds: float, **_: Any) -> None:
        given.append((task.kernel, seconds))
        if task.kernel == "bwd_dq":
            raise NoRecord("nothing runs")
        save(record(kernel=task.kernel, problem=task.problem.bucket))

    monkeypatch.setattr(tune, "tune", fake_tune)
    todo = tune.untuned([(PROBLEM, "fwd"), (PROBLEM, "bwd_dq"), (PROBLEM, "bwd_dkdv")], H200)
    archive = tmp_path / "records.tar.gz"
    failures = tune.tune_all(todo, H200, deadline=time.monotonic() + 30, pack=archive)
    assert failures == 1
    assert given == [
        ("fwd", pytest.approx(10, abs=0.5)),
        ("bwd_dq", pytest.approx(15, abs=0.5)),
        ("bwd_dkdv", pytest.approx(30, abs=0.5)),
    ]
    assert tune.untuned(todo, H200) == [(PROBLEM, "bwd_dq")]
    with tarfile.open(archive) as packed:
        assert sorted(packed.getnames()) == sorted(
            str(record_path("h200", kernel, PROBLEM)) for kernel in ("fwd", "bwd_dkdv")
        )
    text = summarise(tmp_path, [])
    assert f"| {PROBLEM.bucket.key} | fwd | block_m=" in text


def test_tuning_stops_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "tune", lambda *_, **__: pytest.fail("tuned"))
    todo: list[tune.Job] = [(PROBLEM, "fwd")]
    assert tune.tune_all(todo, H200, deadline=time.monotonic() - 1, pack=None) == 0
    assert "1 kernels left" in capsys.readouterr().out
