"""Records of a newer tilegen are skipped, and never changed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import tilegen
from tests.support.records import PROBLEM, RECORD, TASK, own, place, record
from tilegen.disk import say_once
from tilegen.errors import InvalidRecord, Unsupported
from tilegen.store import TuningRecord, look_up, save
from tilegen.store.listing import check
from tilegen.store.transfer import export, import_, merge, put_trials
from tilegen.store.trials import Conditions, Trial, join_trials, trial_line, trials_path

CONDITIONS = Conditions(
    problem=PROBLEM.key, arch="sm_90", triton="3", driver="5", template_digest="a"
)
NEWER = "99.0.0"


def values(**changes: Any) -> dict[str, Any]:
    return {**json.loads(RECORD.to_json()), **changes}


def of(finding: dict[str, Any], **versions: str) -> dict[str, Any]:
    return finding | {"versions": finding["versions"] | versions}


GOOD = values()
KNOB = GOOD["config"] | {"cluster": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "a schema": values(schema=2),
    "a knob": values(config=KNOB),
    "a rival's knob": values(rivals=[GOOD | {"config": KNOB, "source": "ab"}]),
    "a size": of(values(config=GOOD["config"] | {"block_m": 512}), tilegen=NEWER),
    "a rival's size": values(
        rivals=[of(GOOD | {"config": GOOD["config"] | {"block_m": 512}}, tilegen=NEWER)]
    ),
    "a status": of(values(measurement=GOOD["measurement"] | {"status": "sampled"}), tilegen=NEWER),
    "a mask": of(values(problem="b4 hq32 hkv8 q64 kv64 d128 bf16 spiral(3)"), tilegen=NEWER),
    "another spelling": values(problem="b4 hq32 hkv8 q64 kv64 d128 bf16 causal "),
}


@pytest.fixture(autouse=True)
def _say_everything(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    caplog.set_level(logging.INFO, logger="tilegen")


@pytest.mark.parametrize("name", OTHERS)
def test_the_record_of_another_tilegen_stays_where_it_is(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    where, text = place(tmp_path / "own", RECORD), json.dumps(OTHERS[name])
    file = tmp_path / "own" / RECORD.path
    file.write_text(text)
    for _ in range(2):
        assert look_up(TASK, where=[where]) is None
    (warning,) = caplog.messages
    assert f"record {str(file)!r} skipped: " in warning
    for dry_run in (True, False):
        with pytest.raises(Unsupported, match="use the tilegen that wrote it"):
            save(record(us=300.0), location=where, dry_run=dry_run)
    (moved,) = merge([place(tmp_path / "mine", record(us=300.0))], where)
    assert moved.action == "refused"
    assert [path.name for path in file.parent.iterdir() if path.suffix != ".lock"] == [file.name]
    assert file.read_text() == text


def test_invalid_files_of_this_tilegen_are_broken() -> None:
    for trouble in (
        of(values(config=GOOD["config"] | {"block_m": 512}), tilegen=tilegen.__version__),
        of(values(trials=-1), tilegen="0.0.1"),
        of(values(trials=-1), tilegen="99; rm -rf /"),
        values(trials=-1, versions={"tilegen": [99]}),
        values(trials=-1, rivals=[None, {"versions": 7}]),
    ):
        with pytest.raises(InvalidRecord) as caught:
            TuningRecord.from_json(json.dumps(trouble))
        assert type(caught.value) is InvalidRecord, caught.value


def line_of(**changes: Any) -> dict[str, Any]:
    """Return a line of trials, with some values of this tilegen's changed."""
    trial = Trial(config=RECORD.config, measurement=RECORD.measurement, date=RECORD.date)
    return trial_line(trial, CONDITIONS) | changes


LINE = line_of()
WRITTEN = {"versions": {"tilegen": NEWER, "torch": "9", "cuda": "19"}}
LINES: dict[str, dict[str, Any]] = {
    "a knob": line_of(config=LINE["config"] | {"cluster": 2}),
    "a size": line_of(config=LINE["config"] | {"block_m": 512}, **WRITTEN),
    "a status": line_of(measurement=LINE["measurement"] | {"status": "sampled"}, **WRITTEN),
    "a form of dates": line_of(date="2026-11-24T10:00:00.125Z", **WRITTEN),
}


def test_lines_of_trials_with_a_newer_knob_are_kept(tmp_path: Path) -> None:
    newer, old = json.dumps(LINES["a knob"]).encode(), json.dumps(LINE).encode()
    joined = join_trials([b"{torn\n" + newer, old], "fwd")
    assert joined.splitlines() == [newer, old]
    assert join_trials([joined, old, newer], "fwd") == joined
    name = str(trials_path("h200", "fwd", PROBLEM))
    for content in (newer, old):
        put_trials(name, [content], own(tmp_path))
    assert (tmp_path / name).read_bytes() == joined


@pytest.mark.parametrize("name", LINES)
def test_a_newer_line_stops_no_export_and_is_in_order(tmp_path: Path, name: str) -> None:
    newer, path, stores = json.dumps(LINES[name]), str(trials_path("h200", "fwd", PROBLEM)), []
    for store, lines in (("both", [newer, json.dumps(LINE)]), ("newer", [newer])):
        file = tmp_path / store / path
        file.parent.mkdir(parents=True)
        file.write_text("".join(f"{line}\n" for line in lines))
        stores.append(own(tmp_path / store))
        (checked,) = check(stores[-1:])
        assert checked.reason == ""
        exported = tmp_path / f"{store}.jsonl"
        (moved,) = export(stores[-1:], exported)
        assert moved.action == "added"
        target = own(tmp_path / f"{store} again")
        assert [one.action for one in import_(exported, target)] == ["added"]
        assert (tmp_path / f"{store} again" / path).read_bytes() == file.read_bytes()


def test_newer_lines_without_a_readable_problem_stop_no_export(tmp_path: Path) -> None:
    conditions = {name: value for name, value in LINE["conditions"].items() if name != "driver"}
    newer = json.dumps(line_of(conditions=conditions, **WRITTEN))
    for kernel, lines in (("fwd", [newer, json.dumps(LINE)]), ("bwd_dq", [newer])):
        file = tmp_path / "own" / trials_path("h200", kernel, PROBLEM)
        file.parent.mkdir(parents=True)
        file.write_text("".join(f"{line}\n" for line in lines))
    assert [one.reason for one in check([own(tmp_path / "own")])] == ["", ""]
    moved = {
        one.file.split("/")[-2]: one for one in export([own(tmp_path / "own")], tmp_path / "x")
    }
    assert moved["fwd"].action == "added"
    assert moved["bwd_dq"].action == "refused"
    assert "use the tilegen that wrote them" in moved["bwd_dq"].reason
    assert [one.action for one in import_(tmp_path / "x", own(tmp_path / "again"))] == ["added"]
    copied = tmp_path / "again" / trials_path("h200", "fwd", PROBLEM)
    assert copied.read_text() == f"{newer}\n{json.dumps(LINE)}\n"


def test_bad_lines_of_this_tilegen_are_not_in_order(tmp_path: Path) -> None:
    file = tmp_path / trials_path("h200", "fwd", PROBLEM)
    file.parent.mkdir(parents=True)
    size = LINE["config"] | {"block_m": 512}
    here = {"versions": WRITTEN["versions"] | {"tilegen": tilegen.__version__}}
    for line in (line_of(config=size), line_of(config=size, **here)):
        file.write_text(json.dumps(line) + "\n")
        (checked,) = check([own(tmp_path)])
        assert checked.reason.startswith("1 lines are not trials, first line 1: config: ")


def test_records_that_name_a_version_more_are_read() -> None:
    """Records of releases before 2026-11-27 have the version of SymPy."""
    older = of(values(), sympy="1.14.0")
    assert TuningRecord.from_json(json.dumps(older)) == RECORD
