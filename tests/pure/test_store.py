"""Records round-trip, are written whole, found in order, compared and explained."""

from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.problems import PROBLEMS
from tests.records import (
    A100,
    H200,
    PROBLEM,
    RECORD,
    UNMEASURED,
    VERSIONS,
    own,
    place,
    record,
    save_many,
    timed,
)
from tilegen.config import LARGE_CACHE, TileConfig
from tilegen.disk import say_once
from tilegen.errors import InvalidRecord, Unsupported
from tilegen.measure import Measurement
from tilegen.problem import AttentionProblem
from tilegen.store import (
    Location,
    Saved,
    TuningRecord,
    Versions,
    current_versions,
    list_records,
    locations,
    look_up,
    lookup,
    now,
    save,
    slug,
    why,
    why_lines,
)
from tilegen.store import record as record_module

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _say_everything(caplog: pytest.LogCaptureFixture) -> None:
    """Let every test hear what an earlier one was told."""
    say_once.cache_clear()
    caplog.set_level(logging.INFO, logger="tilegen")


# --------------------------------------------------------------------------------------------------
# The record and its form


def test_round_trip() -> None:
    assert TuningRecord.from_json(RECORD.to_json()) == RECORD
    unmeasured = record(measurement=UNMEASURED, estimate=None, versions=Versions())
    assert TuningRecord.from_json(unmeasured.to_json()) == unmeasured


@pytest.mark.parametrize("problem", [p.bucket for p in PROBLEMS], ids=str)
def test_round_trip_of_every_problem(problem: AttentionProblem) -> None:
    for kernel in LARGE_CACHE:
        one = record(problem=problem, kernel=kernel)
        assert TuningRecord.from_json(one.to_json()) == one


def test_json_spells_the_key_in_clear() -> None:
    values = json.loads(RECORD.to_json())
    assert values["schema"] == 1
    assert values["problem"] == "b4 hq32 hkv8 q4096 kv4096 d128 bf16 causal"
    assert values["config"] == {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3}
    assert values["measurement"]["median_us"] == 398.25
    assert {"schema"} | {f.name for f in fields(TuningRecord)} == set(values)


def test_every_field_is_in_the_readme_of_the_format() -> None:
    readme = (ROOT / "cache" / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("## Fields") : readme.index("## What a difference means")]
    described = set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"^\| (.*?) \|", table, re.M))))
    names = {f.name for f in fields(TuningRecord)}
    for group in (RECORD.config, RECORD.measurement, RECORD.estimate, RECORD.versions):
        assert group is not None
        names |= {f.name for f in fields(group)}
    assert names <= described, f"cache/README.md does not describe {sorted(names - described)}"


def test_fields_added_later_are_ignored_but_not_in_the_config() -> None:
    values = json.loads(RECORD.to_json())
    values["note"] = {"by": "someone"}
    assert TuningRecord.from_json(json.dumps(values)) == RECORD
    values["config"]["cluster"] = 2  # another config than the one this tilegen would build
    with pytest.raises(InvalidRecord, match="got also 'cluster'"):
        TuningRecord.from_json(json.dumps(values))


def test_config_fields_with_a_default_may_be_absent() -> None:
    values = json.loads(RECORD.to_json())
    values["config"] = {"block_m": 64, "block_n": 32}
    expected = record(config=TileConfig(block_m=64, block_n=32))
    assert expected == TuningRecord.from_json(json.dumps(values))


def test_record_of_a_failure_or_of_no_bucket_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="got one that is launch_failed: bad luck"):
        record(measurement=Measurement(status="launch_failed", message="bad luck"))
    ragged = replace(PROBLEM, seqlen_q=4000)
    with pytest.raises(InvalidRecord, match="its bucket is 'b4 hq32 hkv8 q4096"):
        record(problem=ragged)


def test_now_is_a_date_that_a_record_takes() -> None:
    dated = record(date=now())
    assert TuningRecord.from_json(dated.to_json()) == dated


def test_current_versions(tmp_path: Path) -> None:
    import torch
    import triton

    import tilegen

    found = current_versions()
    assert (tilegen.__version__, torch.__version__) == (found.tilegen, found.torch)
    assert triton.__version__ == found.triton
    assert TuningRecord.from_json(record(versions=found).to_json()).versions == found

    kernel_module = tmp_path / "version"
    assert record_module._driver(kernel_module) == ""
    kernel_module.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    assert record_module._driver(kernel_module) == "580.65.06"


# --------------------------------------------------------------------------------------------------
# Paths


@pytest.mark.parametrize(
    "key, expected",
    [
        ("b1 hq8 hkv1 q1 kv64 d64 fp16 full", "b1_hq8_hkv1_q1_kv64_d64_fp16_full"),
        (
            "b1 hq1 hkv1 q64 kv64 d192/128 bf16 causal&window(4095,0)",
            "b1_hq1_hkv1_q64_kv64_d192-128_bf16_causal+window-4095-0",
        ),
        (
            "b1 hq1 hkv1 q64 kv64 d64 fp32 window(-1,7,bottom_right)",
            "b1_hq1_hkv1_q64_kv64_d64_fp32_window--1-7-bottom_right",
        ),
    ],
)
def test_slug_is_readable(key: str, expected: str) -> None:
    assert expected == slug(key)
    assert key == AttentionProblem.parse(key).key


def test_record_path() -> None:
    expected = "h200/fwd/b4_hq32_hkv8_q4096_kv4096_d128_bf16_causal.json"
    assert expected == str(RECORD.path)


@given(st.text(min_size=1, max_size=300))
def test_slug_is_always_one_safe_file_name(text: str) -> None:
    assert re.fullmatch(r"[a-z0-9][a-z0-9_+.-]{0,149}", slug(text))


@given(st.text("abA&+,-()/ _.é", min_size=1), st.text("abA&+,-()/ _.é", min_size=1))
def test_slugs_of_unusual_keys_differ(one: str, other: str) -> None:
    unusual = {text: slug(f"É{text}") for text in (one, other)}
    assert len(set(unusual.values())) == len(unusual)


def test_long_keys_keep_their_difference() -> None:
    keys = [f"b1 {'x' * 300} {n}" for n in range(3)]
    assert len({slug(key) for key in keys}) == 3


# --------------------------------------------------------------------------------------------------
# Saving


def test_save_then_look_up(tmp_path: Path) -> None:
    saved = save(RECORD, root=tmp_path)
    assert saved.written
    assert tmp_path / RECORD.path == saved.file
    found = look_up(PROBLEM, H200, "fwd", where=[own(tmp_path)])
    assert found is not None
    assert (found.record, found.file, found.origin) == (RECORD, saved.file, "own")
    assert [saved.file] == [path for path in tmp_path.rglob("*") if path.is_file()]


def test_save_goes_to_the_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "mine"))
    assert save(RECORD).file == tmp_path / "mine" / RECORD.path
    found = look_up(PROBLEM, H200, "fwd")
    assert found is not None
    assert found.origin == "own"


@pytest.mark.parametrize(
    "old, new, written, reason",
    [
        (record(us=400.0), record(measurement=UNMEASURED), False, "was measured, this one was not"),
        (record(measurement=UNMEASURED), record(us=400.0), True, "was not measured"),
        (record(measurement=UNMEASURED), record(measurement=UNMEASURED), True, "was not measured"),
        (record(us=400.0), record(us=400.5), False, r"faster \(400 us, this one 400.5 us\)"),
        (record(us=400.0), record(us=399.0), True, "no slower"),
        (record(us=400.0), record(us=400.0, trials=70), True, "no slower"),
        (
            record(us=400.0, versions=replace(VERSIONS, triton="3.6.0")),
            record(us=500.0),
            True,
            "other versions .triton: current 3.7.1, stored 3.6.0.",
        ),
        (record(us=400.0, template_digest="aa"), record(us=500.0), True, "template_digest"),
        (
            record(us=400.0),
            record(us=500.0, versions=replace(VERSIONS, tilegen="9")),
            False,
            "fast",
        ),
    ],
    ids=lambda value: (
        None if isinstance(value, TuningRecord | bool) else re.sub(r"\W+", "-", value)
    ),
)
def test_what_replaces_what(
    tmp_path: Path, old: TuningRecord, new: TuningRecord, written: bool, reason: str
) -> None:
    save(old, root=tmp_path)
    saved = save(new, root=tmp_path)
    assert written == saved.written
    assert re.search(reason, saved.reason)
    expected = new if written else old
    assert expected == TuningRecord.from_json(saved.file.read_text())


def test_force_replaces_a_faster_record_but_never_a_measured_one_by_a_guess(tmp_path: Path) -> None:
    save(record(us=400.0), root=tmp_path)
    assert save(record(us=500.0), root=tmp_path, force=True).written
    assert not save(record(measurement=UNMEASURED), root=tmp_path, force=True).written


def test_crash_between_writing_and_renaming_leaves_the_old_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(record(us=400.0), root=tmp_path)

    def crash(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            save(record(us=300.0), root=tmp_path)
    found = look_up(PROBLEM, H200, "fwd", where=[own(tmp_path)])
    assert found is not None
    assert found.record == record(us=400.0)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_text_is_on_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (calls.append("rename"), rename(self, to))[1]
    )
    save(RECORD, root=tmp_path)
    assert calls == ["fsync", "rename", "fsync"]


def test_what_a_killed_writer_left_is_not_a_record(tmp_path: Path) -> None:
    saved = save(RECORD, root=tmp_path)
    saved.file.rename(saved.file.with_name(f".{saved.file.name}.1234.tmp"))
    assert look_up(PROBLEM, H200, "fwd", where=[own(tmp_path)]) is None
    assert list(list_records([own(tmp_path)])) == []


def test_a_broken_file_in_the_way_is_kept_beside_the_new_record(tmp_path: Path) -> None:
    file = tmp_path / RECORD.path
    file.parent.mkdir(parents=True)
    for attempt in ("first", "second"):
        file.write_text(attempt)
        saved = save(RECORD, root=tmp_path)
        assert saved.written
        assert f"{file.name}" in saved.reason
    broken = sorted(path.read_text() for path in file.parent.glob("*.broken"))
    assert broken == ["first", "second"]
    assert TuningRecord.from_json(file.read_text()) == RECORD


def test_folder_that_cannot_be_written_to_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "h200").write_text("a file where a folder should be")
    with pytest.raises(Unsupported, match=r"cannot write .*h200.*set TILEGEN_CACHE_DIR"):
        save(RECORD, root=tmp_path)


def test_record_that_would_not_read_back_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidRecord, match="command must be printable text"):
        save(record(command="tilegen\ntune"), root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_waits_for_the_one_before_it_and_then_looks_again(tmp_path: Path) -> None:
    first = save(record(us=400.0), root=tmp_path)
    lock = os.open(first.file.parent, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # as another process would hold it
    results: list[Saved] = []
    second = threading.Thread(
        target=lambda: results.append(save(record(us=390.0), root=tmp_path)), daemon=True
    )
    second.start()
    second.join(timeout=0.3)
    assert second.is_alive(), "it did not wait"
    first.file.write_text(record(us=380.0).to_json())
    os.close(lock)
    second.join(timeout=20)
    (result,) = results
    assert not result.written
    assert "(380 us, this one 390 us)" in result.reason


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
    expected = record(us=810.0, trials=0)
    assert expected == TuningRecord.from_json((tmp_path / RECORD.path).read_text())
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


# --------------------------------------------------------------------------------------------------
# Looking up


def test_nothing_found_is_none_and_makes_nothing(tmp_path: Path) -> None:
    assert look_up(PROBLEM, H200, "fwd", where=[own(tmp_path / "none")]) is None
    assert list(tmp_path.iterdir()) == []


def test_locations_come_from_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("TILEGEN_CACHE_PATH", f"{tmp_path}/a{os.pathsep}{tmp_path}/b")
    expected = [
        Location(tmp_path / "own", "own"),
        Location(tmp_path / "a", "extra"),
        Location(tmp_path / "b", "extra"),
        Location(ROOT / "cache", "shipped"),
    ]
    assert expected == list(locations())


def test_installation_without_records_still_has_the_other_locations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> Path:
        raise Unsupported(name)

    monkeypatch.setattr(lookup, "data_dir", absent)
    assert [location.origin for location in locations()] == ["own"]


def test_order_of_locations(tmp_path: Path) -> None:
    # The shipped record is the fastest: order decides, not time.
    where = [
        place(tmp_path / "own", record(us=400.0), "own"),
        place(tmp_path / "extra1", record(us=390.0), "extra"),
        place(tmp_path / "extra2", record(us=380.0), "extra"),
        place(tmp_path / "shipped", record(us=370.0), "shipped"),
    ]
    for expected in (400.0, 390.0, 380.0, 370.0):
        found = look_up(PROBLEM, H200, "fwd", where=where)
        assert found is not None
        assert expected == found.record.measurement.median_us
        assert found.origin == where[0].origin
        (where.pop(0).root / RECORD.path).unlink()
    assert look_up(PROBLEM, H200, "fwd", where=where) is None


def test_a_guess_of_ones_own_does_not_hide_a_measured_record(tmp_path: Path) -> None:
    guess = record(measurement=UNMEASURED)
    mine = place(tmp_path / "own", guess, "own")
    shared = place(tmp_path / "extra", guess, "extra")
    shipped = place(tmp_path / "shipped", record(us=370.0), "shipped")
    found = look_up(PROBLEM, H200, "fwd", where=[mine, shared, shipped])
    assert found is not None
    assert found.origin == "shipped"
    found = look_up(PROBLEM, H200, "fwd", where=[mine, shared])
    assert found is not None
    assert found.origin == "own"


def test_every_length_of_a_bucket_finds_its_record(tmp_path: Path) -> None:
    where = [place(tmp_path, RECORD)]
    for text, hit in (
        ("b3 hq32 hkv8 q2049 kv4096 d128 bf16 causal", True),
        ("b4 hq32 hkv8 q2048 kv4096 d128 bf16 causal", False),
        ("b4 hq32 hkv8 q4096 kv4097 d128 bf16 causal", False),
        ("b4 hq32 hkv8 q4096 kv4096 d128 bf16 causal(bottom_right)", False),
    ):
        found = look_up(AttentionProblem.parse(text), H200, "fwd", where=where)
        assert hit == (found is not None), text


def test_extra_location_that_is_no_folder_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = [Location(tmp_path / "not-mounted", "extra"), place(tmp_path, RECORD, "shipped")]
    for _ in range(3):
        assert look_up(PROBLEM, H200, "fwd", where=where) is not None
    (message,) = caplog.messages
    assert "not-mounted" in message


HARD = {
    "gpu": record(gpu="a100"),
    "arch": record(arch="sm_80"),
    "kernel": record(kernel="bwd_dq"),
    "seqlen_kv": record(problem=replace(PROBLEM, seqlen_kv=8192)),
    "dtype": record(problem=replace(PROBLEM, dtype="fp16")),
    "mask": record(problem=AttentionProblem.parse("b4 hq32 hkv8 q4096 d128 bf16 full")),
}


@pytest.mark.parametrize("field", HARD)
def test_hard_mismatch_is_passed_over_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    file = tmp_path / "own" / RECORD.path
    file.parent.mkdir(parents=True)
    file.write_text(HARD[field].to_json())  # a record of something else, copied to this place
    where = [own(tmp_path / "own"), place(tmp_path / "shipped", RECORD, "shipped")]
    for _ in range(3):
        found = look_up(PROBLEM, H200, "fwd", where=where)
        assert found is not None
        assert found.origin == "shipped"
    (message,) = caplog.messages
    assert str(file) in message
    assert f"{field}: current " in message
    assert file.exists(), "the record is in order, only its place is not"


def test_other_schema_is_passed_over_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = [place(tmp_path, RECORD)]
    file = tmp_path / RECORD.path
    file.write_text(json.dumps({"schema": 2, "everything": "else"}))
    assert look_up(PROBLEM, H200, "fwd", where=where) is None
    assert file.exists()
    (message,) = caplog.messages
    assert "schema must be 1, got 2" in message


@pytest.mark.parametrize(
    "versions, digest, field",
    [
        (replace(VERSIONS, triton="3.9.0"), "87ebae389eec", "triton"),
        (replace(VERSIONS, torch="2.15.0"), "87ebae389eec", "torch"),
        (replace(VERSIONS, driver="590.1"), "87ebae389eec", "driver"),
        (replace(VERSIONS, cuda="13.2"), "87ebae389eec", "cuda"),
        (VERSIONS, "0123456789ab", "template_digest"),
    ],
    ids=["triton", "torch", "driver", "cuda", "template_digest"],
)
def test_soft_mismatch_is_used_and_said_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    versions: Versions,
    digest: str,
    field: str,
) -> None:
    where = [place(tmp_path, RECORD)]
    for _ in range(3):
        found = look_up(
            PROBLEM, H200, "fwd", versions=versions, template_digest=digest, where=where
        )
        assert found is not None
        assert [field] == [difference.field for difference in found.differences]
    (message,) = caplog.messages
    assert str(tmp_path / RECORD.path) in message
    assert f"{field}: current " in message


def test_same_versions_and_unknown_ones_are_no_mismatch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = [place(tmp_path, RECORD)]
    for versions, digest in (
        (VERSIONS, "87ebae389eec"),
        (replace(VERSIONS, tilegen="9.9", driver=""), ""),
    ):
        found = look_up(
            PROBLEM, H200, "fwd", versions=versions, template_digest=digest, where=where
        )
        assert found is not None
        assert found.differences == ()
    assert caplog.messages == []


def test_a_look_up_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from tilegen.device import gpu\n"
        "from tilegen.problem import AttentionProblem\n"
        "from tilegen.store import look_up\n"
        "look_up(AttentionProblem.parse('hq1 q64 d64 bf16'), gpu('h200'), 'fwd')\n"
        "print(sorted({'torch', 'triton', 'sympy', 'optuna', 'jinja2', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


# --------------------------------------------------------------------------------------------------
# Explaining and listing


def test_why_lists_the_nearest_first_with_only_what_differs(tmp_path: Path) -> None:
    other_length = record(problem=replace(PROBLEM, seqlen_kv=8192))
    other_lengths = record(problem=replace(PROBLEM, seqlen_q=1024, seqlen_kv=1024))
    other_mask = record(problem=AttentionProblem.parse("b4 hq32 hkv8 q4096 d128 bf16 full"))
    other_gpu = record(gpu=A100.name, arch=A100.arch)
    other_kernel = record(kernel="bwd_dq")
    for one in (other_kernel, other_gpu, other_mask, other_lengths, other_length):
        place(tmp_path, one)
    report = why(PROBLEM, H200, "fwd", where=[own(tmp_path)])
    expected = [other_length, other_lengths, other_mask, other_gpu, other_kernel]
    assert expected == [entry.record for entry in report]
    assert [str(d) for d in report[0].differences] == ["seqlen_kv: current 4096, stored 8192"]
    assert [str(d) for d in report[3].differences] == [
        "gpu: current h200, stored a100",
        "arch: current sm_90, stored sm_80",
    ]
    assert why(PROBLEM, H200, "fwd", where=[own(tmp_path)], top=2) == report[:2]


def test_why_compares_with_the_bucket_and_names_soft_differences_too(tmp_path: Path) -> None:
    where = [place(tmp_path, RECORD)]
    ragged = replace(PROBLEM, seqlen_q=4001)
    newer = replace(VERSIONS, triton="3.9.0")
    (entry,) = why(ragged, H200, "fwd", versions=newer, where=where)
    assert [str(d) for d in entry.differences] == ["triton: current 3.9.0, stored 3.7.1"]


def test_why_prefers_a_measured_record_among_equals(tmp_path: Path) -> None:
    guess = place(tmp_path / "own", record(measurement=UNMEASURED), "own")
    known = place(tmp_path / "shipped", record(us=370.0), "shipped")
    report = why(PROBLEM, H200, "fwd", where=[guess, known])
    assert [entry.origin for entry in report] == ["shipped", "own"]


def test_why_lines(tmp_path: Path) -> None:
    where = [place(tmp_path, record(measurement=UNMEASURED)), own(tmp_path / "empty")]
    other = replace(PROBLEM, seqlen_q=2048)
    nearest = why(other, H200, "fwd", where=where)
    head, line = why_lines(other, H200, "fwd", nearest)
    assert head.startswith("fwd on h200 for 'b4 hq32 hkv8 q2048 kv4096 d128 bf16 causal'")
    assert line == (
        f"  own, unmeasured  {str(tmp_path / RECORD.path)!r}: seqlen_q: current 2048, stored 4096"
    )
    (line,) = why_lines(other, H200, "fwd", [])
    assert "tilegen tune 'b4 hq32 hkv8 q2048 kv4096 d128 bf16 causal' --kernel fwd" in line
    assert why_lines(PROBLEM, H200, "fwd", why(PROBLEM, H200, "fwd", where=where))[1].endswith(
        ": this is the one"
    )


def test_list_shows_all_files_of_all_locations_and_changes_none(tmp_path: Path) -> None:
    good = place(tmp_path / "own", RECORD)
    folder = (good.root / RECORD.path).parent
    (folder / "torn.json").write_text(RECORD.to_json()[:200])
    (folder / "moved.json").write_text(record(us=1.0).to_json())
    (folder / "old.json.broken").write_text("{")
    shipped = place(tmp_path / "shipped", record(gpu="a100", arch="sm_80"), "shipped")
    (good.root / "trials" / "h200").mkdir(parents=True)  # other things lie there, too
    before = sorted(tmp_path.rglob("*"))
    listed = {entry.file.name: entry for entry in list_records([good])}
    assert set(listed) == {RECORD.path.name, "torn.json", "moved.json", "old.json.broken"}
    assert (listed[RECORD.path.name].record, listed[RECORD.path.name].trouble) == (RECORD, "")
    assert "expected JSON" in listed["torn.json"].trouble
    assert "belongs at" in listed["moved.json"].trouble
    assert "set aside" in listed["old.json.broken"].trouble
    assert [
        (entry.origin, entry.record.gpu) for entry in list_records([shipped]) if entry.record
    ] == [("shipped", "a100")]
    assert before == sorted(tmp_path.rglob("*"))


def test_shipped_records_are_all_in_order() -> None:
    troubles = [e for e in list_records([Location(ROOT / "cache", "shipped")]) if e.trouble]
    assert troubles == []


def test_timed_helper_is_a_valid_measurement() -> None:
    one = record(measurement=timed(100.0, 0.1))
    assert TuningRecord.from_json(one.to_json()) == one
