"""PyTorch's own kernels for a pass: measured, recorded, chosen only where measured to be faster."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.providers import providers
from tests.support.libraries import BACKWARD, PROBLEM, SPEC, save_time, used
from tests.support.records import UNMEASURED, record, timed
from tilegen import api
from tilegen.choose.libraries import faster_library, why_not
from tilegen.choose.records import Records
from tilegen.cli import main
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.kernels.spec import BACKENDS, Backend
from tilegen.problem import AttentionProblem
from tilegen.store import current_versions
from tilegen.store.library_record import (
    LibraryRecord,
    library_path,
    library_record,
    save_library,
)
from tilegen.store.record import measurement_values
from tilegen.tuning import libraries as tuning
from tilegen.tuning.libraries import tune_libraries
from tilegen.tuning.measure import Measurement

pytestmark = pytest.mark.usefixtures("own_cache")


# --------------------------------------------------------------------------------------------------
# Records


def test_a_record_names_its_library_and_reads_back() -> None:
    versions = current_versions()
    record = LibraryRecord(library="flash", measurement=timed(50.0), versions=versions)
    file = save_library(record, PROBLEM, SPEC, "forward")
    assert file.match("libraries/*/forward/b1_hq2_hkv2_q64_kv64_d16_bf16_causal.json")
    assert library_record(PROBLEM, SPEC, "forward") == record
    assert library_record(PROBLEM, SPEC, "backward") is None
    assert record.seconds == pytest.approx(50e-6)
    assert json.loads(file.read_text())["library"] == "flash"


@pytest.mark.parametrize(
    "changed",
    [
        {"library": "math"},
        {"schema": 2},
        {"direction": "sideways"},
        {"direction": "backward"},
        {"gpu": "a100"},
        {"arch": "sm_80"},
        {"policy": "warm_l2"},
        {"measurement": {"status": "ok"}},
        {"measurement": measurement_values(UNMEASURED)},
        {"problem": "b1 hq2 q64 d16 bf16 causal"},
        {"versions": {}},
    ],
)
def test_fields_of_a_record_are_checked(
    changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    file = save_time()
    assert library_record(PROBLEM, SPEC, "forward") is not None
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    assert library_record(PROBLEM, SPEC, "forward") is None
    assert f"{next(iter(changed))}" in caplog.messages[-1]


def test_a_record_about_another_problem_is_passed_over() -> None:
    file = save_time()
    other = AttentionProblem.parse("b1 hq2 hkv2 q128 kv128 d16 bf16 causal")
    elsewhere = file.parents[3] / library_path(SPEC.name, "forward", other)
    elsewhere.write_text(file.read_text())
    assert library_record(other, SPEC, "forward") is None


# --------------------------------------------------------------------------------------------------
# Which one is used


@pytest.mark.usefixtures("measured")
def test_a_library_is_used_where_it_was_measured_to_be_faster() -> None:
    assert used() is None, "nobody has measured one"
    for us, wins in ((29.9, True), (30.0, False), (31.0, False)):
        save_time(us)
        assert (used() is not None) == wins, us
    for us, wins in ((89.0, True), (91.0, False)):  # three kernels of 30 us
        save_time(us, "backward")
        assert (used("backward") is not None) == wins, us


@pytest.mark.usefixtures("measured")
def test_who_asks_is_told_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tilegen cache why`, `tilegen explain`, and rows of the benchmarks."""
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda *_: SPEC)
    (ours,) = (one for one in providers() if one.name == "tilegen")
    ask = ["cache", "why", PROBLEM.key, "--gpu", SPEC.name]
    for saved in (False, True):
        if saved:
            save_time(1.0)
        result = CliRunner().invoke(main.app, ask)
        assert result.exit_code == 0, result.output
        assert result.output.count("calls go to library: flash") == int(saved)
        told = json.loads(CliRunner().invoke(main.app, [*ask, "--json"]).output)
        assert {one["kernel"]: one["library"] for one in told} == {
            **dict.fromkeys(BACKWARD, ""), "fwd": "library: flash" if saved else ""
        }  # fmt: skip
        assert ("library: flash" in ours.describe(PROBLEM, "forward")) == saved
        for kernel, library in (("fwd", saved), ("bwd_dq", False)):
            explained = api.explain(PROBLEM, SPEC, kernel=kernel).text("tile")
            assert ("calls go to library: flash" in explained) == library


@pytest.mark.usefixtures("measured")
def test_it_is_asked_for_and_never_where_choices_must_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_time(1.0)
    assert used() is not None
    monkeypatch.setenv("TILEGEN_LIBRARIES", "0")
    assert used() is None
    monkeypatch.setenv("TILEGEN_LIBRARIES", "1")
    assert used() is not None
    assert used(deterministic=True) is None
    monkeypatch.setenv("TILEGEN_DETERMINISTIC", "1")
    assert used() is None
    monkeypatch.setenv("TILEGEN_DETERMINISTIC", "0")
    monkeypatch.setattr(Records, "agreed", lambda *_: TileConfig(block_m=16, block_n=16))
    assert used() is None


def test_kernels_that_nobody_has_timed_lose_to_no_library(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_LIBRARIES", "1")
    save_time(1.0)
    assert used() is None
    assert not list(own_cache.glob("h*/*/*.json"))


@pytest.mark.usefixtures("measured")
def test_a_kernel_that_nobody_has_timed_leaves_its_pass_to_kernels(own_cache: Path) -> None:
    save_time(1.0, "backward")
    assert used("backward") is not None
    (own_cache / record(gpu=SPEC.name, kernel="bwd_dq", problem=PROBLEM).path).unlink()
    assert used("backward") is None


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("changed", [{"torch": "2.12.0"}, {"cuda": "11.8"}])
def test_a_record_counts_for_the_torch_that_made_it(changed: dict[str, str]) -> None:
    versions = replace(current_versions(), **changed)
    save_time(1.0, versions=versions)
    assert used() is None
    other = replace(current_versions(), driver="1.0", tilegen="0.0.1")
    save_time(1.0, versions=other)
    assert used() is not None


@pytest.mark.parametrize(
    "text, takers",
    [
        ("hq8 q64 d64 bf16 causal", BACKENDS),
        ("hq8 q64 kv256 d64 fp16 full", BACKENDS),
        ("hq8 hkv2 q64 d64 bf16 full", ("cudnn", "flash")),
        ("hq8 q64 kv256 d64 fp16 full page16", ()),
        ("hq8 q64 kv256 d64 fp16 causal", ()),
        ("hq8 q64 kv256 d64 fp16 causal(bottom_right)", ()),
        ("hq8 q64 d64 bf16 window(9,0)", ()),
        ("hq8 q64 d64 bf16 causal&window(9,0)", ()),
        ("hq8 q64 d64 bf16 causal&kv_prefix(@b:9)", ()),
        ("hq8 q64 d64 bf16 ~causal", ()),
        ("hq8 q64 d64 fp32 causal", ()),
        ("hq8 q64 d64/32 bf16 causal", ()),
        ("hq8 q64 d60 bf16 causal", ()),
        ("hq8 q64 d512 bf16 causal", ()),
        ("hq8 q64 d64 bf16 causal dropout", ()),
        ("hq8 q64 d64 bf16 causal score((k-q)*t0[h]+s,float32)", ()),
    ],
)
def test_libraries_are_used_only_if_they_mean_the_same(
    text: str, takers: tuple[Backend, ...]
) -> None:
    problem = AttentionProblem.parse(text)
    reasons = {backend: why_not(problem, backend) for backend in BACKENDS}
    assert tuple(one for one in BACKENDS if not reasons[one]) == takers
    assert all(backend in reason for backend, reason in reasons.items() if reason)


def test_a_record_of_a_library_that_means_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TILEGEN_LIBRARIES", "1")
    record = LibraryRecord(library="flash", measurement=timed(1.0), versions=current_versions())
    for mask, library in (("causal", "flash"), ("window(9,0)", None)):
        problem = AttentionProblem.parse(f"hq2 q64 d16 bf16 {mask}")
        save_library(record, problem, SPEC, "forward")
        assert library_record(problem, SPEC, "forward") == record
        assert faster_library(Records(problem, SPEC), "forward", 1.0) == library


# --------------------------------------------------------------------------------------------------
# Measuring


Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Have libraries take the times given, and some of them give wrong results."""
    trouble = Measurement(status="wrong", message="out WRONG")

    def set_up(times: dict[Backend, Measurement], *wrong: Backend) -> None:
        monkeypatch.setattr(tuning, "measure_library", lambda *given: times[given[2]])
        monkeypatch.setattr(
            tuning, "check_library", lambda *given: trouble if given[2] in wrong else None
        )

    return set_up


def test_the_fastest_that_is_right_is_recorded(machine: Machine) -> None:
    times: dict[Backend, Measurement] = {
        "cudnn": timed(10.0), "flash": timed(20.0), "efficient": timed(30.0)
    }  # fmt: skip
    for wrong, winner in (((), "cudnn"), (("cudnn",), "flash"), (BACKENDS[:2], "efficient")):
        machine(times, *wrong)
        record = tune_libraries(PROBLEM, SPEC, "forward")
        assert record is not None
        assert (record.library, record.measurement) == (winner, times[winner])
        assert library_record(PROBLEM, SPEC, "forward") == record
    machine(times, *BACKENDS)
    assert tune_libraries(PROBLEM, SPEC, "backward") is None
    assert library_record(PROBLEM, SPEC, "backward") is None


def test_an_error_of_a_library_is_not_a_time(machine: Machine) -> None:
    refused = Measurement(status="launch_failed", message="No available kernel")
    machine({"cudnn": refused, "flash": timed(20.0), "efficient": refused})
    record = tune_libraries(PROBLEM, SPEC, "backward")
    assert record is not None
    assert record.library == "flash"


def test_only_those_that_mean_the_same_are_measured(machine: Machine) -> None:
    shared = AttentionProblem.parse("hq8 hkv2 q64 kv64 d64 bf16 causal")
    machine({"cudnn": timed(10.0), "flash": timed(20.0)})
    assert tune_libraries(shared, SPEC, "forward") is not None
    window = AttentionProblem.parse("hq8 q64 kv64 d64 bf16 window(9,0)")
    machine({})
    assert tune_libraries(window, SPEC, "forward") is None


@pytest.mark.parametrize("asked", [False, True])
def test_tuning_measures_libraries_where_asked(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_LIBRARIES", str(int(asked)))
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda *_: SPEC)
    monkeypatch.setattr("tilegen.tuning.tuner.tune", lambda task, **__: task.kernel)
    measured: list[tuple[str, str]] = []
    monkeypatch.setattr(
        tuning,
        "tune_libraries",
        lambda problem, gpu, direction, command: measured.append((direction, command)),
    )
    assert api.tune(PROBLEM) == list(LARGE_CACHE)
    assert api.tune(PROBLEM, kernel="fwd") == ["fwd"]
    assert api.tune(PROBLEM, kernel="bwd_dq") == ["bwd_dq"]
    command = f"tilegen tune '{PROBLEM}'"
    expected = [("forward", command), ("backward", command), ("forward", command)]
    assert measured == (expected if asked else [])
