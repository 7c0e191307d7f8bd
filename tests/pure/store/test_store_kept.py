"""Files that an earlier tilegen wrote: a store, an export of it and a manifest stay readable."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.records import H200, PROBLEM, TASK, own, written
from tilegen.bundles.manifest import Manifest
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store import Location, list_records, look_up
from tilegen.store.library_record import library_record
from tilegen.store.listing import check
from tilegen.store.transfer import import_, merge
from tilegen.store.trials import Conditions, join_trials
from tilegen.task import KernelTask
from tilegen.tuning.trials import TrialLog

GOLDEN = Path(__file__).parents[2] / "golden"
KEPT = GOLDEN / "store_of_schema_1"
OLDER = "h200/fwd/b4_hq32_hkv8_q64_kv64_d128_bf16_causal+window-15-0.json"
TRIALS = "trials/h200/fwd/b4_hq32_hkv8_q64_kv64_d128_bf16_causal.jsonl"
CONDITIONS = Conditions(
    problem=PROBLEM.key,
    arch="sm_90",
    triton="3.7.1",
    driver="580.65.06",
    template_digest="87ebae389eec",
)


@pytest.fixture
def store(tmp_path: Path) -> Location:
    """Return a copy, since a broken file would be set aside."""
    return own(shutil.copytree(KEPT, tmp_path / "store"))


def test_every_file_is_in_order_and_read_back_as_it_is(store: Location) -> None:
    assert [checked.reason for checked in check([store])] == [""] * 4
    listed = {entry.name: entry.record for entry in list_records([store])}
    assert len(listed) == 3
    for name, record in listed.items():
        assert record is not None
        values = json.loads((KEPT / name).read_text())
        values["versions"].pop("sympy", None)
        if name == OLDER:
            values["problem"] = record.problem.key
        assert json.loads(record.to_json()) == values
        assert list(json.loads(record.to_json())) == list(values)


def test_a_call_finds_its_record_with_all_findings(store: Location) -> None:
    used = look_up(TASK, where=[store], borrow=False)
    assert used is not None
    assert used.record.config == TileConfig.parse("m128n64w8s3")
    assert used.record.measurement.median_us == 398.25
    assert used.record.measurement.digest == "0f1e2d3c4b5a 00112233aabb"
    assert [one.measurement.surroundings.is_quiet for one in used.record.findings] == [None]
    assert [(one.source, one.measurement.median_us) for one in used.others] == [
        ("", 450.0),
        ("ba9876543210", 391.5),
    ]
    window = AttentionProblem.parse("b4 hq32 hkv8 q64 kv64 d128 bf16 window(15,0)")
    older = look_up(KernelTask.of("fwd", window, H200), where=[store], borrow=False)
    assert older is not None
    assert older.file.endswith(OLDER)
    assert older.record.measurement.median_us == 120.0


def test_trials_are_read_and_joined_to_the_same_bytes(store: Location) -> None:
    assert store.folder
    trials = TrialLog(store.folder, "h200", "fwd", PROBLEM, CONDITIONS).read()
    read = {
        one.config.key: (
            *(one.measurement.status, one.measurement.median_us, one.seconds),
            *(one.spill_bytes, one.device_lost, one.source, one.versions.torch),
        )
        for one in trials.values()
    }
    machine = "0123456789ab", "2.13.0+cu130"
    assert read == {
        "m128n64w8s3": ("ok", 398.25, 2.25, 0, False, *machine),
        "m64n64w4s2": ("ok", 450.0, 1.25, 0, False, "", ""),
        "m128n128w4s4": ("out_of_resources", None, 0.75, 0, False, *machine),
        "m128n128w8s2": ("launch_failed", None, 0.25, 64, True, *machine),
    }
    data = (KEPT / TRIALS).read_bytes()
    assert join_trials([data, data], "fwd") == data


def test_the_record_of_a_library_is_read(store: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", store.url)
    record = library_record(PROBLEM, H200, "forward")
    assert record is not None
    assert (record.library, record.measurement.median_us) == ("cudnn", 800.0)
    assert record.versions.torch == "2.13.0+cu130"


def test_an_export_holds_the_same(tmp_path: Path) -> None:
    for name, moved in (
        ("merged", merge([Location(str(KEPT), "shared")], own(tmp_path / "merged"))),
        ("imported", import_(GOLDEN / "export_of_schema_1.jsonl", own(tmp_path / "imported"))),
    ):
        assert [one.action for one in moved] == ["added"] * 4, name
    merged, imported = (
        {
            str(file.relative_to(tmp_path / name)): file.read_bytes()
            for file in written(tmp_path / name)
        }
        for name in ("merged", "imported")
    )
    assert merged == imported
    untouched = {TRIALS, TRIALS.removeprefix("trials/").removesuffix("l")}
    assert {
        name
        for name in merged
        if (KEPT / name).is_file() and merged[name] == (KEPT / name).read_bytes()
    } == untouched


def test_a_manifest_is_read_and_written_back_as_it_is() -> None:
    text = (GOLDEN / "manifest_of_schema_3.json").read_text()
    manifest = Manifest.from_json(text)
    assert manifest.to_json() == text
    assert manifest.architectures == ("sm_90", "x86-64")
    assert sorted(served.gpu for served in manifest.problems) == ["h200", "x86-64"]
