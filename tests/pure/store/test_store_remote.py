"""Locations behind URLs, an S3 server on loopback among them: reading, writing, copies."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

from tests.support.records import RECORD, TASK, own, place, record
from tests.support.servers import s3_server
from tilegen.cli.main import app
from tilegen.environment import current, settings
from tilegen.errors import Unsupported
from tilegen.store import (
    Location,
    TuningRecord,
    Unreachable,
    list_records,
    look_up,
    places,
    remote,
    save,
)
from tilegen.store.election import join
from tilegen.store.files import BROKEN
from tilegen.store.transfer import merge

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("first_contact")]

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture
def bucket(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: Any) -> str:
    """Return the URL of a bucket of the test's own."""
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
    entry = look_up(TASK, where=[where])
    return entry and entry.record.measurement.median_us


# --------------------------------------------------------------------------------------------------
# Reading and writing


def test_save_look_up_and_list(url: str) -> None:
    where = shared(url)
    assert look_up(TASK, where=[where]) is None
    assert list(list_records([where])) == []
    saved = save(RECORD, location=where)
    assert (saved.wins, saved.reason) == (True, "there was no record")
    assert saved.file == f"{url}/{RECORD.path}"
    # The miss is remembered for a while; other own directories have not asked before.
    with settings(cache_dir=f"{current().cache_dir}2"):
        entry = look_up(TASK, where=[where])
    assert entry is not None
    assert (entry.record, entry.origin, entry.file) == (RECORD, "shared", saved.file)
    (listed,) = list_records([where])
    assert (listed.record, listed.reason, listed.file) == (RECORD, "", saved.file)


def test_a_bucket_that_is_not_there_is_named(bucket: str) -> None:
    assert list(list_records([Location(f"{bucket}/none/yet", "shared")], strict=True)) == []
    for url in ("s3://misspelt", "s3://misspelt/team"):
        with pytest.raises(Unreachable, match="has no bucket 'misspelt'"):
            list(list_records([Location(url, "shared")], strict=True))
        told = CliRunner().invoke(app, ["cache", "list", url])
        assert told.exit_code == 1
        assert f"location '{url}' has no bucket 'misspelt'" in str(told.exception)


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
    assert look_up(TASK, where=[where]) is None
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
    fs, root = fsspec.url_to_fs(memory)
    fs.pipe_file(f"{root}/{RECORD.path}", b" " * 10_000_000)
    (listed,) = list_records([shared(memory)])
    assert "expected at most 65536 bytes" in listed.reason


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


class Cloud(MemoryFileSystem):
    """A store with the conditions of gcsfs (it can only create on condition) or of adlfs."""

    store: dict[str, Any] = {}  # noqa: RUF012 (as in the class above)
    pseudo_dirs = [""]  # noqa: RUF012
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.partition("://")[2] if "://" in path else path

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        there: Any = self.store.get(path)
        if mode == "create" and there is not None:
            raise FileExistsError(path)
        if options:
            assert options["match_condition"] == "IfNotModified"
            if options["etag"] != there.details["etag"]:
                error: Any = RuntimeError("ResourceModifiedError: ErrorCode:ConditionNotMet")
                error.status_code = 412
                raise error
        super().pipe_file(path, value)
        self.store[path].details = {"etag": f'"{hash(value)}"'}


@pytest.fixture
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a location of Azure's or Google's, as far as fsspec's packages for them go."""
    azure = SimpleNamespace(MatchConditions=SimpleNamespace(IfNotModified="IfNotModified"))
    monkeypatch.setitem(sys.modules, "azure", SimpleNamespace(core=azure))
    monkeypatch.setitem(sys.modules, "azure.core", azure)
    monkeypatch.setattr(Cloud, "store", {})
    fsspec.register_implementation(request.param, Cloud, clobber=True)
    return f"{request.param}://bucket/team"


@pytest.mark.parametrize("cloud", ["abfs", "gs"], indirect=True)
def test_other_clouds_notice_the_first_writer(cloud: str) -> None:
    test_first_writer_of_a_record_is_noticed_too(cloud)


@pytest.mark.parametrize("cloud", ["abfs"], indirect=True)
def test_azure_notices_another_writer(cloud: str) -> None:
    test_conditional_put_notices_another_writer(cloud)


@pytest.mark.parametrize("cloud", ["abfs", "gs"], indirect=True)
def test_findings_are_joined_in_other_clouds(cloud: str) -> None:
    test_findings_are_joined(cloud)
    test_broken_record_in_the_way_is_kept(f"{cloud}/other")


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
    (copy,) = remote.copies(memory).rglob("*.json")
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
    entry = look_up(TASK, where=[where], strict=True)
    assert entry is not None
    assert entry.record.measurement.median_us == 300.0
    monkeypatch.setattr(remote, "_get", _refuse)
    with pytest.raises(Unreachable, match="since all ranks must choose alike"):
        look_up(TASK, where=[where], strict=True)


def test_a_miss_is_remembered(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = remote._get
    monkeypatch.setattr(
        remote, "_get", lambda url, path, limit: (asked.append(path), real(url, path, limit))[1]
    )
    for _ in range(3):
        assert look_up(TASK, where=[shared(memory)]) is None
    assert asked.count(str(RECORD.path)) == 1
    assert len(asked) == len(set(asked)) == 3, "h200, then h100 and h100-pcie to borrow from"


@pytest.mark.slow
def test_without_a_place_for_copies_it_still_works(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(RECORD, location=shared(memory))
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "file"))
    assert median_at(shared(memory)) == RECORD.measurement.median_us


def _refuse(*_: Any) -> Any:
    raise ConnectionRefusedError(111, "Connection refused")
