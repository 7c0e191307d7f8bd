"""Storages whose file is broken: named in one line and at once, never taken for an empty one."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from tests.fleet_workers import JOB, SPACE
from tilegen.cli.main import app
from tilegen.errors import Unsupported
from tilegen.fleet import storage
from tilegen.fleet.queue import Queue
from tilegen.fleet.status import progress
from tilegen.fleet.storage import StorageAway, open_storage, patiently


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(_: float) -> NoReturn:
        raise AssertionError("waiting does not repair a file")

    monkeypatch.setattr(time, "sleep", wait)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Return the journal of a study that has been filled."""
    file = tmp_path / "trials.journal"
    queue_a = Queue(open_storage(f"journal:{file}"), JOB.study, JOB.attributes)
    assert queue_a.ready(SPACE[:4])
    return file


BROKEN = {
    "a corrupt byte": lambda line: line[:9] + b"\xff" + line[10:],
    "a missing brace": lambda line: line.replace(b"{", b"[", 1),
    "another object": lambda _: b"{}\n",
    "a list": lambda _: b"[1]\n",
    "half a line": lambda line: line[: len(line) // 2] + b"\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_broken_line_of_a_journal_is_named(journal: Path, name: str) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    before = open_storage(f"journal:{journal}")
    broken = [*lines[:3], BROKEN[name](lines[3]), *lines[4:]]
    journal.write_bytes(b"".join(broken))
    expected = r"trials.journal: line 4 is not an operation of a study; .*head -n 3"
    with pytest.raises(Unsupported, match=expected):
        open_storage(f"journal:{journal}")
    journal.write_bytes(b"".join([*lines, *broken[3:]]))  # while a worker runs
    with pytest.raises(Unsupported, match=f"line {len(lines) + 1} is not an operation"):
        progress(before)
    journal.write_bytes(b"".join(broken[:3]))
    assert progress(open_storage(f"journal:{journal}")) is not None, "what it says to do helps"


def test_a_torn_last_line_is_passed_over(journal: Path) -> None:
    data = journal.read_bytes()
    journal.write_bytes(data[:-5])
    (study,) = progress(open_storage(f"journal:{journal}"))
    assert study.kernel == "fwd"
    journal.write_bytes(data[:3])
    assert progress(open_storage(f"journal:{journal}")) == []


@pytest.mark.parametrize(
    "data", [b"garbage\n", b"garbage", b"\x00" * 99, b"{}\n", b"SQLite format 3"]
)
@pytest.mark.parametrize("form", ["journal:{}", "sqlite:///{}"])
def test_garbage_is_no_storage_without_studies(tmp_path: Path, data: bytes, form: str) -> None:
    file = tmp_path / "storage"
    file.write_bytes(data * 40)
    url = form.format(file)
    with pytest.raises(Unsupported, match=r"is not a journal|is not a SQLite database"):
        open_storage(url)
    result = CliRunner().invoke(app, ["fleet", "status", "--storage", url])
    assert result.exit_code == 1
    assert "name another" in str(result.exception)
    assert file.read_bytes() == data * 40


LASTING = ("ENOSPC", "EDQUOT", "EFBIG", "EACCES", "EPERM", "EROFS", "ENAMETOOLONG")


@pytest.mark.parametrize("name", LASTING)
def test_an_error_that_lasts_ends_at_once_in_its_own_words(name: str, journal: Path) -> None:
    number = getattr(errno, name)

    def call() -> NoReturn:
        raise OSError(number, os.strerror(number))

    with pytest.raises(Unsupported, match=f"trials.journal.*: {os.strerror(number)}; "):
        patiently(call, f"journal:{journal}", 600.0, journal)


def test_a_database_that_cannot_grow_ends_at_once(tmp_path: Path) -> None:
    import sqlalchemy

    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/trials.db")
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 2")
        connection.exec_driver_sql("CREATE TABLE t (text)")

        def call() -> None:
            connection.exec_driver_sql("INSERT INTO t VALUES (zeroblob(99999))")

        with pytest.raises(Unsupported, match=r"the disk is full .database or disk is"):
            patiently(call, "sqlite:///trials.db", 600.0)


def test_ctrl_c_ends_the_wait_for_a_call_that_handles_it_itself() -> None:
    """As psycopg does, which waits for a server to cancel the query."""
    let_go, interrupted = threading.Event(), threading.Event()

    def call() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            let_go.wait()
        except KeyboardInterrupt:
            interrupted.set()
            raise

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            patiently(call, "postgresql://db/tilegen", 600.0)
    finally:
        let_go.set()
        signal.signal(signal.SIGINT, before)
    assert not interrupted.is_set()


def test_a_call_that_does_not_end_is_logged_and_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(storage, "SILENT_SECONDS", 0.01)
    let_go = threading.Event()
    with pytest.raises(
        StorageAway, match=r"has not answered for 0 s: a call did not end; start it"
    ):
        patiently(let_go.wait, "postgresql://db/tilegen", 0.02)
    let_go.set()
    (message,) = caplog.messages
    assert message == ("the storage postgresql://db/tilegen has not answered for 0.01 s; waiting")


@pytest.mark.parametrize("form", ["journal:{}", "sqlite:///{}"])
def test_a_folder_is_no_storage(tmp_path: Path, form: str) -> None:
    with pytest.raises(Unsupported, match=r"is not a regular file|cannot be opened"):
        open_storage(form.format(tmp_path))
