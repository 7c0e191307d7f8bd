"""Locations that can only be read, that do not answer, or that a package adds."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.records import RECORD, TASK, VERSIONS, own, place, record
from tests.support.servers import http_server, silent_server
from tilegen.errors import Unsupported
from tilegen.store import Location, Unreachable, list_records, look_up, remote, save
from tilegen.store.transfer import merge

ROOT = Path(__file__).parents[3]


pytestmark = pytest.mark.usefixtures("first_contact")


def shared(url: str) -> Location:
    return Location(url, "shared")


def test_http_can_be_read_and_listed_but_not_written(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="needs the package aiohttp; pip install 'tilegen[dev]'")
    place(tmp_path / "there", RECORD)
    with http_server(tmp_path / "there") as address:
        where = shared(address)
        entry = look_up(TASK, where=[where], versions=VERSIONS)
        assert entry is not None
        assert (entry.record, entry.file) == (RECORD, f"{address}/{RECORD.path}")
        assert [one.record for one in list_records([where])] == [RECORD]
        with pytest.raises(Unsupported, match=r"can only be read \(HTTP has no writes\)"):
            save(record(us=1.0), location=where)
        with pytest.raises(Unsupported, match="can only be read"):
            list(merge([own(tmp_path / "nothing")], where, dry_run=True))
        other = replace(TASK, problem=replace(TASK.problem, head_dim_qk=96))
        assert look_up(other, where=[where], strict=True) is None, "a missing file is no failure"
        list(merge([where], own(tmp_path / "pulled")))
    assert (tmp_path / "pulled" / RECORD.path).read_text() == RECORD.to_json()


def test_a_server_that_never_answers_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("aiohttp", reason="needs the package aiohttp; pip install 'tilegen[dev]'")
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.5)
    with silent_server() as (address, connections):
        where = [shared(f"{address}/x"), place(tmp_path / "shipped", RECORD, "shipped")]
        for _ in range(20):
            entry = look_up(TASK, where=where)
            assert entry is not None
            assert entry.origin == "shipped"
        assert len(connections) <= 2, "it is not asked again and again"
        (message,) = caplog.messages
        assert f"record location '{address}/x' did not answer within 0.5 s" in message
        # Another process of this machine knows, and does not wait either.
        monkeypatch.setattr(remote, "_down", {})
        before = len(connections)
        assert look_up(TASK, where=where) is not None
        assert len(connections) == before
        # Where all ranks must agree, it is asked all the same.
        before = len(connections)
        with pytest.raises(Unreachable, match="did not answer"):
            look_up(TASK, where=where, strict=True)
        assert len(connections) > before
        # After a while it is asked again.
        monkeypatch.setattr(remote, "DOWN_SECONDS", 0.0)
        before = len(connections)
        assert look_up(TASK, where=where) is not None
        assert len(connections) > before


def test_a_process_with_a_hanging_request_can_end(tmp_path: Path) -> None:
    code = (
        "import threading\n"
        "from tilegen.store import remote\n"
        "try:\n    remote.ask('x://y', threading.Event().wait, seconds=0.2)\n"
        "except remote.Unreachable as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "did not answer within 0.2 s\n"


@pytest.mark.parametrize(
    "url, message",
    [
        ("nosuch://host/x", "Protocol not known"),
        ("http://127.0.0.1:9/x", "cannot be reached"),
    ],
)
def test_places_that_cannot_be(
    url: str,
    message: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    for _ in range(3):
        assert look_up(TASK, where=[shared(url)]) is None
    (warning,) = caplog.messages
    assert message in warning
    assert len(warning) < 500
    assert list(list_records([shared(url)])) == []
    assert all("skipped" in message for message in caplog.messages)
    with pytest.raises(Unreachable, match="expected all sources to answer"):
        list(merge([shared(url)], own(tmp_path / "b")))


def test_a_missing_package_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert look_up(TASK, where=[shared("s3a://bucket/x")]) is None
    (warning,) = caplog.messages
    assert "needs a package that is not installed" in warning
    assert "s3fs" in warning


def test_passwords_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    url = "nosuch://user:secret@host/x"
    look_up(TASK, where=[shared(url)])
    assert "nosuch://user@host/x" in caplog.text
    assert "secret" not in caplog.text + str(remote.copies(url))


@pytest.mark.parametrize(
    "url, expected",
    [
        ("postgresql://me:secret@db:5432/x", "postgresql://me@db:5432/x"),
        ("postgresql://me:sec/ret@db/x", "postgresql://me@db/x"),
        ("s3://key:sec@ret@host/a@b", "s3://key@host/a@b"),
        ("http://host:8080/a@b", "http://host:8080/a@b"),
        ("https://token@host/a@b", "https://host/a@b"),
        ("https://me:secret@host/x", "https://host/x"),
        ("abfs://one@account/x", "abfs://one@account/x"),
        ("journal:/a@b", "journal:/a@b"),
    ],
)
def test_a_url_is_shown_without_its_password_alone(url: str, expected: str) -> None:
    assert remote.shown(url) == expected


def test_containers_of_one_account_keep_their_copies_apart() -> None:
    """A record of another container would be served from a common copy."""
    left, other = (remote.copies(f"abfs://{name}@account/tilegen") for name in ("one", "other"))
    assert left != other


def test_a_hanging_network_folder_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = place(tmp_path / "net", RECORD, "shared")
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.2)
    real, release = Path.is_dir, threading.Event()

    def is_dir(self: Path) -> bool:
        if self == tmp_path / "net":
            release.wait()
        return real(self)

    monkeypatch.setattr(Path, "is_dir", is_dir)
    for _ in range(5):
        assert look_up(TASK, where=[hanging]) is None
    release.set()
    assert len(caplog.messages) == 1


# --------------------------------------------------------------------------------------------------
# Locations of plug-ins


def test_packages_add_locations(tmp_path: Path) -> None:
    package = tmp_path / "site"
    info = package / "team_tiles-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: team-tiles\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tilegen.caches]\n"
        "folder = team_tiles:FOLDER\nurl = team_tiles:URL\n"
        "wrong = team_tiles:WRONG\nbroken = team_broken:X\n"
    )
    (package / "team_tiles.py").write_text(
        f"from pathlib import Path\nFOLDER = Path({str(tmp_path / 'tiles')!r})\n"
        "URL = 's3://team/tiles'\nWRONG = 7\n"
    )
    (package / "team_broken.py").write_text("1/0\n")
    code = (
        "from tilegen.store import locations\n"
        "for one in locations(): print(one.origin, one.url)\n"
        "locations()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(package), "TILEGEN_CACHE_PATH": "s3://first/x"},
    )
    own_line, *shared_lines, shipped_line = result.stdout.splitlines()
    assert own_line.startswith("own ")
    expected = ["s3://first/x", str(tmp_path / "tiles"), "s3://team/tiles"]
    assert shared_lines == [f"shared {url}" for url in expected]
    assert shipped_line == f"shipped {ROOT / 'cache'}"
    assert result.stderr.count("\n") == 2
    assert "entry point 'team_tiles:WRONG' of tilegen.caches skipped: expected a text or path" in (
        result.stderr
    )
    assert "entry point 'team_broken:X' of tilegen.caches skipped" in result.stderr


def test_one_silent_source_does_not_keep_the_others_from_being_merged(tmp_path: Path) -> None:
    sources = [shared("http://127.0.0.1:9/x"), place(tmp_path / "a", RECORD)]
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9/x' cannot be reached"):
        list(merge(sources, own(tmp_path / "b")))
    assert (tmp_path / "b" / RECORD.path).read_text() == RECORD.to_json()


def test_a_target_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def unanswered(*_: object, **__: object) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(MemoryFileSystem, "open", unanswered)
    silent = shared("memory://x")
    with pytest.raises(Unreachable, match=r"location 'memory://x' cannot be reached"):
        list(merge([place(tmp_path / "a", RECORD)], silent))
    with pytest.raises(Unreachable) as told:
        list(list_records([shared("http://127.0.0.1:9/x")], strict=True))
    assert "Error:" not in str(told.value), "a name of Python's"


def test_a_server_without_index_pages_says_so(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="needs the package aiohttp; pip install 'tilegen[dev]'")
    with http_server(tmp_path) as address:
        with pytest.raises(Unreachable, match="has no index page that lists its files"):
            list(list_records([shared(f"{address}/none")], strict=True))
        assert look_up(TASK, where=[shared(f"{address}/none")]) is None


def test_listing_a_silent_server_ends_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("aiohttp", reason="needs the package aiohttp; pip install 'tilegen[dev]'")
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.3)
    with silent_server() as (address, _):
        assert list(list_records([shared(address)])) == []
    assert "did not answer within 0.3 s; skipped" in caplog.text


def test_an_object_store_that_takes_no_writes_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refused)
    source = place(tmp_path, RECORD)
    with pytest.raises(Unsupported, match=r"^memory://team can only be read \(.*Access Denied\)"):
        list(merge([source], shared("memory://team")))


def test_a_file_system_mounted_for_reading_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda _: flags)
    with pytest.raises(Unsupported, match=r"cannot write .*: Read-only file system"):
        list(merge([own(tmp_path / "none")], shared(str(tmp_path / "team"))))
