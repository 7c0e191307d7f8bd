"""The digest of what was timed: kept by records, trials, recordings and rows, and seen by judges
where two configs were one binary."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import exhaustive, rows, run, tuner_quality
from benchmarks.check import Verdict
from benchmarks.recordings import Recorder, file_of, new_session, read
from benchmarks.summary import summarise
from tests.benchmarks.cases import a_provider, a_row, a_workload
from tests.support.problems import used
from tests.support.records import H200, PROBLEM, RECORD, record, timed
from tests.support.replay import SMALL, Replay, trial_file
from tests.support.replay import run as tune_replay
from tilegen.errors import InvalidRecord, Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store import TuningRecord
from tilegen.store.trials import Conditions, Trial, join_trials, of_one_binary, trial_line
from tilegen.task import KernelTask
from tilegen.tuning.bench import Bench
from tilegen.tuning.measure import Measurement

ONE, OTHER = "0123456789ab", "ba9876543210"
CONDITIONS = Conditions(
    problem=PROBLEM.key, arch="sm_90", triton="3.7.1", driver="580", template_digest="ab"
)
DATE = "2026-11-21T09:30:00Z"
FIRST, SECOND, THIRD = (TileConfig.parse(key) for key in ("m64n64w4s2", "m64n64w4s3", "m64n64w4s4"))
SPACE = [FIRST, SECOND, THIRD]


def of(digest: str, us: float = 100.0) -> Measurement:
    return replace(timed(us), digest=digest)


def test_records_keep_the_digest_if_they_have_it() -> None:
    kept = record(measurement=of(f"{ONE} {OTHER}"))
    assert TuningRecord.from_json(kept.to_json()) == kept
    assert "digest" not in json.loads(RECORD.to_json())["measurement"]
    assert TuningRecord.from_json(RECORD.to_json()).measurement.digest == ""


@pytest.mark.parametrize("bad", ["0123", f"{ONE},{OTHER}", ONE.upper(), f"{ONE} ", 12, "a" * 240])
def test_a_digest_is_checked_when_it_is_read(bad: object) -> None:
    values = json.loads(RECORD.to_json())
    values["measurement"]["digest"] = bad
    with pytest.raises(InvalidRecord, match=r"measurement\.digest must be"):
        TuningRecord.from_json(json.dumps(values))


def test_trials_keep_the_digest_and_older_lines_stay_as_they_are() -> None:
    lines = [
        json.dumps(trial_line(Trial(config=FIRST, measurement=one, date=DATE), CONDITIONS)).encode()
        for one in (timed(100.0), of(ONE))
    ]
    assert ["digest" in json.loads(line)["measurement"] for line in lines] == [False, True]
    assert sorted(join_trials([b"\n".join(lines)], "fwd").splitlines()) == sorted(lines)


def test_the_tuner_says_which_configs_were_one_binary(
    own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    replay = Replay(SMALL)
    two, three = sorted(replay.space)[:2], sorted(replay.space)[2:5]
    for digest, group in ((ONE, two), (OTHER, three)):
        for config in group:
            replay.timings[config] = replace(replay.timings[config], digest=digest)
    tune_replay(replay)
    said = [line for line in caplog.messages if "one binary" in line]
    assert said == [
        f"one binary was timed as {', '.join(c.key for c in group)}: it counts once"
        for group in (two, three)
    ]
    written = [json.loads(line) for line in trial_file(own_cache).read_text().splitlines()]
    assert sum(line["measurement"].get("digest") == OTHER for line in written) == 3


def test_unknown_digests_are_no_binary_in_common() -> None:
    trials = [Trial(config=config, measurement=timed(1.0)) for config in SPACE]
    assert of_one_binary(trials) == []


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Return a recording in which the second config ran the binary of the first, as fast as the
    clock would have it."""
    problem = AttentionProblem.parse("hq2 q64 kv64 d64 bf16 causal")
    path = file_of(tmp_path, "fwd", problem)
    recorder = Recorder(path, new_session(H200, "fwd", problem, len(SPACE)))
    times = {FIRST: of(ONE, 100.0), SECOND: of(ONE, 90.0), THIRD: of(OTHER, 120.0)}
    bench = Bench(
        measure=times.__getitem__,
        compile=lambda configs: ((config, used()) for config in configs),
    )
    assert exhaustive.record(recorder, SPACE, H200, bench, deadline=time.monotonic() + 60) == 0
    return path


def test_a_recording_counts_one_binary_once(recorded: Path) -> None:
    rows = read(recorded)
    assert rows.trials[SECOND].measurement.digest == ONE
    assert rows.one_binary() == [(FIRST, SECOND)]
    assert rows.distinct().times() == {FIRST: 100.0, THIRD: 120.0}


def test_the_judge_of_recordings_says_so_in_a_line(recorded: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(tuner_quality.main)
    out = tmp_path / "rows.csv"
    arguments = [str(recorded), "--seeds", "1", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    expected = f"{recorded}: one binary was timed as m64n64w4s2, m64n64w4s3: it counts once"
    assert result.output.splitlines()[0] == expected
    assert {row["timed"] for row in rows.read(out)} == {"2"}


def test_who_records_says_so_too(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exhaustive, "search_space", lambda *_: SPACE)
    monkeypatch.setattr(exhaustive, "real_bench", lambda *_: Bench(measure=of, compile=iter))
    problem = read(recorded).session.problem
    task = KernelTask.of("fwd", problem, H200)
    exhaustive._record_one(task, recorded.parents[1], None, time.monotonic() + 60)
    lines = capsys.readouterr().out.splitlines()
    assert "3 of 3 timed, complete" in lines[0]
    assert lines[1:] == [
        f"fwd '{problem}': one binary was timed as m64n64w4s2, m64n64w4s3: it counts once"
    ]


def test_rows_of_the_driver_carry_the_digest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That of a library, whose binary nobody here knows, is empty."""
    answers = {"ours": of(f"{ONE} {OTHER}"), "theirs": timed(100.0)}
    right = Verdict(ok=True, error=0.1, allowed=0.2, detail="")
    monkeypatch.setattr(
        run, "check_and_time", lambda case, seconds: (right, answers[case.provider.name])
    )
    todo = run.cases([a_workload("w")], [a_provider(name) for name in answers])
    run.run(todo, tmp_path / "rows.csv", deadline=float("inf"), seconds=0.1, spec=H200)
    lines = {row["provider"]: row["digest"] for row in rows.read(tmp_path / "rows.csv")}
    assert lines == {"ours": f"{ONE} {OTHER}", "theirs": ""}


def test_the_summary_names_binaries_timed_under_two_names(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.csv"
    rows.append(path, a_row(digest=ONE, detail="fwd m64n64w4s2 from a record"))
    rows.append(path, a_row(digest=ONE, detail="fwd m64n64w4s3 from a record"))
    rows.append(path, a_row(digest=ONE, workload="longer", detail="the same tiles serve it"))
    rows.append(path, a_row(provider="library"))
    rows.append(path, a_row(provider="another library"))
    lines = [line for line in summarise(tmp_path, []).splitlines() if "one binary" in line]
    assert lines == [
        f"w forward: one binary ({ONE}) was timed as p fwd m64n64w4s2 from a record; "
        "p fwd m64n64w4s3 from a record."
    ]


def test_rows_are_not_put_below_the_columns_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("workload,problem\nw,p\n")
    with pytest.raises(Unsupported, match=r"found workload,problem; name another file"):
        rows.append(path, a_row())
    assert path.read_text() == "workload,problem\nw,p\n"
