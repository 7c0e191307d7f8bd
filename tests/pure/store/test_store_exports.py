"""Exports of stores, and their import: a merge by way of a file, which may be cut or another."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.pure.store.test_store_transfer import CONFIGS, files, log_of, trial, tuned_apart
from tests.support.records import PROBLEM, RECORD, UNMEASURED, own, place, record
from tilegen.errors import Unsupported
from tilegen.store import list_records, save, transfer
from tilegen.store.listing import check
from tilegen.store.transfer import export, import_, merge, promote


def test_unmeasured_records_are_not_moved(tmp_path: Path) -> None:
    guess = record(kernel="bwd_dq", measurement=UNMEASURED)
    mine, there = place(tmp_path / "mine", guess), own(tmp_path / "there")
    file = tmp_path / "winners.jsonl"
    moved = [*merge([mine], there), *promote([mine], there), *export([mine], file)]
    assert {(one.action, one.reason) for one in moved} == {
        ("refused", "nobody has measured it, so the model chooses")
    }
    assert files(tmp_path / "there") == {}
    assert len(file.read_text().splitlines()) == 1, "the head of an export alone"
    (checked,) = check([mine])
    assert "nobody has measured it" in checked.reason
    measured = record(kernel="bwd_dq")
    assert save(measured, location=mine).wins
    assert files(tmp_path / "mine") == {str(measured.path): measured.to_json().encode()}


def test_export_then_import_is_a_merge(tmp_path: Path) -> None:
    a, b = (tuned_apart(tmp_path / name, seed) for seed, name in enumerate("ab"))
    list(merge([a, b], own(tmp_path / "all")))
    carried = tmp_path / "carried.jsonl"
    moved = export([a, b], carried)
    assert {one.action for one in moved} == {"added"}
    list(import_(carried, own(tmp_path / "elsewhere")))
    assert files(tmp_path / "elsewhere") == files(tmp_path / "all")
    text = carried.read_bytes()
    export([a, b], carried)
    assert carried.read_bytes() == text, "the same stores give the same bytes"
    assert {one.action for one in import_(carried, own(tmp_path / "all"))} == {"same"}


def test_a_large_file_of_trials_is_exported_in_several_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import reads a limited number of bytes a line."""
    monkeypatch.setattr(transfer, "TRIALS_OF_A_LINE", 2)
    source, carried = own(tmp_path / "a"), tmp_path / "x.jsonl"
    log = log_of(tmp_path / "a")
    for n, config in enumerate(CONFIGS):
        log.append(trial(config, 100.0 + n))
    (moved,) = export([source], carried)
    assert moved.action == "added"
    lines = [json.loads(line) for line in carried.read_text().splitlines()]
    assert [len(line["trials"]) for line in lines[1:]] == [2, 1]
    list(import_(carried, own(tmp_path / "b")))
    list(merge([source], own(tmp_path / "merged")))
    assert files(tmp_path / "b") == files(tmp_path / "merged")


def test_export_dry_run_writes_nothing(tmp_path: Path) -> None:
    moved = export([place(tmp_path / "a", RECORD)], tmp_path / "x.jsonl", dry_run=True)
    assert [one.action for one in moved] == ["added"]
    assert not (tmp_path / "x.jsonl").exists()


def test_export_refuses_the_second_of_two_about_different_things(tmp_path: Path) -> None:
    where = [place(tmp_path / "a", RECORD), place(tmp_path / "b", record(arch="sm_80"))]
    moved = export(where, tmp_path / "x.jsonl")
    assert [one.action for one in moved] == ["added", "refused"]
    assert "another location has one about" in moved[1].reason


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "which ends in line 0 of 1"),
        (b"{}\n", "expected the field tilegen_export"),
        (b"hello\n", "expected JSON"),
        (b'{"tilegen_export": 2}\n', "tilegen_export must be"),
        (b"\xff\xfe\n", "expected UTF-8"),
    ],
    ids=["empty", "no export", "no JSON", "another form", "no text"],
)
def test_import_of_something_else(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(content)
    with pytest.raises(
        Unsupported, match=f"expected a.* file that tilegen cache export wrote.*{message}"
    ):
        list(import_(file, own(tmp_path / "b")))
    with pytest.raises(Unsupported, match="cannot read"):
        list(import_(tmp_path / "none.jsonl", own(tmp_path / "b")))


def test_import_takes_the_good_lines_and_names_the_bad(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    good = {"record": json.loads(RECORD.to_json())}
    evil = json.loads(RECORD.to_json()) | {"gpu": "../../evil"}
    trials = {"gpu": "../../x", "kernel": "fwd", "problem": PROBLEM.key, "trials": [{"config": 1}]}
    lines = [{"tilegen_export": 1}, {"record": {"schema": 1}}, good, {"record": evil}, trials, {}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "[" * 5000 + "\n")
    moved = list(import_(file, own(tmp_path / "b")))
    assert [one.action for one in moved] == ["refused", "added", "added", "same", *["refused"] * 2]
    assert ", line 2" in moved[0].file
    assert all(path.is_relative_to(tmp_path / "b") for path in tmp_path.rglob("*.json"))
    assert len(files(tmp_path / "b")) == 2


@pytest.mark.parametrize("cut", [0.5, "line"])
def test_import_of_a_truncated_file_joins_its_lines_and_fails(
    tmp_path: Path, cut: float | str
) -> None:
    where = tuned_apart(tmp_path / "a", 0)
    whole, file = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    export([where], whole)
    *lines, last = whole.read_bytes().splitlines(keepends=True)
    kept = b"".join(lines) if cut == "line" else b"".join(lines) + last[: len(last) // 2]
    file.write_bytes(kept)
    target = own(tmp_path / "b")
    with pytest.raises(Unsupported, match=f"ends in line .* of {len(lines) + 1}; export it again"):
        list(import_(file, target))
    assert len(list(list_records([target]))) == len(list(list_records([where])))
    older = [b'{"tilegen_export": 1}\n', *lines[1:], last]
    file.write_bytes(b"".join(older))
    assert len(list(import_(file, target))) == len(lines), "which says no number of lines"


def test_a_target_that_takes_nothing_is_an_error_even_without_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unsupported, match=r"cannot write .*file': Not a directory"):
        list(merge([own(tmp_path / "none")], own(tmp_path / "file" / "store")))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(Unsupported, match=r"cannot write .*: Permission denied"):
        list(merge([own(tmp_path / "none")], own(tmp_path / "new" / "store")))
    assert not (tmp_path / "new").exists()
