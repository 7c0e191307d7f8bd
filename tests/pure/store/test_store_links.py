"""Links and names in a store that are not tilegen's: followed nowhere, spelt out for terminals."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.records import PROBLEM, RECORD, TASK, UNMEASURED, own, place, record, written
from tilegen.cli import main
from tilegen.disk import printable
from tilegen.errors import Unsupported
from tilegen.store import Location, look_up, save
from tilegen.store.listing import prune
from tilegen.store.transfer import merge
from tilegen.store.trials import Conditions, Trial
from tilegen.tuning.trials import TrialLog

CONDITIONS = Conditions(
    problem=PROBLEM.key, arch="sm_90", triton="3.7.1", driver="580", template_digest="ab"
)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in written(folder)}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Return another's folder, full of what `prune` would remove if it were tilegen's."""
    folder = tmp_path / "foreign"
    month = time.time() - 30 * 24 * 3600
    for name in ("data.json", "deep/data.json", "fwd/.a.json.1234.tmp", "fwd/b.json.broken"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{")
        os.utime(file, (month, month))
    old = record(date="2020-01-01T00:00:00Z", measurement=UNMEASURED)
    place(folder, old)
    return folder


@pytest.mark.parametrize("link", ["remote", "kernels", "h200", "trials", "remote/s3-bucket"])
def test_prune_stays_in_the_folder(tmp_path: Path, foreign: Path, link: str) -> None:
    where, before = own(tmp_path / "own"), contents(foreign)
    at = tmp_path / "own" / link
    at.parent.mkdir(parents=True)
    at.symlink_to(foreign / "h200" if link == "h200" else foreign)
    assert prune(where, older_than_days=1, unmeasured=True) == []
    assert contents(foreign) == before


def test_a_location_may_itself_be_a_link(tmp_path: Path) -> None:
    where = own(tmp_path / "own")
    (tmp_path / "scratch").mkdir()
    (tmp_path / "own").symlink_to(tmp_path / "scratch")
    assert save(record(date="2020-01-01T00:00:00Z"), location=where).written
    assert len(prune(where, older_than_days=1)) == 1


@pytest.mark.parametrize("link", ["h200", "h200/fwd"])
@pytest.mark.parametrize("origin", ["own", "shared"])
def test_a_folder_that_is_a_link_is_read_and_not_written(
    tmp_path: Path, link: str, origin: str
) -> None:
    there, target = place(tmp_path / "there", record(us=400.0)), tmp_path / "there" / link
    where = Location(str(tmp_path / "mine"), "own" if origin == "own" else "shared")
    at = tmp_path / "mine" / link
    at.parent.mkdir(parents=True)
    at.symlink_to(target)
    entry = look_up(TASK, where=[where])
    assert entry is not None
    assert entry.record == record(us=400.0)
    before = contents(tmp_path / "there")
    for act in (
        lambda: save(record(us=300.0), location=where),
        lambda: list(merge([place(tmp_path / "other", record(us=300.0))], where)),
    ):
        with pytest.raises(Unsupported, match="found a link to another; add the link's target"):
            act()
    (tmp_path / "there" / RECORD.path).write_text("{torn")
    assert look_up(TASK, where=[where]) is None
    assert list(contents(tmp_path / "there")) == list(before), "not set aside through the link"
    assert there.folder is not None


def test_trials_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "there" / "h200").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "trials").symlink_to(tmp_path / "there")
    log = TrialLog(tmp_path / "mine", "h200", "fwd", PROBLEM, CONDITIONS)
    with pytest.raises(Unsupported, match="found a link to another"):
        log.append(Trial(config=RECORD.config, measurement=RECORD.measurement))
    assert contents(tmp_path / "there") == {}


EVIL = {
    "escape": "\x1b[2J.json",
    "line end": "a\nb.json",
    "no text": os.fsdecode(b"\xff.json"),
}


@pytest.mark.parametrize("name", EVIL)
@pytest.mark.parametrize("command", ["list", "verify", "merge", "prune"])
def test_names_are_spelt_out_for_terminals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    folder = (tmp_path / RECORD.path).parent
    folder.mkdir(parents=True)
    broken = ".broken" if command == "prune" else ""
    (folder / (EVIL[name] + broken)).write_text("{")
    arguments = ["cache", command, *(["own"] if command != "merge" else ["own", "--into", "own"])]
    result = CliRunner().invoke(main.app, arguments)
    assert printable(EVIL[name]) in result.output
    assert EVIL[name] not in result.output
    assert "\x1b" not in result.output
