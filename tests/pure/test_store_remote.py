"""Locations behind URLs: S3 and HTTP servers on loopback, copies, and servers that are silent."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.records import H200, PROBLEM, RECORD, VERSIONS, own, place, record
from tests.servers import http_server, s3_server, silent_server
from tilegen.disk import say_once
from tilegen.errors import Unsupported
from tilegen.store import (
    Location,
    TuningRecord,
    Unreachable,
    list_records,
    look_up,
    places,
    reach,
    remote,
    save,
)
from tilegen.store.election import join
from tilegen.store.files import BROKEN
from tilegen.store.transfer import merge

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An own directory without copies; nothing is down, and everything is said again."""
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "mine"))
    monkeypatch.setattr(reach, "_down", {})
    say_once.cache_clear()
    caplog.set_level(logging.INFO, logger="tilegen")


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture
def bucket(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: Any) -> str:
    """Return the URL of a bucket of the test's own."""
    import fsspec

    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    name = f"b{abs(hash(request.node.nodeid)):x}"
    fs, _ = fsspec.url_to_fs(f"s3://{name}")
    fs.mkdir(name)
    return f"s3://{name}/team"


@pytest.fixture
def memory(request: Any) -> str:
    return f"memory://{request.node.name}/team"


@pytest.fixture(params=["s3", "memory", "dir"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a writable location: with conditional puts, with plain ones, with renames."""
    if request.param == "dir":  # fsspec's own way to a folder: as SFTP, SMB and such
        return f"dir::file://{tmp_path}/there/team"
    name = "bucket" if request.param == "s3" else "memory"
    return str(request.getfixturevalue(name))


def shared(url: str) -> Location:
    return Location(url, "shared")


def median_at(where: Location) -> float | None:
    found = look_up(PROBLEM, H200, "fwd", where=[where])
    return found and found.record.measurement.median_us


# --------------------------------------------------------------------------------------------------
# Reading and writing


def test_save_look_up_and_list(url: str) -> None:
    where = shared(url)
    assert look_up(PROBLEM, H200, "fwd", where=[where]) is None
    assert list(list_records([where])) == []
    saved = save(RECORD, location=where)
    assert (saved.wins, saved.reason) == (True, "no record was there")
    assert saved.file == f"{url}/{RECORD.path}"
    # The miss is remembered for a while; other own directories have not asked before.
    os.environ["TILEGEN_CACHE_DIR"] += "2"
    found = look_up(PROBLEM, H200, "fwd", where=[where])
    assert found is not None
    assert (found.record, found.origin, found.file) == (RECORD, "shared", saved.file)
    (listed,) = list_records([where])
    assert (listed.record, listed.trouble, listed.file) == (RECORD, "", saved.file)


def test_findings_are_joined(url: str) -> None:
    where = shared(url)
    two = [record(us=400.0, source="aa"), record(us=390.0, source="bb")]
    reasons = [save(one, location=where).reason for one in two]
    assert reasons[1] == "faster (390 us, the other 400 us)"
    assert not save(two[0], location=where).written
    data = places.peek(where, RECORD.path)
    assert data == join(two).to_json().encode()


def test_broken_record_in_the_way_is_kept(url: str) -> None:
    where = shared(url)
    save(RECORD, location=where)
    places.update(where, RECORD.path, lambda _: b"{torn")
    assert look_up(PROBLEM, H200, "fwd", where=[where]) is None
    saved = save(RECORD, location=where)
    assert "expected JSON" in saved.reason
    assert places.peek(where, RECORD.path) == RECORD.to_json().encode()
    kept = places.peek(where, str(RECORD.path) + BROKEN)
    assert kept == b"{torn"


def test_merge_to_and_from(url: str, tmp_path: Path) -> None:
    place(tmp_path / "a", RECORD)
    place(tmp_path / "a", record(kernel="bwd_dq"))
    (tmp_path / "a" / "trials" / "h200" / "fwd").mkdir(parents=True)
    (tmp_path / "a" / "trials" / "h200" / "fwd" / "x.jsonl").write_text("not a trial\n")
    moved = list(merge([own(tmp_path / "a")], shared(url)))
    assert [one.action for one in moved] == ["added", "added", "same"]
    list(merge([shared(url)], own(tmp_path / "b")))
    records = {str(one.record.path) for one in list_records([own(tmp_path / "b")]) if one.record}
    assert records == {str(RECORD.path), str(record(kernel="bwd_dq").path)}


def test_names_of_others_lead_nowhere(memory: str) -> None:
    import fsspec

    fs, root = fsspec.url_to_fs(memory)
    good = RECORD.to_json().encode()
    for name in (
        "h200/fwd/ok.json",
        "h200/fwd/No Good.json",
        "../fwd/x.json",
        "a/b/c/fwd/x.json",
        "h200/fwd/\x1b[2J.json",
        "h200/nope/x.json",
    ):
        fs.pipe_file(f"{root}/{name}", good)
    assert [one.name for one in list_records([shared(memory)])] == ["h200/fwd/ok.json"]


def test_too_large_a_file_is_not_read_whole(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    fs, root = fsspec.url_to_fs(memory)
    fs.pipe_file(f"{root}/{RECORD.path}", b" " * 10_000_000)
    (listed,) = list_records([shared(memory)])
    assert "expected at most 65536 bytes" in listed.trouble


def test_conditional_put_notices_another_writer(bucket: str) -> None:
    save(record(us=400.0, source="aa"), location=shared(bucket))
    path, calls = str(RECORD.path), []

    def change(data: bytes | None) -> bytes | None:
        calls.append(data)
        if len(calls) == 1:  # somebody else is faster, between reading and writing
            save(record(us=300.0, source="bb"), location=shared(bucket))
        old = TuningRecord.from_json((data or b"").decode())
        return join([old, record(us=350.0, source="cc")]).to_json().encode()

    remote.update(bucket, path, change, 65536)
    assert len(calls) == 2, "the first put was refused"
    there = TuningRecord.from_json((places.peek(shared(bucket), path) or b"").decode())
    assert {one.source for one in there.findings} == {"aa", "bb", "cc"}


def test_first_writer_of_a_record_is_noticed_too(bucket: str) -> None:
    calls = []

    def change(data: bytes | None) -> bytes | None:
        calls.append(data)
        if len(calls) == 1:
            save(record(us=300.0, source="bb"), location=shared(bucket))
        return b"new" if data is None else None

    remote.update(bucket, str(RECORD.path), change, 65536)
    assert [data is None for data in calls] == [True, False]


def test_a_writer_that_is_always_overtaken_gives_up(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "TRIES", 3)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    count = iter(range(100))
    with pytest.raises(Unsupported, match="found others writing it 3 times"):
        remote.update(memory, "x", lambda _: str(next(count)).encode(), 65536)


# --------------------------------------------------------------------------------------------------
# Copies


def test_a_copy_stands_for_the_record_for_a_while(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = shared(memory)
    save(record(us=400.0, source="aa"), location=where)
    assert median_at(where) == 400.0
    save(record(us=300.0, source="bb"), location=where)
    assert median_at(where) == 400.0, "the copy is fresh"
    (copy,) = reach.copies(memory).rglob("*.json")
    hours_ago = time.time() - 2 * remote.FRESH_SECONDS
    os.utime(copy, (hours_ago, hours_ago))
    assert median_at(where) == 300.0
    monkeypatch.setattr(remote, "_get", _refuse)
    os.utime(copy, (hours_ago, hours_ago))
    assert median_at(where) == 300.0, "an old copy is better than none"


def test_strict_look_ups_ask_anew(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = shared(memory)
    save(record(us=400.0, source="aa"), location=where)
    assert median_at(where) == 400.0
    save(record(us=300.0, source="bb"), location=where)
    found = look_up(PROBLEM, H200, "fwd", where=[where], strict=True)
    assert found is not None
    assert found.record.measurement.median_us == 300.0
    monkeypatch.setattr(remote, "_get", _refuse)
    with pytest.raises(Unreachable, match="since all ranks must choose alike"):
        look_up(PROBLEM, H200, "fwd", where=[where], strict=True)


def test_a_miss_is_remembered(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = remote._get
    monkeypatch.setattr(
        remote, "_get", lambda url, path, limit: (asked.append(path), real(url, path, limit))[1]
    )
    for _ in range(3):
        assert look_up(PROBLEM, H200, "fwd", where=[shared(memory)]) is None
    assert asked.count(str(RECORD.path)) == 1
    assert len(asked) == len(set(asked)) == 3, "h200, then h100 and h100-pcie to borrow from"


def test_without_a_place_for_copies_it_still_works(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(RECORD, location=shared(memory))
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "file"))
    assert median_at(shared(memory)) == RECORD.measurement.median_us


def _refuse(*_: Any) -> Any:
    raise ConnectionRefusedError(111, "Connection refused")


# --------------------------------------------------------------------------------------------------
# HTTP, and servers that do not answer


def test_http_can_be_read_and_listed_but_not_written(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="needs the package aiohttp; pip install 'tilegen[dev]'")
    place(tmp_path / "there", RECORD)
    with http_server(tmp_path / "there") as address:
        where = shared(address)
        found = look_up(PROBLEM, H200, "fwd", where=[where], versions=VERSIONS)
        assert found is not None
        assert (found.record, found.file) == (RECORD, f"{address}/{RECORD.path}")
        assert [one.record for one in list_records([where])] == [RECORD]
        with pytest.raises(Unsupported, match="can only be read; write to another location"):
            save(record(us=1.0), location=where)
        list(merge([where], own(tmp_path / "pulled")))
    assert (tmp_path / "pulled" / RECORD.path).read_text() == RECORD.to_json()


def test_a_server_that_never_answers_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("aiohttp", reason="needs the package aiohttp; pip install 'tilegen[dev]'")
    monkeypatch.setattr(reach, "ANSWER_SECONDS", 0.5)
    with silent_server() as (address, connections):
        where = [shared(f"{address}/x"), place(tmp_path / "shipped", RECORD, "shipped")]
        started = time.monotonic()
        for _ in range(20):
            found = look_up(PROBLEM, H200, "fwd", where=where)
            assert found is not None
            assert found.origin == "shipped"
        assert time.monotonic() - started < 5
        assert len(connections) <= 2, "it is not asked again and again"
        (message,) = caplog.messages
        assert f"record location '{address}/x' did not answer within 0.5 s" in message
        # Another process of this machine knows, and does not wait either.
        monkeypatch.setattr(reach, "_down", {})
        started = time.monotonic()
        assert look_up(PROBLEM, H200, "fwd", where=where) is not None
        assert time.monotonic() - started < 0.4
        # After a while it is asked again.
        monkeypatch.setattr(reach, "DOWN_SECONDS", 0.0)
        before = len(connections)
        assert look_up(PROBLEM, H200, "fwd", where=where) is not None
        assert len(connections) > before


def test_a_process_with_a_hanging_request_can_end(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from tilegen.store import reach\n"
        "try:\n    reach.ask('x://y', lambda: time.sleep(60), seconds=0.2)\n"
        "except reach.Unreachable as error:\n    print(error)\n"
    )
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "did not answer within 0.2 s\n"
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "url, message",
    [
        ("nosuch://host/x", "Protocol not known"),
        ("http://127.0.0.1:9/x", "cannot be reached"),
    ],
)
def test_places_that_cannot_be(
    url: str, message: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    for _ in range(3):
        assert look_up(PROBLEM, H200, "fwd", where=[shared(url)]) is None
    (warning,) = caplog.messages
    assert message in warning
    assert len(warning) < 500
    assert list(list_records([shared(url)])) == []


def test_a_missing_package_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert look_up(PROBLEM, H200, "fwd", where=[shared("s3a://bucket/x")]) is None
    (warning,) = caplog.messages
    assert "needs a package that is not installed" in warning
    assert "s3fs" in warning


def test_passwords_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    url = "nosuch://user:secret@host/x"
    look_up(PROBLEM, H200, "fwd", where=[shared(url)])
    assert "nosuch://host/x" in caplog.text
    assert "secret" not in caplog.text + str(reach.copies(url))


def test_a_hanging_network_folder_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = place(tmp_path / "net", RECORD, "shared")
    monkeypatch.setattr(reach, "ANSWER_SECONDS", 0.2)
    real = Path.is_dir

    def is_dir(self: Path) -> bool:
        if self == tmp_path / "net":
            time.sleep(30)
        return real(self)

    monkeypatch.setattr(Path, "is_dir", is_dir)
    started = time.monotonic()
    for _ in range(5):
        assert look_up(PROBLEM, H200, "fwd", where=[hanging]) is None
    assert time.monotonic() - started < 3
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
    assert (
        "entry point 'team_tiles:WRONG' of tilegen.caches passed over: expected a text or path"
        in (result.stderr)
    )
    assert "entry point 'team_broken:X' of tilegen.caches passed over" in result.stderr
