"""What the tuner and the store do for each other: no timing is ever taken twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.problems import used
from tests.support.records import H200, PROBLEM, TASK, own, timed
from tests.support.replay import TABLE, Replay, ranking, run, trial_file
from tilegen import pipeline
from tilegen.compiling import verdicts
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store import Location, Versions, current_versions, look_up
from tilegen.store.transfer import merge
from tilegen.store.trials import Conditions, Trial, join_trials, trial_line
from tilegen.tuning.measure import Measurement

SMALL = dict(list(TABLE.items())[:8])


def machine(folder: Path, name: str, shared: Path, monkeypatch: pytest.MonkeyPatch) -> Location:
    """Be another machine, with an own directory and the shared location."""
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(folder / name))
    monkeypatch.setenv("TILEGEN_CACHE_PATH", str(shared))
    monkeypatch.setattr("tilegen.tuning.tuner.this_machine", lambda: name)
    return own(folder / name)


def test_a_second_machine_measures_only_the_missing_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    first = machine(tmp_path, "aa", shared, monkeypatch)
    some = Replay(dict(list(SMALL.items())[:5]))
    run(some)
    assert len(some.measured) == 5
    list(merge([first], Location(str(shared), "shared")))

    machine(tmp_path, "bb", shared, monkeypatch)
    same = Replay(dict(list(SMALL.items())[:5]))
    record = run(same)
    assert same.measured == []
    assert (record.trials, record.source) == (5, "aa"), "who has measured it"
    added = Replay(SMALL)
    record = run(added)
    assert {config.key for config in added.measured} == set(list(SMALL)[5:])
    assert record.trials == 8
    assert record.config == added.fastest


def test_a_finding_names_the_machine_and_versions_that_measured_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_with = Versions(tilegen="0.0.9", torch="2.11.0", triton="3.7.1", cuda="12.6")
    monkeypatch.setattr("tilegen.tuning.tuner.versions_for", lambda _: measured_with)
    monkeypatch.setattr("tilegen.tuning.tuner.now", lambda: "2026-11-21T09:30:00Z")
    first = machine(tmp_path, "aa", tmp_path / "none", monkeypatch)
    run(Replay(SMALL))
    list(merge([first], own(tmp_path / "bb")))

    machine(tmp_path, "bb", tmp_path / "none", monkeypatch)
    here = replace(measured_with, tilegen="0.1.0", torch="2.13.0", cuda="13.0")
    monkeypatch.setattr("tilegen.tuning.tuner.versions_for", lambda _: here)
    monkeypatch.setattr("tilegen.tuning.tuner.now", lambda: "2026-11-22T09:30:00Z")
    remembered = Replay(SMALL)
    record = run(remembered)
    assert remembered.measured == []
    assert (record.source, record.date) == ("aa", "2026-11-21T09:30:00Z")
    assert record.versions == measured_with


def test_a_trial_of_an_unknown_machine_makes_a_finding_of_an_unknown_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path, "aa", tmp_path / "none", monkeypatch)
    run(Replay(SMALL))
    file = trial_file(tmp_path / "aa")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:  # as they were written before 2026-11-25
        del line["source"], line["versions"]
    for name in ("bb", "cc"):
        other = tmp_path / name / file.relative_to(tmp_path / "aa")
        other.parent.mkdir(parents=True)
        other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    stores = []
    for name in ("bb", "cc"):
        stores.append(machine(tmp_path, name, tmp_path / "none", monkeypatch))
        record = run(Replay(SMALL))
        assert (record.source, record.versions.torch, record.versions.cuda) == ("", "", "")
        assert record.versions.triton == current_versions().triton, "a condition of the trial"
    list(merge(stores, own(tmp_path / "all")))
    entry = look_up(TASK, where=[own(tmp_path / "all")])
    assert entry is not None
    assert entry.others == (), "one measurement, however many have written it down"


def test_a_measurement_has_one_vote_however_many_machines_remember_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines measured m64n64w8s3, one m128n64w8s3, which three others remember."""
    equal: dict[str, float | str] = {"m128n64w8s3": 100.5, "m64n64w8s3": 100.6}
    stores = []
    for name, favourite, us in (
        ("aa", "m64n64w8s3", 99.0),
        ("bb", "m64n64w8s3", 99.1),
        ("cc", "m128n64w8s3", 99.2),
    ):
        stores.append(machine(tmp_path, name, tmp_path / "none", monkeypatch))
        run(Replay({**equal, favourite: us}, spread=0.002))
    for name in ("dd", "ee", "ff"):
        list(merge([stores[2]], own(tmp_path / name)))
        stores.append(machine(tmp_path, name, tmp_path / "none", monkeypatch))
        remembered = Replay(equal)
        assert run(remembered).config == TileConfig.parse("m128n64w8s3")
        assert remembered.measured == []
    list(merge(stores, own(tmp_path / "all")))
    entry = look_up(TASK, where=[own(tmp_path / "all")])
    assert entry is not None
    assert entry.record.config == TileConfig.parse("m64n64w8s3")
    assert sorted(one.source for one in (entry.record, *entry.others)) == ["aa", "bb", "cc"]


def test_a_later_run_of_one_machine_takes_the_place_of_its_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = machine(tmp_path, "aa", tmp_path, monkeypatch)
    run(Replay(dict(list(SMALL.items())[:3])))
    record = run(Replay(SMALL))
    entry = look_up(TASK, where=[mine])
    assert entry is not None
    assert (entry.record, entry.others) == (record, ())


def test_a_clock_that_is_set_back_does_not_make_the_later_finding_the_earlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = machine(tmp_path, "aa", tmp_path, monkeypatch)
    monkeypatch.setattr("tilegen.tuning.tuner.now", lambda: "2026-11-21T09:30:00Z")
    run(Replay(dict(list(SMALL.items())[:3])))
    monkeypatch.setattr("tilegen.tuning.tuner.now", lambda: "2026-11-21T01:00:00Z")
    record = run(Replay(SMALL))
    assert record.date == "2026-11-21T09:30:01Z"
    entry = look_up(TASK, where=[mine])
    assert entry is not None
    assert (entry.record, entry.others) == (record, ())


def test_trials_of_a_clock_that_is_years_ahead_do_not_count_as_the_last(tmp_path: Path) -> None:
    conditions = Conditions(
        problem=PROBLEM.key, arch="sm_90", triton="3", driver="5", template_digest="a"
    )
    config = TileConfig.parse("m64n64w8s3")
    lines = [
        json.dumps(
            trial_line(Trial(config=config, measurement=one, date=date), conditions)
        ).encode()
        for one, date in (
            (timed(10.0), "2026-11-21T09:30:00Z"),
            (Measurement(status="launch_failed"), "2099-01-01T00:00:00Z"),
        )
    ]
    for order in (lines, lines[::-1]):
        *_, last = join_trials(order, "fwd").splitlines()
        assert json.loads(last)["measurement"]["status"] == "ok"


def test_tuned_apart_and_merged_all_machines_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = []
    for name, favourite in (("aa", "m128n64w8s3"), ("bb", "m64n64w8s3"), ("cc", "m64n64w8s3")):
        stores.append(machine(tmp_path, name, tmp_path / "none", monkeypatch))
        table: dict[str, float | str] = {"m128n64w8s3": 100.5, "m64n64w8s3": 100.6}
        run(Replay({**table, favourite: 99.0}, spread=0.002))
    merged = []
    for n, order in enumerate(([0, 1, 2], [2, 1, 0], [1, 0, 2])):
        target = own(tmp_path / f"all{n}")
        list(merge([stores[index] for index in order], target))
        entry = look_up(TASK, where=[target])
        assert entry is not None
        merged.append(entry.record)
    assert merged[0] == merged[1] == merged[2]
    assert merged[0].config == TileConfig.parse("m64n64w8s3"), "of equals what most have found"


def test_failures_travel_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine(tmp_path, "aa", tmp_path / "none", monkeypatch)
    table: dict[str, float | str] = {
        "m128n64w8s3": 100.0,
        "m64n64w8s3": "out_of_resources: too much",
    }
    run(Replay(table))
    list(merge([first], own(tmp_path / "bb")))
    machine(tmp_path, "bb", tmp_path / "none", monkeypatch)
    again = Replay(table)
    run(again)
    assert again.measured == []


def test_a_wrong_config_is_not_trusted_because_others_were_fast_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine(tmp_path, "aa", tmp_path / "none", monkeypatch)
    replay = Replay({"m128n64w8s3": 100.0, "m64n64w8s3": 50.0})
    run(replay)
    list(merge([first], own(tmp_path / "bb")))
    machine(tmp_path, "bb", tmp_path / "none", monkeypatch)
    bad = TileConfig.parse("m64n64w8s3")

    def check(config: TileConfig) -> Measurement | None:
        return Measurement(status="wrong", message="out is off") if config == bad else None

    record = run(replay, check=check, candidates=ranking(replay.space))
    assert record.config == TileConfig.parse("m128n64w8s3")


def test_the_choice_of_the_model_is_a_line_of_the_log_and_no_record(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = used(registers=64)
    monkeypatch.setattr(verdicts, "verdict", lambda *_, **__: built)
    problem = AttentionProblem.parse("hq1 q64 d64 bf16")
    with caplog.at_level("DEBUG", logger="tilegen"):
        chosen = pipeline.choose(problem, H200, may_compile=True)
        pipeline.emit(chosen, aligned=True)
    assert not list(own_cache.rglob("*.json"))
    for kernel, choice in chosen.items():
        assert f"{kernel} for '{problem}': {choice.config}, from the model" in caplog.text
