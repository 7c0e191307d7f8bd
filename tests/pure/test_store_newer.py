"""Records of a newer tilegen are skipped, and never changed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import tilegen
from tests.records import PROBLEM, RECORD, TASK, own, place, record
from tilegen.disk import say_once
from tilegen.errors import InvalidRecord, Unsupported
from tilegen.store import TuningRecord, look_up, save
from tilegen.store.transfer import export, import_, merge, put_trials
from tilegen.store.trials import Conditions, Trial, join_trials, trial_line, trials_path
from tilegen.store.upkeep import check

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


def test_lines_of_trials_with_a_newer_knob_are_kept(tmp_path: Path) -> None:
    known = trial_line(
        Trial(config=RECORD.config, measurement=RECORD.measurement, date=RECORD.date), CONDITIONS
    )
    newer = json.dumps(known | {"config": known["config"] | {"cluster": 2}}).encode()
    old = json.dumps(known).encode()
    joined = join_trials([b"{torn\n" + newer, old], "fwd")
    assert joined.splitlines() == [newer, old]
    assert join_trials([joined, old, newer], "fwd") == joined
    name = str(trials_path("h200", "fwd", PROBLEM))
    for content in (newer, old):
        put_trials(name, [content], own(tmp_path))
    assert (tmp_path / name).read_bytes() == joined


def test_a_newer_line_stops_no_export_and_is_in_order(tmp_path: Path) -> None:
    known = trial_line(
        Trial(config=RECORD.config, measurement=RECORD.measurement, date=RECORD.date), CONDITIONS
    )
    newer = json.dumps(known | {"config": known["config"] | {"cluster": 2}})
    name, stores = str(trials_path("h200", "fwd", PROBLEM)), []
    for store, lines in (("both", [newer, json.dumps(known)]), ("newer", [newer])):
        file = tmp_path / store / name
        file.parent.mkdir(parents=True)
        file.write_text("".join(f"{line}\n" for line in lines))
        stores.append(own(tmp_path / store))
        (checked,) = check(stores[-1:])
        assert checked.trouble == ""
        exported = tmp_path / f"{store}.jsonl"
        (moved,) = export(stores[-1:], exported)
        assert moved.action == "added"
        target = own(tmp_path / f"{store} again")
        assert [one.action for one in import_(exported, target)] == ["added"]
        assert (tmp_path / f"{store} again" / name).read_bytes() == file.read_bytes()


def test_records_that_name_a_version_more_are_read() -> None:
    """Records of releases before 2026-11-27 have the version of SymPy."""
    older = of(values(), sympy="1.14.0")
    assert TuningRecord.from_json(json.dumps(older)) == RECORD
