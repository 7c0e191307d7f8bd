"""No file, whatever it is, crashes a look-up, runs anything or hides the records behind it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.records import RECORD, TASK, folder_of, own, place, record
from tilegen.disk import say_once
from tilegen.errors import InvalidRecord
from tilegen.store import Location, TuningRecord, files, list_records, look_up, places, save, why
from tilegen.store.files import MAX_FILE_BYTES

GOOD = RECORD.to_json()


def edited(*path: str, value: Any) -> bytes:
    """Return RECORD's file with one field set."""
    values = json.loads(GOOD)
    place_of = values
    for name in path[:-1]:
        place_of = place_of[name]
    place_of[path[-1]] = value
    return json.dumps(values).encode()


def without(*path: str) -> bytes:
    """Return RECORD's file with one field taken out."""
    values = json.loads(GOOD)
    place_of = values
    for name in path[:-1]:
        place_of = place_of[name]
    del place_of[path[-1]]
    return json.dumps(values).encode()


def with_text(old: str, new: str) -> bytes:
    """Return RECORD's file with a piece of text replaced: for what json.dumps would not write."""
    assert old in GOOD
    return GOOD.replace(old, new, 1).encode()


def executes(target: str) -> bytes:
    """Return a pickle that would make a file if anybody loaded it."""
    return f"cos\nsystem\n(S'touch {target}'\ntR.".encode()


# Name of the attack -> content of the file, and a piece of the message that must be given.
CONTENTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "expected JSON"),
    "truncated": (GOOD[:300].encode(), "expected JSON"),
    "two records": (GOOD.encode() * 2, "Extra data"),
    "zeros": (bytes(4096), "expected JSON"),
    "binary": (bytes(range(256)), "expected UTF-8"),
    "latin-1": (with_text("tensor", "tens\u00f6r").decode().encode("latin-1"), "expected UTF-8"),
    "utf-16": (GOOD.encode("utf-16"), "expected UTF-8"),
    "byte order mark": (GOOD.encode("utf-8-sig"), "BOM"),
    "huge": (b" " * MAX_FILE_BYTES + GOOD.encode(), "at most 65536 bytes"),
    "deep list": (b"[" * 60_000, "nested too deep"),
    "deep object": (b'{"a":' * 12_000, "nested too deep"),
    "deep inside": (with_text('"h200"', "[" * 900 + "]" * 900), "gpu must be printable"),
    "a list": (b"[1, 2]", "the file must be a JSON object"),
    "a number": (b"1", "the file must be a JSON object"),
    "null": (b"null", "the file must be a JSON object"),
    "pickle": (executes("pwned"), "expected JSON"),
    "python": (b"__import__('os').system('touch pwned')", "expected JSON"),
    "field twice": (with_text('"trials": 64', '"trials": 64, "trials": 65'), "found one twice"),
    "no schema": (without("schema"), "expected the field schema"),
    "no config": (without("config"), "expected the field config"),
    "no block_m": (without("config", "block_m"), "expected the field config.block_m"),
    "no median": (without("measurement", "median_us"), "measurement.median_us"),
    "schema as text": (edited("schema", value="1"), "schema must be an int"),
    "schema true": (edited("schema", value=True), "schema must be an int"),
    "gpu a number": (edited("gpu", value=200), "gpu must be printable text"),
    "gpu empty": (edited("gpu", value=""), "gpu must be the name of a GPU"),
    "gpu too long": (edited("gpu", value="h" * 1001), "at most 200 characters"),
    "escape sequence": (edited("gpu", value="h200\x1b]0;owned\x07"), "printable"),
    "line end in text": (edited("command", value="tilegen\nrm -rf /"), "printable"),
    "lone surrogate": (edited("command", value="\ud800"), "printable"),
    "right to left": (edited("command", value="\u202egnp.exe"), "printable"),
    "arch a path": (edited("arch", value="../../etc"), "arch must be such as"),
    "kernel unknown": (edited("kernel", value="__init__"), "kernel must be one of fwd"),
    "kernel a list": (edited("kernel", value=["fwd"]), "kernel must be one of fwd"),
    "problem nonsense": (edited("problem", value="b4 'or 1=1"), "problem: "),
    "problem of no bucket": (
        edited("problem", value="b3 hq32 hkv8 q64 kv64 d128 bf16 causal"),
        "must be that of a bucket",
    ),
    "problem too large": (
        edited("problem", value="b1 hq1 hkv1 q1 kv1 d999999999999 bf16 full"),
        "problem: head_dim_qk",
    ),
    "problem of spaces": (edited("problem", value=" " * 1001), "at most 1000 characters"),
    "config a list": (edited("config", value=[128, 64]), "config must be a JSON object"),
    "config null": (edited("config", value=None), "config must be a JSON object"),
    "block_m a float": (edited("config", "block_m", value=128.0), "config.block_m must be an int"),
    "block_m as text": (edited("config", "block_m", value="128"), "config.block_m must be an int"),
    "block_m odd": (edited("config", "block_m", value=100), "config: block_m must be one of"),
    "block_m negative": (edited("config", "block_m", value=-128), "config.block_m must be"),
    "num_warps huge": (edited("config", "num_warps", value=10**300), "config.num_warps must be"),
    "num_stages true": (edited("config", "num_stages", value=True), "config.num_stages must be"),
    "config of code": (edited("config", "__class__", value="os.system"), "got also '__class__'"),
    "status wrong": (edited("measurement", "status", value="wrong"), "must be null when"),
    "status unknown": (edited("measurement", "status", value="fast"), "status must be one of"),
    "time nan": (with_text("398.25", "NaN"), "found NaN"),
    "time infinite": (with_text("398.25", "-Infinity"), "found -Infinity"),
    "time overflows": (with_text("398.25", "1e999"), "median_us must be a number"),
    "time of many digits": (with_text("398.25", "9" * 5000), "expected JSON"),
    "time zero": (edited("measurement", "median_us", value=0), "median_us must be a number"),
    "time null": (edited("measurement", "median_us", value=None), "median_us must be a number"),
    "time true": (edited("measurement", "median_us", value=True), "median_us must be a number"),
    "time out of order": (edited("measurement", "p80_us", value=1), "p20_us <= median_us"),
    "repeats huge": (edited("measurement", "repeats", value=2**80), "repeats must be an int"),
    "measured, yet not": (
        edited("measurement", "status", value="unmeasured"),
        "median_us must be null",
    ),
    "bytes negative": (edited("estimate", "read_bytes", value=-1), "read_bytes must be an int"),
    "bytes a float": (edited("estimate", "write_bytes", value=1.5), "write_bytes must be an int"),
    "versions a text": (edited("versions", value="3.7.1"), "versions must be a JSON object"),
    "version an object": (edited("versions", "triton", value={}), "versions.triton must be"),
    "digest not hex": (edited("template_digest", value="../../x"), "hexadecimal digits"),
    "trials negative": (edited("trials", value=-1), "trials must be an int"),
    "seconds text": (edited("seconds_spent", value="1"), "seconds_spent must be a number"),
    "date local": (edited("date", value="2026-11-21T09:30:00+02:00"), "date must be such as"),
    "date impossible": (edited("date", value="2026-02-30T09:30:00Z"), "date must be a date"),
}


def content(data: bytes) -> Callable[[Path], None]:
    return lambda file: (file.write_bytes(data), None)[1]


def _fifo(file: Path) -> None:
    os.mkfifo(file)


def _loop(file: Path) -> None:
    file.symlink_to(file.name)


def _device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def _dangling(file: Path) -> None:
    file.symlink_to("/nowhere/at/all.json")


def _secret(file: Path) -> None:
    secret = file.with_name("secret.txt")
    secret.write_text("the password")
    file.symlink_to(secret)


def _folder(file: Path) -> None:
    file.mkdir()
    (file / "inner.json").write_text(GOOD)


# What is no plain file: (how it gets there, piece of the message, whether it may be set aside).
THINGS: dict[str, tuple[Callable[[Path], None], str, bool]] = {
    "pipe": (_fifo, "expected a regular file", True),
    "link to itself": (_loop, "cannot be opened", False),
    "link to a device": (_device, "expected a regular file", True),
    "link to nothing": (_dangling, "a link to nothing", True),
    "link to other text": (_secret, "expected JSON", True),
    "folder": (_folder, "expected a regular file", True),
}

OF_OTHERS = ("config of code",)
"""What a newer tilegen may have written: a knob is added to the config now and then."""

HOSTILE: dict[str, tuple[Callable[[Path], None], str, bool]] = {
    **{
        name: (content(data), message, name not in OF_OTHERS)
        for name, (data, message) in CONTENTS.items()
    },
    **THINGS,
}


@pytest.fixture(autouse=True)
def _say_everything(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    caplog.set_level(logging.INFO, logger="tilegen")


def put(root: Path, name: str) -> Path:
    """Make the hostile thing at the place of RECORD."""
    file = root / RECORD.path
    file.parent.mkdir(parents=True)
    HOSTILE[name][0](file)
    return file


def test_the_record_they_are_made_from_is_good(tmp_path: Path) -> None:
    file = tmp_path / RECORD.path
    file.parent.mkdir(parents=True)
    file.write_bytes(edited("trials", value=65))
    entry = look_up(TASK, where=[own(tmp_path)])
    assert entry is not None
    assert entry.record == record(trials=65)


@pytest.mark.parametrize("name", HOSTILE)
def test_own_file_is_set_aside_and_the_next_location_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = put(tmp_path / "own", name)
    kind = stat.S_IFMT(file.lstat().st_mode)
    message, movable = HOSTILE[name][1:]
    where = [own(tmp_path / "own"), place(tmp_path / "shipped", RECORD, "shipped")]
    for _ in range(3):
        entry = look_up(TASK, where=where)
        assert entry is not None
        assert entry.origin == "shipped"
    (warning,) = caplog.messages
    assert str(file) in warning
    assert message in warning
    assert warning.isprintable()
    assert len(warning) < 1000
    kept = file.with_name(f"{file.name}.broken") if movable else file
    assert stat.S_IFMT(kept.lstat().st_mode) == kind, "nothing may be lost"
    assert movable != os.path.lexists(file)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_file_of_others_is_only_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    file = put(tmp_path / "shared", name)
    where = [
        Location(str(tmp_path / "shared"), "shared"),
        place(tmp_path / "shipped", RECORD, "shipped"),
    ]
    entry = look_up(TASK, where=where)
    assert entry is not None
    assert entry.origin == "shipped"
    assert os.path.lexists(file)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("name", HOSTILE)
def test_listing_and_explaining_survive_it(tmp_path: Path, name: str) -> None:
    file = put(tmp_path / "own", name)
    where = [own(tmp_path / "own"), place(tmp_path / "shipped", RECORD, "shipped")]
    troubles = {Path(entry.file): entry.reason for entry in list_records(where)}
    assert HOSTILE[name][1] in troubles[file]
    assert troubles[folder_of(where[1]) / RECORD.path] == ""
    assert [entry.record for entry in why(TASK, where=where)] == [RECORD]


@pytest.mark.parametrize("name", ["gpu too long", "deep inside", "num_warps huge", "pickle"])
def test_the_message_does_not_repeat_all_that_was_found(name: str) -> None:
    with pytest.raises(InvalidRecord) as caught:
        TuningRecord.from_json(CONTENTS[name][0].decode())
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in OF_OTHERS])
def test_saving_over_it_loses_neither(tmp_path: Path, name: str) -> None:
    file = put(tmp_path, name)
    kind = stat.S_IFMT(file.lstat().st_mode)
    assert save(RECORD, location=own(tmp_path)).written
    assert not file.is_symlink()
    assert file.read_text() == GOOD
    assert stat.S_IFMT(file.with_name(f"{file.name}.broken").lstat().st_mode) == kind


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    file = tmp_path / RECORD.path
    file.parent.mkdir(parents=True)
    target = tmp_path / "elsewhere.json"
    target.write_text(record(us=500.0).to_json())
    file.symlink_to(target)
    assert look_up(TASK, where=[own(tmp_path)]) is not None
    assert save(record(us=300.0), location=own(tmp_path)).written
    assert TuningRecord.from_json(target.read_text()) == record(us=500.0)
    assert not file.is_symlink()


def test_a_location_below_a_file_is_empty(tmp_path: Path) -> None:
    (tmp_path / "h200").write_text("not a folder")
    assert look_up(TASK, where=[own(tmp_path)]) is None
    assert list(list_records([own(tmp_path)])) == []


def test_names_that_would_leave_the_location_stay_inside(tmp_path: Path) -> None:
    for name in ("../../evil", "/etc", "..", "a/b", "con\x00", "h200\n"):
        path = (tmp_path / record(gpu=name).path).resolve()
        assert path.is_relative_to(tmp_path)
        assert len(path.relative_to(tmp_path).parts) == 3
    evil = record(gpu="../../evil")
    save(evil, location=own(tmp_path / "own"))
    assert [p.name for p in tmp_path.iterdir()] == ["own"]


def test_own_directory_that_is_read_only_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = put(tmp_path, "truncated")

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)  # root may write anywhere, so chmod would not do
    assert look_up(TASK, where=[own(tmp_path)]) is None
    (warning,) = caplog.messages
    assert "skipped" in warning
    assert file.exists()


def test_file_that_cannot_be_read_is_left_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place(tmp_path, RECORD)

    def refuse(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert look_up(TASK, where=[own(tmp_path)]) is None
    assert "Permission denied" in caplog.messages[0]
    assert look_up(TASK, where=[own(tmp_path)]) is not None


def test_location_that_may_not_be_looked_into_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    where = [Location(str(tmp_path / "locked"), "shared"), place(tmp_path, RECORD, "shipped")]

    def refuse(self: Path, *_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_dir", refuse)
        for _ in range(2):
            assert look_up(TASK, where=where) is not None
    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", refuse)
        assert list(list_records(where[:1])) == []
    looked, listed = caplog.messages
    assert "locked' cannot be reached: Permission denied" in looked
    assert "locked' cannot be listed: Permission denied" in listed


@pytest.mark.parametrize("schema", [1, 2])
def test_a_file_that_a_writer_repaired_meanwhile_is_not_set_aside(
    schema: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the broken file and its renaming, by this tilegen or a newer one."""
    where, file = place(tmp_path, RECORD), tmp_path / RECORD.path
    good = json.dumps(json.loads(RECORD.to_json()) | {"schema": schema}).encode()
    file.write_bytes(b"{torn")
    read = places.read

    def then_repaired(*arguments: Any, **options: Any) -> bytes | None:
        data = read(*arguments, **options)
        if data == b"{torn":  # once: a later read must not restore the file
            file.write_bytes(good)
        return data

    monkeypatch.setattr(places, "read", then_repaired)
    look_up(TASK, where=[where])
    assert file.read_bytes() == good
    assert (look_up(TASK, where=[where]) is not None) == (schema == 1)


def test_a_broken_file_stays_while_a_writer_has_the_lock(tmp_path: Path) -> None:
    where, file = place(tmp_path, RECORD), tmp_path / RECORD.path
    file.write_bytes(b"{torn")
    with (file.parent / files.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert look_up(TASK, where=[where]) is None
        assert file.exists()
    look_up(TASK, where=[where])
    assert not file.exists()


def test_set_aside_gives_up_after_a_hundred(tmp_path: Path) -> None:
    kept = []
    for _ in range(99):
        (tmp_path / "x.json").write_text("{")
        kept.append(files.set_aside(tmp_path / "x.json"))
    assert len(set(kept)) == 99
    assert None not in kept
    (tmp_path / "x.json").write_text("{")
    assert files.set_aside(tmp_path / "x.json") is None
