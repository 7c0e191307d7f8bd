"""1 000 fuzzed and hostile files: none crashes a look-up or runs anything, each is put aside by
name, and the record behind it answers."""

from __future__ import annotations

import builtins
import json
import logging
import os
import pickle
import random
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.store.test_hostile_records import CONTENTS, GOOD, THINGS, edited
from tests.support.records import H200, PROBLEM, RECORD, own, place, record
from tilegen.disk import say_once
from tilegen.errors import InvalidRecord
from tilegen.problem import AttentionProblem
from tilegen.store import Location, TuningRecord, list_records, look_up
from tilegen.store.files import MAX_FILE_BYTES
from tilegen.store.transfer import import_, merge
from tilegen.store.trials import Conditions, trials_path
from tilegen.task import KernelTask
from tilegen.tuning.trials import TrialLog

FILES = 1200
"""Number of files. At least 1,000 of them are broken; some changes are harmless."""
SEED = 5
HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 10**300, -(10**300), 1e308, -0.0, 1e-300, 0.5, "", " ", "NaN",
    "../../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "~root", "a" * 5000, "\x00",
    "\x1b[2J", "\ud800", "\u202e", "%n%s", "${HOME}", "$(touch pwned)",
    "__import__('os').system('touch pwned')", "{{7*7}}", [], [[]], [1] * 1000, {},
    {"__class__": "os.system"}, {"a": {"b": {"c": {}}}},
)  # fmt: skip


def problem(n: int) -> AttentionProblem:
    """Return the n-th of many problems that differ in their heads."""
    return replace(PROBLEM, num_heads_q=8 * (n + 1), num_heads_kv=8)


def fuzzed(chance: random.Random, good: dict[str, Any]) -> bytes:
    """Return a record's text, broken in one of many ways."""
    text = json.dumps(good).encode()
    values = json.loads(text)
    way = chance.randrange(9)
    if way == 0:  # cut off
        return text[: chance.randrange(len(text))]
    if way == 1:  # flipped bits
        data = bytearray(text)
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        return bytes(data)
    if way == 2:  # noise in the middle
        at = chance.randrange(len(text))
        return text[:at] + chance.randbytes(chance.randint(1, 300)) + text[at:]
    if way == 3:  # another encoding
        return text.decode().encode(chance.choice(["utf-16", "utf-32", "utf-8-sig", "utf-7"]))
    if way == 4:  # too much
        return text + b" " * MAX_FILE_BYTES
    if way == 5:  # nested
        deep = chance.randint(50, 20_000)
        return text.replace(b'"h200"', b"[" * deep + b"]" * deep, 1)
    if way == 6:  # numbers that JSON has not, or too long ones
        number = chance.choice([b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 6000, b"0x10"])
        return text.replace(b"398.25", number, 1)
    if way == 7:  # rivals: a list of anything
        values["rivals"] = chance.choice(
            [[good] * 16, [chance.choice(HOSTILE_VALUES)], chance.choice(HOSTILE_VALUES), [{}], 1]
        )
        return json.dumps(values).encode()
    for _ in range(chance.randint(1, 3)):  # wrong values in fields
        group = chance.choice([values, *(one for one in values.values() if isinstance(one, dict))])
        name = chance.choice([*group, "unknown"])
        if chance.random() < 0.2:
            group.pop(name, None)
        else:
            group[name] = chance.choice(HOSTILE_VALUES)
        if not values:
            break
    return json.dumps(values).encode()


@pytest.fixture
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything is executed, unpickled or written outside; and work where it would show."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("a record was executed")

    for module, name in (
        (os, "system"),
        (os, "popen"),
        (subprocess, "Popen"),
        (pickle, "loads"),
        (pickle, "load"),
        (builtins, "eval"),
    ):
        monkeypatch.setattr(module, name, forbidden)


@pytest.fixture(autouse=True)
def _say_everything(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    caplog.set_level(logging.INFO, logger="tilegen")


def hostile(chance: random.Random, n: int, good: dict[str, Any]) -> Callable[[Path], object]:
    """Return the function that makes the n-th hostile file."""
    things = [make for make, _, _ in THINGS.values()]
    contents = [data for data, _ in CONTENTS.values()]
    if n < 6 * len(things):
        return things[n % len(things)]
    data = contents[n % len(contents)] if n < 400 else fuzzed(chance, good)
    return lambda file: file.write_bytes(data)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("origin", ["own", "shared"])
def test_hostile_files_do_no_harm_and_are_set_aside_by_name(
    tmp_path: Path, origin: str, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(f"{SEED} {origin}")
    first, behind = tmp_path / "first", tmp_path / "behind"
    where = [Location(str(first), origin), Location(str(behind), "shipped")]
    files: list[Path] = []
    for n in range(FILES // 2):
        good = record(problem=problem(n), us=900.0)
        place(behind, good)
        file = first / good.path
        file.parent.mkdir(parents=True, exist_ok=True)
        hostile(chance, n, json.loads(good.to_json()))(file)
        files.append(file)
    (first / "h200" / "fwd" / "secret.txt").unlink(missing_ok=True)  # of a link, once is enough

    harmless = 0
    for n, file in enumerate(files):
        caplog.clear()
        entry = look_up(KernelTask.of("fwd", problem(n), H200), where=where)
        assert entry is not None, file
        if Path(entry.file) == file:  # what was changed does not matter, or is in range
            assert TuningRecord.from_json(file.read_text()).problem == problem(n)
            harmless += 1
            continue
        assert entry.record == record(problem=problem(n), us=900.0)
        (warning,) = caplog.messages
        assert repr(str(file)) in warning
        assert warning.isprintable()
        assert len(warning) < 1000
        aside = origin == "own" and "set aside as" in warning
        assert os.path.lexists(file) != aside
        assert os.path.lexists(file.with_name(f"{file.name}.broken")) == aside
    assert len(files) - harmless >= 500, "so many of them are broken"
    assert list((tmp_path / "work").iterdir()) == []
    outside = {path.name for path in tmp_path.iterdir()}
    assert outside == {"first", "behind", "work"}

    listed = list(list_records(where[:1]))
    assert len(listed) == len(files)
    usable = sum(one.record is not None and not one.reason for one in listed)
    moved = list(merge(where[:1], own(tmp_path / "merged")))
    assert sum(one.action == "added" for one in moved) == usable
    assert all(not one.reason for one in list_records([own(tmp_path / "merged")]))


CONDITIONS = Conditions(
    problem=PROBLEM.key, arch="sm_90", triton="3.7.1", driver="580", template_digest="ab"
)


@pytest.mark.usefixtures("nothing_runs")
def test_hostile_files_of_trials(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(SEED)
    log = TrialLog(tmp_path, "h200", "fwd", PROBLEM, CONDITIONS)
    log.file.parent.mkdir(parents=True)
    good = json.loads(record().to_json()) | {"seconds": 1.0, "spill_bytes": 0}
    good["conditions"] = dict(vars(CONDITIONS))
    for _ in range(100):
        lines = [fuzzed(chance, good) for _ in range(chance.randint(1, 4))]
        log.file.write_bytes(b"\n".join(lines))
        for config, trial in log.read().items():
            assert config == trial.config
        list(merge([own(tmp_path)], own(tmp_path / "b")))
    for make, _, _ in THINGS.values():
        if log.file.is_dir() and not log.file.is_symlink():
            log.file.rename(log.file.with_name("folder"))
        log.file.unlink(missing_ok=True)
        make(log.file)
        assert log.read() == {}
    merged = TrialLog(tmp_path / "b", "h200", "fwd", PROBLEM, CONDITIONS)
    caplog.clear()
    merged.read()
    assert caplog.messages == [], "a joined file has good lines only"
    assert str(merged.file).endswith(str(trials_path("h200", "fwd", PROBLEM)))


@pytest.mark.usefixtures("nothing_runs")
def test_hostile_exports(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    good = json.loads(record().to_json())
    file, target = tmp_path / "x.jsonl", own(tmp_path / "b")
    for n in range(150):
        body = fuzzed(chance, {"record": good} if n % 2 else {"trials": [good], **good})
        file.write_bytes(b'{"tilegen_export": 1}\n' + body + b"\n")
        assert {one.action for one in import_(file, target)} <= {
            "added",
            "changed",
            "same",
            "refused",
        }
    assert all(not one.reason for one in list_records([target]))
    assert {path.name for path in tmp_path.iterdir()} <= {"x.jsonl", "b", "work"}


def test_fuzzing_covers_every_way() -> None:
    chance = random.Random(SEED)
    good = json.loads(record().to_json())
    messages = set()
    for _ in range(400):
        try:
            TuningRecord.from_json(fuzzed(chance, good).decode("utf-8"))
        except (InvalidRecord, UnicodeDecodeError) as error:
            messages.add(str(error)[:20])
    assert len(messages) > 30


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
FIELDS = [(name,) for name in json.loads(GOOD)] + [
    (name, inner)
    for name, group in json.loads(GOOD).items()
    if isinstance(group, dict)
    for inner in group
]


@given(st.sampled_from(FIELDS), JSON)
@settings(max_examples=200)
def test_any_value_in_any_field_is_a_record_or_invalid(path: tuple[str, ...], value: Any) -> None:
    text, message = edited(*path, value=value).decode(), ""
    try:
        actual = TuningRecord.from_json(text)
        assert TuningRecord.from_json(actual.to_json()) == actual
    except InvalidRecord as error:
        message = str(error)
    assert message.isprintable()


@given(st.binary(max_size=200) | st.integers(0, len(GOOD)).map(lambda n: GOOD[:n].encode()))
def test_any_bytes_are_a_record_or_invalid(data: bytes) -> None:
    try:
        out = TuningRecord.from_json(data.decode("utf-8", errors="replace"))
    except InvalidRecord:
        return
    assert out == RECORD
