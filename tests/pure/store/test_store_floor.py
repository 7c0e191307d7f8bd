"""Impossible times are refused by name, and no other finding is lost with them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.problems import PROBLEMS
from tests.support.records import H200, RECORD, own, place, record, timed
from tilegen.choose.families import kernels_of
from tilegen.choose.ranker import propose
from tilegen.disk import say_once
from tilegen.errors import InvalidRecord
from tilegen.gpus.spec import gpu
from tilegen.problem import AttentionProblem
from tilegen.store import TuningRecord, look_up, save
from tilegen.store.election import ALLOWED, why_not_credible
from tilegen.store.listing import check
from tilegen.store.transfer import merge
from tilegen.store.trials import Conditions, Trial, trial_line
from tilegen.task import KernelTask
from tilegen.tuning.trials import TrialLog

PROBLEM = AttentionProblem.parse("b4 hq32 hkv8 q4096 d128 bf16 causal")
FORGED = record(problem=PROBLEM, us=0.01, source="ff")
HONEST = record(problem=PROBLEM, us=900.0, source="aa")
WHY = "median_us must be at least 417 us, since h200 at its peaks takes 556 us"


@pytest.fixture(autouse=True)
def _say_everything(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    caplog.set_level(logging.INFO, logger="tilegen")


def found_in(folder: Path) -> TuningRecord | None:
    entry = look_up(KernelTask.of("fwd", PROBLEM, H200), where=[own(folder)])
    return entry and entry.record


def test_a_forged_record_is_passed_over_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = place(tmp_path, FORGED)
    file = tmp_path / FORGED.path
    for _ in range(3):
        assert found_in(tmp_path) is None
    (warning,) = caplog.messages
    assert str(file) in warning
    assert WHY in warning
    assert file.exists()
    (checked,) = check([where])
    assert WHY in checked.reason


def test_a_forged_finding_hides_no_honest_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place(tmp_path / "first", replace(FORGED, rivals=(HONEST,)))
    assert found_in(tmp_path / "first") == HONEST
    place(tmp_path / "last", replace(HONEST, rivals=(FORGED,)))
    assert found_in(tmp_path / "last") == HONEST
    for folder in ("first", "last"):
        save(record(problem=PROBLEM, us=890.0, source="bb"), location=own(tmp_path / folder))
        there = TuningRecord.from_json((tmp_path / folder / FORGED.path).read_text())
        assert [one.measurement.median_us for one in there.findings] == [890.0, 900.0]


def test_a_forged_record_is_not_saved_and_the_rest_is_merged(tmp_path: Path) -> None:
    with pytest.raises(InvalidRecord, match=WHY):
        save(FORGED, location=own(tmp_path / "mine"))
    source = place(tmp_path / "theirs", FORGED)
    place(tmp_path / "theirs", RECORD)
    moved = {one.action: one.reason for one in merge([source], own(tmp_path / "mine"))}
    assert set(moved) == {"added", "refused"}
    assert WHY in moved["refused"]
    assert found_in(tmp_path / "mine") is None


def test_a_forged_trial_is_a_bad_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    conditions = Conditions(
        problem=PROBLEM.key, arch="sm_90", triton="3", driver="5", template_digest="a"
    )
    log = TrialLog(tmp_path, "h200", "fwd", PROBLEM, conditions)
    log.append(Trial(config=RECORD.config, measurement=HONEST.measurement))
    forged = Trial(config=RECORD.config, measurement=FORGED.measurement, date=RECORD.date)
    with log.file.open("a") as file:
        file.write(json.dumps(trial_line(forged, conditions)) + "\n")
    assert [one.measurement for one in log.read().values()] == [HONEST.measurement]
    (warning,) = caplog.messages
    assert "skipped 1 bad lines, first line 2: " + WHY in warning


@pytest.mark.parametrize(
    "problem, kernel, floor",
    [
        # 4 x 32 heads x 1024 x 1025 / 2 entries x 2 products x 128 multiply-adds at 989 Tflop/s
        ("b4 hq32 q1024 d128 bf16 causal", "fwd", 1e6 * 4 * 32 * 524_800 * 4 * 128 / 989e12),
        # one row a sequence: 2 x 4 x 8 x 8192 x 128 words of keys and values at 4.8 TB/s
        ("b4 hq32 hkv8 q1 kv8192 d128 bf16", "fwd", 1e6 * 2 * 4 * 8 * 8192 * 128 * 2 / 4.8e12),
        ("b1 hq8 q4096 d64 fp16", "bwd_preprocess", 1e6 * 2 * 8 * 4096 * 64 * 2 / 4.8e12),
        (
            "b1 hq8 q4096 d64 fp32",
            "bwd_dkdv",
            1e6 * 2 * 8 * 4096**2 * 4 * 64 / H200.vector_flops_32,
        ),
    ],
)
def test_floor_is_bytes_over_bandwidth_or_products_over_peak(
    problem: str, kernel: str, floor: float
) -> None:
    parsed = AttentionProblem.parse(problem)
    which: dict[str, Any] = {"problem": parsed, "gpu": "h200", "kernel": kernel}
    assert why_not_credible(timed(ALLOWED * floor * 0.98), **which)
    assert not why_not_credible(timed(ALLOWED * floor * 1.02), **which)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h200", "t4", "b200", "mi300x"])
def test_nothing_that_the_model_predicts_is_impossible(name: str) -> None:
    spec = gpu(name)
    for problem in PROBLEMS[::4]:
        for kernel in kernels_of(problem, spec):
            best = propose(KernelTask.of(kernel, problem, spec), top=1)[0].estimate
            trouble = why_not_credible(timed(1e6 * best.seconds), problem, name, kernel)
            assert not trouble, f"{kernel} for '{problem}' on {name}: {trouble}"


def test_of_an_unknown_gpu_nothing_is_known() -> None:
    assert not why_not_credible(timed(0.01), PROBLEM, "h20", "fwd")
