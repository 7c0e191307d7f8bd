"""Looking up: the order of locations, what is skipped, and what is borrowed."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.records import (
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
from tilegen import resources
from tilegen.disk import say_once
from tilegen.errors import Unsupported
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store import (
    Location,
    Versions,
    locations,
    look_up,
    places,
)
from tilegen.store.election import join
from tilegen.store.lookup import similar_devices, why_not_legal
from tilegen.task import KernelTask, Tiled

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _say_everything(caplog: pytest.LogCaptureFixture) -> None:
    """Let every test see warnings that were already logged."""
    say_once.cache_clear()
    caplog.set_level(logging.INFO, logger="tilegen")


def test_no_record_returns_none_and_creates_nothing(tmp_path: Path) -> None:
    assert look_up(TASK, where=[own(tmp_path / "none")]) is None
    assert list(tmp_path.iterdir()) == []


def test_locations_come_from_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("TILEGEN_CACHE_PATH", f"{tmp_path}/a;{tmp_path}/b")
    monkeypatch.setattr(places, "data_dir", resources.data_dir)
    expected = [
        Location(str(tmp_path / "own"), "own"),
        Location(str(tmp_path / "a"), "shared"),
        Location(str(tmp_path / "b"), "shared"),
        Location(str(ROOT / "cache"), "shipped"),
    ]
    assert expected == list(locations())


def test_installation_without_records_still_has_the_other_locations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> Path:
        raise Unsupported(name)

    monkeypatch.setattr(places, "data_dir", absent)
    assert [location.origin for location in locations()] == ["own"]


def test_order_of_locations(tmp_path: Path) -> None:
    # The shipped record is the fastest: order decides, not time.
    where = [
        place(tmp_path / "own", record(us=400.0), "own"),
        place(tmp_path / "extra1", record(us=390.0), "shared"),
        place(tmp_path / "extra2", record(us=380.0), "shared"),
        place(tmp_path / "shipped", record(us=370.0), "shipped"),
    ]
    for expected in (400.0, 390.0, 380.0, 370.0):
        entry = look_up(TASK, where=where)
        assert entry is not None
        assert expected == entry.record.measurement.median_us
        assert entry.origin == where[0].origin
        (folder_of(where.pop(0)) / RECORD.path).unlink()
    assert look_up(TASK, where=where) is None


def test_unmeasured_records_are_not_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    guess = record(measurement=UNMEASURED)
    mine = place(tmp_path / "own", guess, "own")
    shared = place(tmp_path / "shared", guess, "shared")
    shipped = place(tmp_path / "shipped", record(us=370.0), "shipped")
    entry = look_up(TASK, where=[mine, shared, shipped])
    assert entry is not None
    assert entry.origin == "shipped"
    caplog.clear()
    say_once.cache_clear()
    assert look_up(TASK, where=[mine, shared]) is None
    assert len(caplog.messages) == 2
    assert all("nobody has measured it" in message for message in caplog.messages)


def test_every_length_of_a_bucket_finds_its_record(tmp_path: Path) -> None:
    where = [place(tmp_path, RECORD)]
    for text, hit in (
        ("b3 hq32 hkv8 q33 kv64 d128 bf16 causal", True),
        ("b4 hq32 hkv8 q32 kv64 d128 bf16 causal", False),
        ("b4 hq32 hkv8 q64 kv65 d128 bf16 causal", False),
        ("b4 hq32 hkv8 q64 kv64 d128 bf16 causal(bottom_right)", False),
    ):
        entry = look_up(KernelTask.of("fwd", AttentionProblem.parse(text), H200), where=where)
        assert hit == (entry is not None), text


def test_extra_location_that_is_no_folder_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = [Location(str(tmp_path / "not-mounted"), "shared"), place(tmp_path, RECORD, "shipped")]
    for _ in range(3):
        assert look_up(TASK, where=where) is not None
    (message,) = caplog.messages
    assert "not-mounted" in message


HARD = {
    "gpu": record(gpu="a100"),
    "arch": record(arch="sm_80"),
    "kernel": record(kernel="bwd_dq"),
    "seqlen_kv": record(problem=replace(PROBLEM, seqlen_kv=128)),
    "dtype": record(problem=replace(PROBLEM, dtype="fp16")),
    "mask": record(problem=AttentionProblem.parse("b4 hq32 hkv8 q64 d128 bf16 full")),
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
        entry = look_up(TASK, where=where)
        assert entry is not None
        assert entry.origin == "shipped"
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
    assert look_up(TASK, where=where) is None
    assert file.exists()
    (message,) = caplog.messages
    assert "schema must be 1, got 2" in message


@pytest.mark.parametrize(
    "versions, digest, field",
    [
        (replace(VERSIONS, triton="3.9.0"), "87ebae389eec", "triton"),
        (replace(VERSIONS, driver="590.1"), "87ebae389eec", "driver"),
        (VERSIONS, "0123456789ab", "template_digest"),
    ],
    ids=["triton", "driver", "template_digest"],
)
def test_a_record_with_soft_differences_is_used_with_one_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    versions: Versions,
    digest: str,
    field: str,
) -> None:
    where = [place(tmp_path, RECORD)]
    for _ in range(3):
        entry = look_up(
            TASK,
            versions=versions,
            template_digest=digest,
            where=where,
        )
        assert entry is not None
        assert [field] == [difference.field for difference in entry.differences]
    (message,) = caplog.messages
    assert str(tmp_path / RECORD.path) in message
    assert f"{field}: current " in message


def test_versions_that_no_timing_depends_on_are_no_mismatch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = replace(VERSIONS, tilegen="9", torch="2.15.0", cuda="13.2")
    digest = RECORD.template_digest
    where = [place(tmp_path, RECORD)]
    entry = look_up(TASK, versions=here, template_digest=digest, where=where)
    assert entry is not None
    assert entry.differences == ()
    assert caplog.messages == []


def test_same_versions_and_unknown_ones_are_no_mismatch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = [place(tmp_path, RECORD)]
    for versions, digest in (
        (VERSIONS, "87ebae389eec"),
        (replace(VERSIONS, tilegen="9.9", driver=""), ""),
    ):
        entry = look_up(
            TASK,
            versions=versions,
            template_digest=digest,
            where=where,
        )
        assert entry is not None
        assert entry.differences == ()
    assert caplog.messages == []


def test_a_look_up_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from tilegen.gpus.spec import gpu\n"
        "from tilegen.problem import AttentionProblem\n"
        "from tilegen.store import look_up\n"
        "from tilegen.task import KernelTask\n"
        "problem = AttentionProblem.parse('hq1 q64 d64 bf16')\n"
        "look_up(KernelTask.of('fwd', problem, gpu('h200')))\n"
        "heavy = {'torch', 'triton', 'sympy', 'optuna', 'jinja2', 'rich', 'fsspec'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


# --------------------------------------------------------------------------------------------------
# What may be used of others


def test_without_a_record_of_its_own_a_gpu_borrows_from_the_nearest_of_its_architecture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert [spec.name for spec in similar_devices(gpu("h200"))] == ["h100", "h100-pcie"]
    for us, name in ((300.0, "h100-pcie"), (310.0, "h100")):
        place(tmp_path, record(gpu=name, us=us))
    place(tmp_path, record(gpu="a100", arch="sm_80", us=100.0))
    for _ in range(3):
        entry = look_up(TASK, where=[own(tmp_path)])
        assert entry is not None
        assert (entry.record.gpu, entry.borrowed) == ("h100", True)
        assert [str(one) for one in entry.differences] == ["gpu: current h200, stored h100"]
        assert str(entry) == f"{entry.file}, borrowed from h100"
    (message,) = caplog.messages
    assert message == f"no measured record for h200: record {entry.file!r} is borrowed"
    assert look_up(TASK, where=[own(tmp_path)], borrow=False) is None
    assert look_up(KernelTask.of("fwd", PROBLEM, gpu("l4")), where=[own(tmp_path)]) is None


def test_order_of_own_and_borrowed(tmp_path: Path) -> None:
    guess = place(tmp_path / "own", record(measurement=UNMEASURED), "own")
    other_guess = place(tmp_path / "own", record(gpu="h100-pcie", measurement=UNMEASURED), "own")
    assert look_up(TASK, where=[guess, other_guess]) is None
    borrowed = place(tmp_path / "shared", record(gpu="h100"), "shared")
    entry = look_up(TASK, where=[guess, borrowed])
    assert entry is not None
    assert (entry.record.gpu, entry.borrowed) == ("h100", True)
    measured = place(tmp_path / "shipped", RECORD, "shipped")
    entry = look_up(TASK, where=[guess, borrowed, measured])
    assert entry is not None
    assert (entry.record.gpu, entry.borrowed) == ("h200", False)


def test_a_gpu_that_is_in_no_catalogue_borrows_too(tmp_path: Path) -> None:
    unknown = replace(H200, name="h20", num_sms=78, dram_bandwidth=4e12)
    place(tmp_path, RECORD)
    entry = look_up(KernelTask.of("fwd", PROBLEM, unknown), where=[own(tmp_path)])
    assert entry is not None
    assert (entry.record, entry.borrowed) == (RECORD, True)


def test_a_config_that_cannot_run_here_is_refused_before_it_is_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    huge = record(config=TileConfig.parse("m256n256w8s6"), us=1.0)
    where = [
        place(tmp_path / "shared", huge, "shared"),
        place(tmp_path / "ship", RECORD, "shipped"),
    ]
    for _ in range(2):
        entry = look_up(TASK, where=where)
        assert entry is not None
        assert entry.record == RECORD
    (message,) = caplog.messages
    assert str(tmp_path / "shared" / huge.path) in message
    assert "m256n256w8s6 needs" in message
    assert "and h200 has 232448" in message
    small = gpu("h200", fast_memory=48 * 1024)
    assert look_up(KernelTask.of("fwd", PROBLEM, small), where=where) is None, (
        "its own, with less fast memory"
    )


def test_a_borrowed_config_must_fit_the_gpu(tmp_path: Path) -> None:
    large = replace(H200, name="large", smem_per_block=600_000, smem_per_sm=600_000)
    config = TileConfig.parse("m256n128w8s4")
    assert why_not_legal(Tiled.of("fwd", PROBLEM, large, config)) == ""
    assert why_not_legal(Tiled.of("fwd", PROBLEM, gpu("h100"), config))
    place(tmp_path, record(config=config))
    assert look_up(KernelTask.of("fwd", PROBLEM, gpu("h100")), where=[own(tmp_path)]) is None


def test_a_finding_under_the_present_conditions_is_preferred(tmp_path: Path) -> None:
    theirs = replace(VERSIONS, triton="3.9.0")
    joined = join(
        [
            record(us=390.0, source="aa", versions=theirs, date="2026-11-22T09:30:00Z"),
            record(us=400.0, source="bb"),
            record(us=395.0, source="cc"),
        ]
    )
    assert joined.source == "aa"
    where = [place(tmp_path, joined)]
    for versions, source in ((theirs, "aa"), (VERSIONS, "cc"), (Versions(triton="3.6"), "aa")):
        entry = look_up(TASK, versions=versions, where=where)
        assert entry is not None
        assert entry.record.source == source
        assert entry.record.rivals == ()
        assert bool(entry.differences) == (versions.triton == "3.6")
        assert {one.source for one in entry.others} == {"aa", "bb", "cc"} - {source}


def test_times_of_another_policy_are_about_something_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / RECORD.path
    place(tmp_path, RECORD)
    file.write_text(record(policy="warm_l2").to_json())
    assert look_up(TASK, where=[own(tmp_path)]) is None
    (message,) = caplog.messages
    assert "policy: current cold_l2, stored warm_l2" in message
