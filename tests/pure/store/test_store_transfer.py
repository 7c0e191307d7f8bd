"""Moving records between stores: union in any order, nothing lost, every clash explained."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.records import (
    PROBLEM,
    RECORD,
    UNMEASURED,
    folder_of,
    own,
    place,
    record,
    written,
)
from tilegen.errors import Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store import Location, TuningRecord, list_records, listing, save
from tilegen.store.listing import check, prune
from tilegen.store.transfer import Selection, export, import_, merge, promote, summary
from tilegen.store.trials import Conditions, Trial, join_trials, trial_line
from tilegen.tuning.measure import Measurement
from tilegen.tuning.trials import TrialLog

CONDITIONS = Conditions(
    problem=PROBLEM.key, arch="sm_90", triton="3.7.1", driver="580", template_digest="ab"
)
CONFIGS = [TileConfig.parse(text) for text in ("m128n64w8s3", "m64n64w4s2", "m128n128w8s2")]


def log_of(root: Path) -> TrialLog:
    return TrialLog(root, "h200", "fwd", PROBLEM, CONDITIONS)


def trial(config: TileConfig, us: float, date: str = RECORD.date) -> Trial:
    measured = Measurement(status="ok", median_us=us, p20_us=us, p80_us=us, repeats=10)
    return Trial(config=config, measurement=measured, seconds=0.5, date=date)


def tuned_apart(folder: Path, seed: int) -> Location:
    """Make a store that a machine has tuned by itself, with trials, clashes and a file only of
    its own."""
    where = own(folder)
    for n, problem in enumerate(("hq8 q512 d64 bf16", "hq8 q1024 d64 bf16", "hq8 q2048 d64 bf16")):
        parsed = record(
            problem=AttentionProblem.parse(problem).bucket,
            config=CONFIGS[(n + seed) % 3],
            us=100.0 + (7 * n + 3 * seed) % 5,
            source=f"{seed:02x}",
        )
        save(parsed, location=where)
    save(record(kernel="bwd_dq" if seed else "bwd_dkdv", source=f"{seed:02x}"), location=where)
    log = log_of(folder)
    for n in range(1 + seed, 3 + seed):
        log.append(trial(CONFIGS[n % 3], 100.0 + n + seed))
    return where


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in written(folder)}


def test_two_stores_merged_in_either_order_are_the_same_bytes(tmp_path: Path) -> None:
    a, b = (tuned_apart(tmp_path / name, seed) for seed, name in enumerate("ab"))
    for name, sources in (("ab2", [a, b]), ("ba2", [b, a])):
        list(merge(sources, own(tmp_path / name)))
    merged = files(tmp_path / "ab2")
    assert merged == files(tmp_path / "ba2")
    assert len(merged) == 6
    # And into each other; the target among the sources brings its own files into form.
    list(merge([b, a], a))
    list(merge([own(tmp_path / "ab2"), b], b))
    assert files(tmp_path / "a") == merged == files(tmp_path / "b")
    again = list(merge([a, b, own(tmp_path / "ba2")], own(tmp_path / "ab2")))
    assert {one.action for one in again} == {"same"}
    assert files(tmp_path / "ab2") == merged


def test_merging_keeps_every_finding_and_every_trial(tmp_path: Path) -> None:
    a, b = (tuned_apart(tmp_path / name, seed) for seed, name in enumerate("ab"))
    moved = list(merge([a, b], own(tmp_path / "all")))
    findings = [
        one.source
        for listed in list_records([own(tmp_path / "all")])
        if listed.record
        for one in listed.record.findings
    ]
    assert sorted(findings) == ["00"] * 4 + ["01"] * 4
    trials = log_of(tmp_path / "all").read()
    assert set(trials) == set(CONFIGS)
    assert [one.reason for one in moved if "trials/" in one.file] == ["2 new trials"] * 2
    assert summary(moved) == "6 added, 4 changed, 0 same, 0 refused"
    clash = next(one for one in moved if one.action == "changed" and "q512" in one.file)
    assert "faster (100 us, the other 103 us)" in clash.reason


def test_dry_run_changes_nothing_and_says_the_same(tmp_path: Path) -> None:
    a, b = (tuned_apart(tmp_path / name, seed) for seed, name in enumerate("ab"))
    before = files(tmp_path / "b")
    dry = list(merge([a], b, dry_run=True))
    assert files(tmp_path / "b") == before
    assert not (tmp_path / "b" / "h200" / "bwd_dkdv").exists(), "no folder either"
    assert dry == list(merge([a], b))
    assert dry != list(merge([a], b))


def test_broken_files_are_refused_by_name_and_others_joined(tmp_path: Path) -> None:
    source = place(tmp_path / "a", RECORD)
    (folder_of(source) / "h200" / "fwd" / "torn.json").write_text("{")
    (folder_of(source) / "h200" / "fwd" / "moved.json").write_text(RECORD.to_json())
    moved = list(merge([source], own(tmp_path / "b")))
    assert [one.action for one in moved] == ["added", "refused", "refused"]
    assert "moved.json" in moved[1].file
    assert "belongs at" in moved[1].reason
    assert "expected JSON" in moved[2].reason
    assert len(files(tmp_path / "b")) == 1


def test_a_record_of_another_tilegen_at_the_target_stays_and_the_rest_goes_on(
    tmp_path: Path,
) -> None:
    source = place(tmp_path / "a", RECORD)
    place(tmp_path / "a", record(kernel="bwd_dq"))
    there = folder_of(place(tmp_path / "b", RECORD)) / RECORD.path
    there.write_text('{"schema": 7}')
    moved = {Path(one.file).parent.name: one for one in merge([source], own(tmp_path / "b"))}
    assert moved["fwd"].action == "refused"
    assert "use the tilegen that wrote it" in moved["fwd"].reason
    assert moved["bwd_dq"].action == "added"
    assert there.read_text() == '{"schema": 7}'


@pytest.mark.parametrize(
    "wanted, names",
    [
        (Selection(), {"h200/fwd", "h200/bwd_dq", "a100/fwd", "trials/h200"}),
        (Selection(gpu="a100"), {"a100/fwd"}),
        (Selection(kernel="fwd"), {"h200/fwd", "a100/fwd", "trials/h200"}),
        (Selection(gpu="h200", kernel="bwd_dq"), {"h200/bwd_dq"}),
    ],
    ids=["all", "gpu", "kernel", "both"],
)
def test_only_selected_records_are_moved(
    tmp_path: Path, wanted: Selection, names: set[str]
) -> None:
    for kept in (RECORD, record(kernel="bwd_dq"), record(gpu="a100", arch="sm_80")):
        place(tmp_path / "a", kept)
    log_of(tmp_path / "a").append(trial(CONFIGS[0], 100.0))
    for n, moved in enumerate(
        (
            list(merge([own(tmp_path / "a")], own(tmp_path / "b"), wanted=wanted)),
            export([own(tmp_path / "a")], tmp_path / "x.jsonl", wanted=wanted),
        )
    ):
        assert {
            "/".join(Path(kept.file).parts[-3 - t : -1 - t])
            for kept in moved
            for t in (("trials" in Path(kept.file).parts),)
        } == names, n
    list(import_(tmp_path / "x.jsonl", own(tmp_path / "c")))
    assert files(tmp_path / "c") == files(tmp_path / "b")


# --------------------------------------------------------------------------------------------------
# Promoting, checking, pruning


def test_promote_ships_measured_winners_without_their_rivals(tmp_path: Path) -> None:
    save(record(us=400.0, source="aa"), location=own(tmp_path / "mine"))
    save(record(us=390.0, source="bb"), location=own(tmp_path / "mine"))
    place(tmp_path / "mine", record(kernel="bwd_dq", measurement=UNMEASURED))
    shipped = Location(str(tmp_path / "cache"), "shipped")
    moved = list(promote([own(tmp_path / "mine")], shipped))
    assert [one.action for one in moved] == ["added", "refused"]
    there = tmp_path / "cache" / RECORD.path
    assert TuningRecord.from_json(there.read_text()) == record(us=390.0, source="bb")
    faster = place(tmp_path / "other", record(us=380.0, source="cc"))
    slower = place(tmp_path / "slower", record(us=395.0, source="dd"))
    assert [one.action for one in promote([faster, slower], shipped)] == ["changed", "same"]
    assert TuningRecord.from_json(there.read_text()) == record(us=380.0, source="cc")


def test_check_names_everything_that_is_wrong(tmp_path: Path) -> None:
    good = place(tmp_path, RECORD)
    log_of(tmp_path).append(trial(CONFIGS[0], 100.0))
    assert [one.reason for one in check([good])] == ["", ""]
    huge = TileConfig.parse("m256n256w8s6")
    place(tmp_path, record(kernel="bwd_dq", config=huge))
    place(tmp_path, record(kernel="bwd_dkdv", arch="sm_80"))
    upside_down = record(
        kernel="bwd_preprocess",
        config=TileConfig.parse("m64n16w4s1"),
        us=400.0,
        rivals=(
            record(
                kernel="bwd_preprocess",
                config=TileConfig.parse("m64n16w4s1"),
                us=300.0,
                source="aa",
            ),
        ),
    )
    place(tmp_path, upside_down)
    with log_of(tmp_path).file.open("ab") as file:
        file.write(b'{"torn')
    before = files(tmp_path)
    results = {Path(one.file).parent.name: one.reason for one in check([good])}
    assert "bytes of shared memory" in results["bwd_dq"]
    assert "arch must be sm_90, that of h200, got sm_80" in results["bwd_dkdv"]
    assert "not the one its findings elect" in results["bwd_preprocess"]
    assert files(tmp_path) == before
    list(merge([good], good))
    repaired = {one.file: one.reason for one in check([good])}
    assert not any(trouble for file, trouble in repaired.items() if "bwd_preprocess" in file)
    assert not any(trouble for file, trouble in repaired.items() if "trials" in file)


def test_check_names_a_date_that_is_to_come(tmp_path: Path) -> None:
    where = place(tmp_path, record(rivals=(record(us=500.0, date="2099-01-01T00:00:00Z"),)))
    (checked,) = check([where])
    assert checked.reason == (
        "date must be at most a day ahead of this machine's clock, got 2099-01-01T00:00:00Z"
    )


def test_prune_removes_leftovers_and_no_record(tmp_path: Path) -> None:
    import time

    where = place(tmp_path, RECORD)
    folder = (tmp_path / RECORD.path).parent
    copy = tmp_path / "remote" / "s3-bucket" / RECORD.path
    copy.parent.mkdir(parents=True)
    leftovers = [folder / ".a.json.1234.tmp", folder / "b.json.broken", copy]
    young = [folder / ".c.json.1234.tmp", copy.with_name("young.json")]
    others = [tmp_path / ".mine.tmp", tmp_path / "docs" / ".mine.tmp"]
    others[1].parent.mkdir()
    for file in (*leftovers, *young, *others):
        file.write_text("{")
    month = time.time() - 30 * 24 * 3600
    for file in (*leftovers, *others):
        os.utime(file, (month, month))
    dry = prune(where, dry_run=True)
    assert all(file.exists() for file in leftovers)
    assert {Path(one.file) for one in dry} == set(leftovers)
    assert dry == prune(where)
    assert not any(file.exists() for file in leftovers)
    assert all(file.exists() for file in (*young, *others, tmp_path / RECORD.path))
    assert prune(where) == []


def test_prune_of_old_and_unmeasured_records_only_if_told(tmp_path: Path) -> None:
    where = place(tmp_path, record(date="2020-01-01T00:00:00Z"))
    guess = record(kernel="bwd_dq", measurement=UNMEASURED)
    place(tmp_path, guess)
    assert prune(where) == []
    (pruned,) = prune(where, unmeasured=True)
    assert pruned.reason == "nobody has measured it"
    with pytest.raises(Unsupported, match="days must be 0"):
        prune(where, older_than_days=1e12)
    (pruned,) = prune(where, older_than_days=365)
    assert pruned.reason == "of 2020-01-01T00:00:00Z"
    assert files(tmp_path) == {}
    rivals = (record(date="2999-01-01T00:00:00Z", source="aa", us=500.0),)
    place(tmp_path, record(date="2020-01-01T00:00:00Z", rivals=rivals))
    assert prune(where, older_than_days=365) == [], "what anybody found lately stays"
    place(tmp_path, record(measurement=UNMEASURED, rivals=(record(source="aa", us=500.0),)))
    assert prune(where, unmeasured=True) == [], "what anybody has measured stays"


def test_prune_keeps_findings_saved_since_the_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = place(tmp_path, record(date="2020-01-01T00:00:00Z"))

    def looked_at(*given: Any) -> Any:
        listed = list(list_records(*given))
        place(tmp_path, record(us=300.0))
        return listed

    monkeypatch.setattr(listing, "list_records", looked_at)
    assert prune(where, older_than_days=365) == []
    assert TuningRecord.from_json((tmp_path / RECORD.path).read_text()) == record(us=300.0)


def test_trials_of_other_locations_are_not_measured_again(tmp_path: Path) -> None:
    log_of(tmp_path / "shared").append(trial(CONFIGS[0], 100.0))
    log_of(tmp_path / "shared").append(trial(CONFIGS[1], 110.0))
    others = [
        Location(str(tmp_path / "shared"), "shared"),
        Location(str(tmp_path / "no"), "shared"),
    ]
    mine = TrialLog(tmp_path / "mine", "h200", "fwd", PROBLEM, CONDITIONS, others=others)
    mine.append(trial(CONFIGS[1], 111.0))
    times = {config: one.measurement.median_us for config, one in mine.read().items()}
    assert times == {CONFIGS[0]: 100.0, CONFIGS[1]: 111.0}, "own ones count more"


def test_trials_are_joined_each_once_and_oldest_first() -> None:
    dates = [f"2026-10-{day:02}T00:00:00Z" for day in range(1, 29)]
    lines = [
        json.dumps(trial_line(trial(CONFIGS[n % 3], 100.0 + n, date), CONDITIONS)).encode()
        for n, date in enumerate(dates)
    ]
    content = b"\n".join([*reversed(lines), b"{torn", b""])
    joined = join_trials([content, lines[3], b"noise"], "fwd")
    assert joined == b"".join(line + b"\n" for line in lines)
    assert join_trials([], "fwd") == b""
