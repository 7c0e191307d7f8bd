"""The jobs of an H100 or H200: legal, in order, and on disk after each, without a GPU."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hopper
from benchmarks.hopper import Job, jobs, run_all
from tilegen.check import in_child
from tilegen.emit.render import render
from tilegen.errors import WrongResult
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import KERNELS


@pytest.mark.slow
def test_all_jobs_can_be_rendered_and_check_before_they_time() -> None:
    every = list(jobs())
    assert len(every) == len(set(every)) > 70
    assert [job.kernel for job in every if job.do == "check"][:3] == [*hopper.USUAL]
    checked: set[tuple[str, str, str]] = set()
    for job in every:
        if job.do == "check":
            assert not KERNELS[job.kernel].why_not(job.problem)
            checked.add(job.key)
        elif job.do in ("time", "race"):
            assert job.key in checked
        if job.config:
            assert render(job.problem, TileConfig.parse(job.config), job.task.kernel).source


def test_without_a_gpu_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hopper, "detect", lambda: None)
    monkeypatch.setattr(hopper, "compiled", lambda: iter(["8k compiled"]))
    hopper.main(tmp_path / "out")
    told = capsys.readouterr().out.splitlines()
    assert told == ["8k compiled", "no GPU of sm_90 that PyTorch can use: nothing is measured"]
    assert not (tmp_path / "out").exists()


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "detect", lambda: gpu("h200"))


def test_a_kernel_that_failed_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result(job: Job) -> dict[str, Any]:
        if job.config.endswith("tu") and job.do == "check":
            raise WrongResult("out WRONG")
        if job.do == "race":
            raise subprocess.TimeoutExpired("child", 90)
        return {"us": 1.0}

    monkeypatch.setattr(hopper, "result", result)
    run_all(tmp_path, time.monotonic() + 1e6)
    made = rows(tmp_path)
    turned = [(row["do"], row["status"]) for row in made if row["config"].endswith("2tu")]
    assert turned == [("check", "failed")]
    assert [row["status"] for row in made if row["do"] == "baseline"] == ["ok", "ok"]
    run_all(tmp_path, time.monotonic() + 1e6)  # goes on after what is there
    assert rows(tmp_path) == made


def test_a_gpu_that_hangs_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def result(job: Job) -> dict[str, Any]:
        raise in_child.DeviceHung("the GPU does not answer")

    monkeypatch.setattr(hopper, "result", result)
    run_all(tmp_path, time.monotonic() + 1e6)
    assert [row["status"] for row in rows(tmp_path)] == ["hung"]


def test_no_job_begins_that_may_end_too_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_all(tmp_path, time.monotonic() + 10)
    assert "no time left for baseline 8k" in capsys.readouterr().out
    assert not (tmp_path / "results.jsonl").exists()
