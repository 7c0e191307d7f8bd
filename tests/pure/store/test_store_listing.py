"""Listing records, and explaining which one a call would use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.records import (
    A100,
    H200,
    PROBLEM,
    RECORD,
    TASK,
    UNMEASURED,
    VERSIONS,
    folder_of,
    own,
    place,
    record,
)
from tilegen.problem import AttentionProblem
from tilegen.store import Location, answer, list_records, look_up, why, why_lines
from tilegen.task import KernelTask

ROOT = Path(__file__).parents[3]


def test_why_lists_the_nearest_first_with_only_what_differs(tmp_path: Path) -> None:
    other_length = record(problem=replace(PROBLEM, seqlen_kv=128))
    other_lengths = record(problem=replace(PROBLEM, seqlen_q=256, seqlen_kv=256))
    other_mask = record(problem=AttentionProblem.parse("b4 hq32 hkv8 q64 d128 bf16 full"))
    other_gpu = record(gpu="h100")
    other_arch = record(gpu=A100.name, arch=A100.arch)
    other_kernel = record(kernel="bwd_dq")
    for item in (other_kernel, other_arch, other_gpu, other_mask, other_lengths, other_length):
        place(tmp_path, item)
    report = why(TASK, where=[own(tmp_path)])
    expected = [other_length, other_lengths, other_mask, other_gpu]
    assert expected == [entry.record for entry in report]
    assert [str(d) for d in report[0].differences] == ["seqlen_kv: current 64, stored 128"]
    assert [str(d) for d in report[3].differences] == ["gpu: current h200, stored h100"]
    assert why(TASK, where=[own(tmp_path)], top=2) == report[:2]


def test_why_compares_with_the_bucket_and_names_soft_differences_too(tmp_path: Path) -> None:
    where = [place(tmp_path, RECORD)]
    ragged = replace(PROBLEM, seqlen_q=61)
    newer = replace(VERSIONS, triton="3.9.0")
    (entry,) = why(KernelTask.of("fwd", ragged, H200), versions=newer, where=where)
    assert [str(d) for d in entry.differences] == ["triton: current 3.9.0, stored 3.7.1"]


def test_why_prefers_a_measured_record_among_equals(tmp_path: Path) -> None:
    guess = place(tmp_path / "own", record(measurement=UNMEASURED), "own")
    known = place(tmp_path / "shipped", record(us=370.0), "shipped")
    report = why(TASK, where=[guess, known])
    assert [entry.origin for entry in report] == ["shipped", "own"]


def test_why_lines(tmp_path: Path) -> None:
    where = [place(tmp_path, record(measurement=UNMEASURED)), own(tmp_path / "empty")]
    other = replace(PROBLEM, seqlen_q=32)
    nearest = why(KernelTask.of("fwd", other, H200), where=where)
    head, path, differs = why_lines(KernelTask.of("fwd", other, H200), None, nearest)
    assert head == "fwd: 1 other record on sm_90"
    assert path == f"  own, unmeasured  {RECORD.path}"
    assert differs == "    seqlen_q: current 32, stored 64"
    (line,) = why_lines(KernelTask.of("fwd", other, H200), None, [])
    assert line == "fwd: no other records on sm_90"


def test_the_record_that_is_used_is_no_other(tmp_path: Path) -> None:
    where = [place(tmp_path / name, RECORD, name) for name in ("own", "shipped")]
    nearest = why(TASK, where=where)
    used = look_up(TASK, where=where)
    assert answer(used) == "own record: m128n64w8s3, 398 us"
    assert answer(None) == "the model: no record"
    _, shipped, differs = why_lines(TASK, used, nearest)
    assert shipped == f"  shipped  {RECORD.path}"
    assert differs == "    an equal match, in a later location"


def test_list_shows_all_files_of_all_locations_and_changes_none(tmp_path: Path) -> None:
    good = place(tmp_path / "own", RECORD)
    folder = (folder_of(good) / RECORD.path).parent
    (folder / "torn.json").write_text(RECORD.to_json()[:200])
    (folder / "moved.json").write_text(record(us=1.0).to_json())
    (folder / "old.json.broken").write_text("{")
    shipped = place(tmp_path / "shipped", record(gpu="a100", arch="sm_80"), "shipped")
    (folder_of(good) / "trials" / "h200").mkdir(parents=True)  # other things are there, too
    before = sorted(tmp_path.rglob("*"))
    listed = {Path(entry.name).name: entry for entry in list_records([good])}
    assert set(listed) == {RECORD.path.name, "torn.json", "moved.json", "old.json.broken"}
    assert (listed[RECORD.path.name].record, listed[RECORD.path.name].reason) == (RECORD, "")
    assert "expected JSON" in listed["torn.json"].reason
    assert "belongs at" in listed["moved.json"].reason
    assert "set aside" in listed["old.json.broken"].reason
    assert [
        (entry.origin, entry.record.gpu) for entry in list_records([shipped]) if entry.record
    ] == [("shipped", "a100")]
    assert before == sorted(tmp_path.rglob("*"))


def test_shipped_records_are_all_in_order() -> None:
    troubles = [e for e in list_records([Location(str(ROOT / "cache"), "shipped")]) if e.reason]
    assert troubles == []
