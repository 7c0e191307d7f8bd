"""The record: its JSON form, its rivals, its place."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.problems import PROBLEMS
from tests.support.records import PROBLEM, RECORD, UNMEASURED, record, timed
from tilegen.choose import records
from tilegen.errors import InvalidRecord
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.problem import AttentionProblem
from tilegen.store import (
    TuningRecord,
    Versions,
    current_versions,
    files,
    listing,
    now,
    remote,
    slug,
    this_machine,
)
from tilegen.store import versions as versions_module
from tilegen.store.record import MAX_RIVALS
from tilegen.store.trials import Conditions, Trial, trial_line
from tilegen.tuning import tuner
from tilegen.tuning.measure import TIE_LIMIT, Measurement

pytestmark = pytest.mark.oldest

ROOT = Path(__file__).parents[3]


def test_round_trip() -> None:
    assert TuningRecord.from_json(RECORD.to_json()) == RECORD
    unmeasured = record(measurement=UNMEASURED, estimate=None, versions=Versions())
    assert TuningRecord.from_json(unmeasured.to_json()) == unmeasured


@pytest.mark.parametrize("problem", [p.bucket for p in PROBLEMS], ids=str)
def test_round_trip_of_every_problem(problem: AttentionProblem) -> None:
    for kernel in LARGE_CACHE:
        finding = record(problem=problem, kernel=kernel)
        assert TuningRecord.from_json(finding.to_json()) == finding


def test_json_spells_the_key_in_clear() -> None:
    values = json.loads(RECORD.to_json())
    assert values["schema"] == 1
    assert values["problem"] == "b4 hq32 hkv8 q64 kv64 d128 bf16 causal"
    assert values["config"] == {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3}
    assert values["measurement"]["median_us"] == 398.25
    assert {"schema"} | {f.name for f in fields(TuningRecord)} == {*values, "rivals"}


def test_every_field_is_in_the_readme_of_the_format() -> None:
    readme = (ROOT / "cache" / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("## Fields") : readme.index("## What a difference means")]
    described = set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"^\| (.*?) \|", table, re.M))))
    names = {f.name for f in fields(TuningRecord)}
    for group in (RECORD.config, RECORD.measurement, RECORD.estimate, RECORD.versions):
        assert group is not None
        names |= {f.name for f in fields(group)}
    assert names <= described, f"cache/README.md does not describe {sorted(names - described)}"


def test_every_failure_in_the_readme_of_the_format_has_its_test() -> None:
    readme = (ROOT / "cache" / "operations.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if line.count(" | ") == 2 and "test_" in line]
    tables = re.findall(r"^\| failure of .*\n\| --- .*\n((?:\|.*\n)+)", readme, re.M)
    assert [line for table in tables for line in table.splitlines()] == rows
    there = "".join(
        file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")
    )
    for name in re.findall(r"`(test_\w+)`", "".join(rows)):
        assert f"def {name}(" in there, name


def test_numbers_in_the_readme_of_the_format_are_those_of_the_code() -> None:
    pages = [ROOT / "cache" / name for name in ("README.md", "operations.md")]
    readme = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert f"does not answer within {remote.ANSWER_SECONDS:g} seconds" in readme
    assert f"again for {remote.DOWN_SECONDS / 60:g} minutes" in readme
    assert remote.FRESH_SECONDS == 3600, "remembered for an hour"
    assert files.LOCK_SECONDS == 60, "held for more than a minute"
    assert tuner.PATIENCE * records.TUNE_SECONDS == 120, "waits two minutes at most"
    assert listing.COPY_SECONDS == 7 * 86400, "copies older than a week"
    assert f"by up to {MAX_RIVALS + 1} machines" in readme
    assert f"within {100 * TIE_LIMIT:g} %" in readme
    record_size = len(RECORD.to_json())
    rival = len(record(rivals=(record(us=401.0, source="0" * 12),)).to_json()) - record_size
    conditions = Conditions(
        problem=PROBLEM.key, arch="sm_90", triton="3.7.1", driver="580.65", template_digest="a" * 12
    )
    trial = Trial(
        config=RECORD.config,
        measurement=RECORD.measurement,
        source=this_machine(),
        versions=RECORD.versions,
    )
    line = len(json.dumps(trial_line(trial, conditions)))
    for stated, size in ((1.0, record_size), (0.9, rival), (0.6, line)):
        assert f"{stated:g} KB" in readme
        assert 0.8 < size / (1000 * stated) < 1.2, (stated, size)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", readme):
        assert (ROOT / "cache" / target).exists(), target


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


def test_rivals_round_trip_and_are_about_the_same_key() -> None:
    rivals = (record(us=410.0, source="ab"), record(us=400.0, source="cd"))
    won = record(rivals=rivals)
    assert TuningRecord.from_json(won.to_json()) == won
    assert won.findings == (RECORD, *rivals)
    values = json.loads(won.to_json())
    assert "gpu" not in values["rivals"][0], "the key is said once"
    with pytest.raises(InvalidRecord, match="a rival must be about"):
        record(rivals=(record(gpu="a100"),))
    with pytest.raises(InvalidRecord, match="have none itself"):
        record(rivals=(won,))
    values["rivals"] *= 8
    with pytest.raises(InvalidRecord, match="rivals must be a list of at most 15"):
        TuningRecord.from_json(json.dumps(values))
    values["rivals"] = [values["rivals"][0] | {"trials": -1}]
    with pytest.raises(InvalidRecord, match=r"rivals\[0\]\.trials must be an int"):
        TuningRecord.from_json(json.dumps(values))


def test_record_of_a_failure_or_of_no_bucket_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="got one that is launch_failed: bad luck"):
        record(measurement=Measurement(status="launch_failed", message="bad luck"))
    ragged = replace(PROBLEM, seqlen_q=61)
    with pytest.raises(InvalidRecord, match="its bucket is 'b4 hq32 hkv8 q64"):
        record(problem=ragged)


def test_now_is_a_date_that_a_record_takes() -> None:
    dated = record(date=now())
    assert TuningRecord.from_json(dated.to_json()) == dated


def test_a_date_is_credible_until_a_day_ahead() -> None:
    for hours, expected in ((-9999, True), (0, True), (23, True), (25, False), (9999, False)):
        date = (datetime.now(UTC) + timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%SZ")
        assert versions_module.is_credible(date) == expected, hours


def test_current_versions(tmp_path: Path) -> None:
    import torch
    import triton

    import tilegen

    actual = current_versions()
    assert (tilegen.__version__, torch.__version__) == (actual.tilegen, actual.torch)
    assert triton.__version__ == actual.triton
    assert TuningRecord.from_json(record(versions=actual).to_json()).versions == actual

    kernel_module = tmp_path / "version"
    assert versions_module._driver(kernel_module) == ""
    kernel_module.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    assert versions_module._driver(kernel_module) == "580.65.06"


# --------------------------------------------------------------------------------------------------
# Paths


@pytest.mark.parametrize(
    "key, expected",
    [
        ("b1 hq8 hkv1 q1 kv64 d64 fp16 full", "b1_hq8_hkv1_q1_kv64_d64_fp16_full"),
        (
            "b1 hq1 hkv1 q64 kv64 d192/128 bf16 window(4095,0)",
            "b1_hq1_hkv1_q64_kv64_d192-128_bf16_window-4095-0",
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
    expected = "h200/fwd/b4_hq32_hkv8_q64_kv64_d128_bf16_causal.json"
    assert expected == str(RECORD.path)
    other = "h200/fwd/b4_hq32_hkv8_q64_kv64_d128_bf16_causal.warm_l2.json"
    assert other == str(record(policy="warm_l2").path), "times of two policies never meet"


@given(st.text(min_size=1, max_size=300))
def test_slug_is_always_one_safe_file_name(text: str) -> None:
    assert re.fullmatch(r"[a-z0-9][a-z0-9_+.-]{0,149}", slug(text))


@given(st.text("abA&+,-()/ _.é", min_size=1), st.text("abA&+,-()/ _.é", min_size=1))
def test_slugs_of_unusual_keys_differ(item: str, other: str) -> None:
    unusual = {text: slug(f"É{text}") for text in (item, other)}
    assert len(set(unusual.values())) == len(unusual)


def test_long_keys_keep_their_difference() -> None:
    keys = [f"b1 {'x' * 300} {n}" for n in range(3)]
    assert len({slug(key) for key in keys}) == 3


def test_this_machine_is_always_the_same_and_fits_a_record() -> None:
    finding = record(source=this_machine())
    assert len(finding.source) == 12
    assert TuningRecord.from_json(finding.to_json()) == finding


def test_timed_helper_is_a_valid_measurement() -> None:
    finding = record(measurement=timed(100.0, 0.1))
    assert TuningRecord.from_json(finding.to_json()) == finding
