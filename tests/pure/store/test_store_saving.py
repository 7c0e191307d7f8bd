"""Saving: a record is joined with what is there, in one step, and nothing is lost."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import stat
import threading
from pathlib import Path

import pytest

from tests.support.records import RECORD, TASK, own, place, record, save_many, timed, written
from tilegen.disk import say_once
from tilegen.errors import InvalidRecord, Unsupported
from tilegen.store import Saved, TuningRecord, files, list_records, look_up, save


@pytest.fixture(autouse=True)
def _say_everything(caplog: pytest.LogCaptureFixture) -> None:
    """Let every test see warnings that were already logged."""
    say_once.cache_clear()
    caplog.set_level(logging.INFO, logger="tilegen")


def test_save_then_look_up(tmp_path: Path) -> None:
    saved = save(RECORD, location=own(tmp_path))
    assert saved.written
    assert str(tmp_path / RECORD.path) == saved.file
    entry = look_up(TASK, where=[own(tmp_path)])
    assert entry is not None
    assert (entry.record, entry.file, entry.origin) == (RECORD, saved.file, "own")
    assert [Path(saved.file)] == written(tmp_path)


def test_save_goes_to_the_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "mine"))
    assert save(RECORD).file == str(tmp_path / "mine" / RECORD.path)
    entry = look_up(TASK)
    assert entry is not None
    assert entry.origin == "own"


def test_nothing_is_written_for_known_trials(tmp_path: Path) -> None:
    assert save(RECORD, location=own(tmp_path)).written
    again = save(RECORD, location=own(tmp_path))
    assert (again.written, again.wins, again.reason) == (False, True, "nothing new")


def test_a_loser_is_kept_as_rival_with_the_reason(tmp_path: Path) -> None:
    save(record(us=400.0, source="aa"), location=own(tmp_path))
    saved = save(record(us=500.0, source="bb"), location=own(tmp_path))
    assert (saved.written, saved.wins) == (True, False)
    assert saved.reason == "the existing record stays: faster (400 us, the other 500 us)"
    there = TuningRecord.from_json(Path(saved.file).read_text())
    assert there == record(us=400.0, source="aa", rivals=(record(us=500.0, source="bb"),))


def test_dry_run_says_the_same_and_changes_nothing(tmp_path: Path) -> None:
    first = save(RECORD, location=own(tmp_path), dry_run=True)
    assert (first.written, first.wins, first.reason) == (True, True, "there was no record")
    assert written(tmp_path) == []
    save(record(us=400.0, source="aa"), location=own(tmp_path))
    text = (tmp_path / RECORD.path).read_text()
    assert save(record(us=300.0, source="bb"), location=own(tmp_path), dry_run=True).wins
    assert (tmp_path / RECORD.path).read_text() == text


def test_a_record_of_a_later_schema_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    file = tmp_path / RECORD.path
    file.parent.mkdir(parents=True)
    file.write_text('{"schema": 2}')
    with pytest.raises(Unsupported, match="schema must be 1, got 2; use the tilegen that wrote it"):
        save(RECORD, location=own(tmp_path))
    assert file.read_text() == '{"schema": 2}'


def test_a_record_about_something_else_in_the_way_is_kept(tmp_path: Path) -> None:
    file = tmp_path / RECORD.path
    place(tmp_path, RECORD)
    file.write_text(record(arch="sm_80").to_json())
    saved = save(RECORD, location=own(tmp_path))
    assert "found one about" in saved.reason
    assert TuningRecord.from_json(file.read_text()) == RECORD
    kept = file.with_name(f"{file.name}.broken").read_text()
    assert TuningRecord.from_json(kept) == record(arch="sm_80")


def test_a_folder_that_stays_locked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Path(save(RECORD, location=own(tmp_path)).file)
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.05)
    lock = os.open(first.parent / files.LOCK, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(Unsupported, match=r"h200/fwd', found '.tilegen.lock' locked by another"):
        save(record(us=1.0), location=own(tmp_path))
    os.close(lock)
    assert first.read_text() == RECORD.to_json()


def test_where_there_are_no_locks_writes_are_still_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    for us, source in ((400.0, "aa"), (300.0, "bb")):
        assert save(record(us=us, source=source), location=own(tmp_path)).written
    there = TuningRecord.from_json((tmp_path / RECORD.path).read_text())
    assert there.measurement == timed(300.0)
    (said,) = caplog.messages
    assert "has no locks" in said


def test_the_lock_is_one_that_nfs_has_between_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS a folder's lock is this machine's own, and a file's needs that it is open to write."""
    kinds: list[tuple[bool, int]] = []
    real = fcntl.flock

    def nfs(handle: int, what: int) -> None:
        mode = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE
        kinds.append((stat.S_ISREG(os.fstat(handle).st_mode), mode))
        real(handle, what)

    monkeypatch.setattr(fcntl, "flock", nfs)
    save(RECORD, location=own(tmp_path))
    assert set(kinds) == {(True, os.O_RDWR)}


def test_whoever_may_write_into_the_folder_may_lock_it(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        file = Path(save(RECORD, location=own(tmp_path)).file)
    finally:
        os.umask(before)
    assert stat.S_IMODE((file.parent / files.LOCK).stat().st_mode) == 0o666


def test_crash_between_writing_and_renaming_leaves_the_old_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(record(us=400.0), location=own(tmp_path))

    def crash(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            save(record(us=300.0), location=own(tmp_path))
    entry = look_up(TASK, where=[own(tmp_path)])
    assert entry is not None
    assert entry.record == record(us=400.0)
    assert len(written(tmp_path)) == 1


def test_text_is_on_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (calls.append("rename"), rename(self, to))[1]
    )
    save(RECORD, location=own(tmp_path))
    assert calls == ["fsync", "rename", "fsync"]


def test_leftovers_of_a_killed_writer_are_not_records(tmp_path: Path) -> None:
    saved = save(RECORD, location=own(tmp_path))
    file = Path(saved.file)
    file.rename(file.with_name(f".{file.name}.1234.tmp"))
    assert look_up(TASK, where=[own(tmp_path)]) is None
    assert list(list_records([own(tmp_path)])) == []


def test_a_broken_file_in_the_way_is_kept_beside_the_new_record(tmp_path: Path) -> None:
    file = tmp_path / RECORD.path
    file.parent.mkdir(parents=True)
    for attempt in ("first", "second"):
        file.write_text(attempt)
        saved = save(RECORD, location=own(tmp_path))
        assert saved.written
        assert f"is kept as '{file.name}." in saved.reason
    broken = sorted(path.read_text() for path in file.parent.glob("*.broken"))
    assert broken == ["first", "second"]
    assert TuningRecord.from_json(file.read_text()) == RECORD


def test_an_error_for_a_read_only_folder_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "h200").write_text("a file where a folder should be")
    with pytest.raises(Unsupported, match=r"cannot write .*h200.*set TILEGEN_CACHE_DIR"):
        save(RECORD, location=own(tmp_path))


def test_record_that_would_not_read_back_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidRecord, match="command must be printable text"):
        save(record(command="tilegen\ntune"), location=own(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_writer_waits_for_the_one_before_it_and_then_looks_again(tmp_path: Path) -> None:
    first = Path(save(record(us=400.0, source="aa"), location=own(tmp_path)).file)
    lock = os.open(first.parent / files.LOCK, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)  # as another process would hold it
    results: list[Saved] = []
    new = record(us=390.0, source="bb")
    second = threading.Thread(
        target=lambda: results.append(save(new, location=own(tmp_path))), daemon=True
    )
    second.start()
    second.join(timeout=0.3)
    assert second.is_alive(), "it did not wait"
    first.write_text(record(us=300.0, source="cc").to_json())
    os.close(lock)
    second.join(timeout=20)
    (result,) = results
    assert not result.wins
    assert "(300 us, the other 390 us)" in result.reason


@pytest.mark.slow
def test_concurrent_writers_leave_the_fastest_record_whole(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=save_many, args=(tmp_path, n)) for n in range(4)]
    for process in writers:
        process.start()
    while any(process.is_alive() for process in writers):
        file = tmp_path / RECORD.path
        if file.exists():
            TuningRecord.from_json(file.read_text())  # raises if a reader can see half a record
    for process in writers:
        process.join()
        assert process.exitcode == 0
    there = TuningRecord.from_json((tmp_path / RECORD.path).read_text())
    assert there.measurement.median_us == 810.0
    assert {one.source for one in there.findings} == {f"{n:012x}" for n in range(4)}
    assert {one.trials for one in there.findings} == {19}, "of one machine the last one counts"
    assert len(written(tmp_path)) == 1
