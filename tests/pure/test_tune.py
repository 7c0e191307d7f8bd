"""The search on recorded timings: what it finds, what it writes down, how it stops and goes on."""

from __future__ import annotations

import json
import logging
import math
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.records import H200, PROBLEM, VERSIONS, record, timed
from tests.replay import TABLE, Replay, ranking, run
from tilegen import tune as tune_module
from tilegen import verify
from tilegen.config import LARGE_CACHE, Kernel, TileConfig
from tilegen.emitted import template_digest
from tilegen.errors import BuildFailed, NoRecord, Unsupported, WrongResult
from tilegen.measure import TIE_LIMIT, DeviceLost, Measurement
from tilegen.problem import AttentionProblem
from tilegen.store import TuningRecord, look_up, save
from tilegen.tune import SEEDS, pick, tune
from tilegen.tuning import bench as bench_module
from tilegen.tuning.bench import check_config
from tilegen.tuning.report import Report
from tilegen.tuning.search import MAX_MISSES, Search
from tilegen.tuning.trials import Trial
from tilegen.verify import Check

ROOT = Path(__file__).parents[2]
SMALL = dict(list(TABLE.items())[:8])  # all of them timed
LAUNCH_FAILED = [
    TileConfig.parse(key)
    for key, us in TABLE.items()
    if isinstance(us, str) and us.startswith("launch_failed")
]


@pytest.fixture(autouse=True)
def cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Path:
    """An own directory that starts empty, and a log that hears everything."""
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, logger="tilegen")
    return tmp_path / "cache"


def trial_file(cache: Path) -> Path:
    (file,) = (cache / "trials").rglob("*.jsonl")
    return file


def trials_on_disk(cache: Path) -> list[TileConfig]:
    """Return the configs in the one trial log there is, in order."""
    lines = trial_file(cache).read_text().splitlines()
    return [TileConfig(**json.loads(line)["config"]) for line in lines]


def stored(cache: Path) -> TuningRecord:
    (file,) = (cache / "h200").rglob("*.json")
    return TuningRecord.from_json(file.read_text())


def slowness(config: TileConfig) -> float:
    us = TABLE[config.key]
    return us if isinstance(us, float) else math.inf


# --------------------------------------------------------------------------------------------------
# What it finds


def test_tries_everything_without_a_budget_and_finds_the_best(cache: Path) -> None:
    replay = Replay()
    found = run(replay)
    assert replay.fastest == found.config
    assert sorted(replay.space) == sorted(replay.measured)
    assert found.trials == len(TABLE)
    assert found.measurement == timed(382.28, replay.spread)
    assert stored(cache) == found


def test_finds_the_best_from_the_worst_ranking_in_half_the_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worst_first = sorted(Replay().space, key=slowness, reverse=True)
    regrets: list[float] = []
    for seed in range(8):
        monkeypatch.setattr(tune_module, "SAMPLER_SEED", seed)
        monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / str(seed)))
        replay = Replay()
        found = run(replay, trials=len(TABLE) // 2, candidates=ranking(worst_first))
        regrets.append(slowness(found.config) / slowness(replay.fastest) - 1)
    # Guessing at random leaves 6 % on average here, and 22 % at worst.
    assert statistics.mean(regrets) <= 0.02
    assert max(regrets) <= 0.1


def test_tries_the_models_proposals_first_and_in_order() -> None:
    replay = Replay()
    order = sorted(replay.space, key=slowness)[::-2]
    run(replay, trials=SEEDS + 2, candidates=ranking(order))
    assert order[:SEEDS] == replay.measured[:SEEDS]
    assert len(replay.measured) == SEEDS + 2


def test_proposals_outside_the_space_are_tried_too() -> None:
    replay = Replay(SMALL)
    run(replay, space=replay.space[:3], candidates=ranking(replay.space[5:6]))
    assert replay.space[5] == replay.measured[0]
    assert sorted([*replay.space[:3], replay.space[5]]) == sorted(replay.measured)


def test_two_runs_try_the_same_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[list[TileConfig]] = []
    for name in ("one", "other"):
        monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / name))
        replay = Replay()
        run(replay, trials=40)
        measured.append(replay.measured)
    assert measured[0] == measured[1]


@pytest.mark.parametrize("trials", [1, 7, SEEDS, 30])
def test_never_measures_twice_and_spends_the_budget_exactly(trials: int) -> None:
    replay = Replay()
    found = run(replay, trials=trials)
    assert trials == len(replay.measured) == len(set(replay.measured))
    assert trials == found.trials


def test_record_says_how_it_is_known(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "current_versions", lambda: VERSIONS)
    replay = Replay(SMALL)
    found = run(replay, trials=8, seconds=60.0)
    assert (found.gpu, found.arch, found.kernel, found.problem) == ("h200", "sm_90", "fwd", PROBLEM)
    assert found.versions == VERSIONS
    assert re.fullmatch(r"[0-9a-f]{12,}", found.template_digest)
    assert found.estimate is not None
    rank = replay.space.index(found.config)
    assert found.estimate.seconds == pytest.approx((300 + rank) * 1e-6)
    assert (found.estimate.limit, found.estimate.read_bytes) == ("tensor", 1000)
    assert found.command == f"tilegen tune '{PROBLEM}' --kernel fwd --trials 8 --seconds 60"
    hit = look_up(PROBLEM, H200, "fwd", versions=VERSIONS, template_digest=found.template_digest)
    assert hit is not None
    assert (hit.record, hit.origin, hit.differences) == (found, "own", ())


def test_a_ragged_problem_is_tuned_as_its_bucket(cache: Path) -> None:
    replay = Replay(SMALL)
    ragged = AttentionProblem.parse("b3 hq32 hkv8 q4000 kv2049 d128 bf16 causal")
    found = tune(
        ragged, H200, measure=replay, candidates=ranking(replay.space), space=[], progress=False
    )
    assert found.problem == PROBLEM
    assert look_up(PROBLEM, H200, "fwd") is not None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"trials": 0}, "trials must be at least 1, got 0"),
        ({"seconds": 0.0}, "seconds must be above 0, got 0.0"),
        ({"seconds": float("nan")}, "seconds must be above 0, got nan"),
    ],
    ids=["no trials", "no seconds", "nan"],
)
def test_budget_that_is_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        run(Replay(), **options)


# --------------------------------------------------------------------------------------------------
# Ties


def trials_of(*times: tuple[str, float, float]) -> dict[TileConfig, Trial]:
    """Return trials from (config key, median, spread)."""
    configs = {TileConfig.parse(key): timed(us, spread) for key, us, spread in times}
    return {config: Trial(config=config, measurement=m) for config, m in configs.items()}


def test_a_tie_goes_to_the_first_config_in_order() -> None:
    tied = trials_of(
        ("m128n64w8s3", 100.0, 0.01), ("m64n64w4s2", 100.9, 0.01), ("m32n64w4s2", 101.1, 0.01)
    )
    # m32 is first in order, but slower than the fastest's p80 of 101.
    assert pick(tied) == TileConfig.parse("m64n64w4s2")
    assert pick(dict(reversed(tied.items()))) == TileConfig.parse("m64n64w4s2")


def test_a_noisy_measurement_ties_with_no_more_than_the_limit() -> None:
    just = 100.0 * (1 + TIE_LIMIT)
    noisy = trials_of(("m128n64w8s3", 100.0, 0.5), ("m64n64w4s2", just + 0.1, 0.5))
    assert pick(noisy) == TileConfig.parse("m128n64w8s3")
    noisy |= trials_of(("m64n32w4s2", just - 0.1, 0.5))
    assert pick(noisy) == TileConfig.parse("m64n32w4s2")


def test_failures_never_win() -> None:
    config = TileConfig.parse("m32n32w4s2")
    failure = Trial(config=config, measurement=Measurement(status="launch_failed", message="x"))
    assert pick({config: failure}) is None
    assert pick({}) is None
    timed_too = trials_of(("m128n64w8s3", 100.0, 0.0))
    assert pick({config: failure, **timed_too}) == TileConfig.parse("m128n64w8s3")


def test_machines_that_differ_by_noise_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two configs within 0.5 %, timed with 0.3 % of noise that turns their order round.
    quiet = {**TABLE, "m64n64w4s3": 382.0, "m128n64w8s3": 383.0}
    winners: set[TileConfig] = set()
    for machine, factor in enumerate((0.997, 1.0, 1.003)):
        monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / str(machine)))
        winners.add(run(Replay({**quiet, "m64n64w4s3": 382.0 * factor}, spread=0.01)).config)
    assert winners == {TileConfig.parse("m64n64w4s3")}


# --------------------------------------------------------------------------------------------------
# Failures


def test_failures_are_values(cache: Path) -> None:
    run(Replay())
    lines = [json.loads(line) for line in trial_file(cache).read_text().splitlines()]
    statuses = {TileConfig(**line["config"]).key: line["measurement"]["status"] for line in lines}
    expected = {key: us.split(":")[0] if isinstance(us, str) else "ok" for key, us in TABLE.items()}
    assert expected == statuses


def test_only_failed_launches_are_tried_again() -> None:
    run(Replay())
    again = Replay()
    assert run(again).trials == len(TABLE)
    assert len(LAUNCH_FAILED) >= 1
    assert again.measured == LAUNCH_FAILED


def test_a_launch_that_failed_for_a_while_wins_later(cache: Path) -> None:
    replay = Replay(SMALL)
    crowded = Replay({**SMALL, replay.fastest.key: "launch_failed: CUDA error: out of memory"})
    assert run(crowded, trials=8).config != replay.fastest
    found = run(replay, trials=8)
    assert (found.config, found.trials) == (replay.fastest, 8)
    assert replay.measured == [replay.fastest]
    last = Replay(SMALL)
    assert run(last, trials=8).config == replay.fastest
    assert last.measured == []


def test_failed_launches_are_tried_again_before_anything_else() -> None:
    replay = Replay(SMALL)
    failing = replay.space[3]
    run(Replay({**SMALL, failing.key: "launch_failed: CUDA error: out of memory"}), trials=5)
    run(replay, trials=6)
    assert replay.measured == [failing, replay.space[5]]


def test_nothing_that_runs_is_an_error_with_the_reasons(cache: Path) -> None:
    broken = {key: "launch_failed: no such luck" for key in SMALL}
    with pytest.raises(NoRecord, match=r"none of 8 tried did \(m32n32w4s2 launch_failed: no such"):
        run(Replay(broken))
    assert not (cache / "h200").exists()
    assert len(trials_on_disk(cache)) == 8


def test_wrong_results_lose_to_slower_right_ones(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replay = Replay()
    by_speed = sorted(replay.space, key=slowness)
    checked: list[TileConfig] = []

    def check(config: TileConfig) -> Measurement | None:
        checked.append(config)
        wrong = Measurement(status="wrong", message="out error 3, allowed 0.01")
        return wrong if config in by_speed[:2] else None

    found = run(replay, check=check)
    assert by_speed[2] == found.config
    assert len(checked) == len(set(checked)) < len(TABLE) / 2, "only what would win is checked"
    assert any(
        f"{by_speed[0]!r} is fastest but wrong: out error 3, allowed 0.01" in line
        for line in caplog.messages
    )
    again = Replay()
    assert run(again, check=check).config == by_speed[2]
    assert again.measured == LAUNCH_FAILED


def test_device_lost_in_a_check_leaves_the_winner_that_was_right(cache: Path) -> None:
    replay = Replay(SMALL)
    slowest_first = sorted(replay.space, key=slowness, reverse=True)

    def check(config: TileConfig) -> Measurement | None:
        if config == slowest_first[5]:
            raise DeviceLost(Measurement(status="launch_failed", message="illegal address"))
        return None

    with pytest.raises(DeviceLost):
        run(replay, check=check, candidates=ranking(slowest_first))
    # First its time, then that it is bad.
    assert [*slowest_first[:6], slowest_first[5]] == trials_on_disk(cache)
    assert stored(cache).config == slowest_first[4]
    found = run(Replay(SMALL), check=check, candidates=ranking(slowest_first))
    assert found.config == replay.fastest


def test_winner_of_an_earlier_run_is_checked_before_it_wins_again() -> None:
    replay = Replay(SMALL)
    run(replay)
    wrong = Measurement(status="wrong", message="out")
    found = run(Replay(SMALL), check=lambda c: wrong if c == replay.fastest else None)
    assert found.config != replay.fastest


def test_lost_device_keeps_everything_and_is_not_met_again(cache: Path) -> None:
    replay = Replay()
    poison = replay.space[5]

    def measure(config: TileConfig) -> Measurement:
        if config == poison:
            raise DeviceLost(Measurement(status="launch_failed", message="illegal address"))
        return replay(config)

    def tune_it() -> TuningRecord:
        return tune(
            PROBLEM,
            H200,
            measure=measure,
            candidates=ranking(replay.space),
            space=replay.space,
            progress=False,
        )

    with pytest.raises(DeviceLost, match="illegal address"):
        tune_it()
    assert replay.space[:6] == trials_on_disk(cache)
    assert stored(cache).trials == 6
    found = tune_it()  # in the next process
    assert replay.fastest == found.config
    assert found.trials == len(TABLE)


# --------------------------------------------------------------------------------------------------
# Stopping and going on


def test_each_trial_is_on_disk_before_the_next_is_measured(cache: Path) -> None:
    replay = Replay(SMALL)

    def measure(config: TileConfig) -> Measurement:
        if replay.measured:
            assert replay.measured == trials_on_disk(cache)
        return replay(config)

    tune(
        PROBLEM,
        H200,
        measure=measure,
        candidates=ranking(replay.space),
        space=[],
        progress=False,
    )
    assert len(replay.measured) == 8


def test_kill_9_loses_nothing(cache: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-m", "tests.replay", "17"], cwd=ROOT, capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = trials_on_disk(cache)
    assert len(before) == 17
    replay = Replay()
    found = run(replay)
    assert set(before).isdisjoint(replay.measured)
    assert set(before) | set(replay.measured) == set(replay.space)
    assert replay.fastest == found.config
    assert found.trials == len(TABLE)


def test_budget_counts_the_trials_of_earlier_runs() -> None:
    run(Replay(), trials=12)
    more = Replay()
    found = run(more, trials=20)
    assert len(more.measured) == 8
    assert found.trials == 20
    enough = Replay()
    run(enough, trials=20)
    assert enough.measured == []


def test_torn_line_is_passed_over_and_written_behind(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(Replay(), trials=5)
    file = trial_file(cache)
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    replay = Replay()
    run(replay, trials=6)
    assert len(replay.measured) == 2
    assert any("passed over 1 bad lines, first line 5" in line for line in caplog.messages)
    last = Replay()
    assert run(last, trials=6).trials == 6
    assert last.measured == []


def test_hostile_trial_log_is_data(cache: Path) -> None:
    run(Replay(SMALL), trials=3)
    file = trial_file(cache)
    good = file.read_text().splitlines()
    nan = good[0].replace('"median_us": ', '"median_us": NaN, "x": ')
    bad = [b"\xff\xfe", b"[" * 50_000, b"null", b"{}", nan.encode(), bytes(100), b"cos\nsystem\n"]
    file.write_bytes(b"\n".join([*bad, good[1].encode(), b'{"conditions": 1}']) + b"\n")
    replay = Replay(SMALL)
    run(replay)
    assert len(replay.measured) == 7


def test_added_candidate_measures_nothing_else() -> None:
    new = "m128n32w4s2"
    fewer = {key: us for key, us in TABLE.items() if key != new}
    run(Replay(fewer))
    replay = Replay()
    found = run(replay)
    assert replay.measured == [*LAUNCH_FAILED, TileConfig.parse(new)]
    assert found.trials == len(TABLE)


def test_config_that_left_the_space_no_longer_wins() -> None:
    first = Replay()
    run(first)
    fewer = {key: us for key, us in TABLE.items() if key != first.fastest.key}
    replay = Replay(fewer)
    found = run(replay)
    assert replay.fastest == found.config
    assert replay.measured == LAUNCH_FAILED


@pytest.mark.parametrize(
    "change, measured",
    [
        ({"triton": "3.9.0"}, 8),
        ({"driver": "590.1"}, 8),
        ({"torch": "2.15.0", "tilegen": "0.2.0"}, 0),
    ],
    ids=["triton", "driver", "torch"],
)
def test_timings_are_taken_again_where_they_may_differ(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], measured: int
) -> None:
    monkeypatch.setattr(tune_module, "current_versions", lambda: VERSIONS)
    run(Replay(SMALL))
    monkeypatch.setattr(tune_module, "current_versions", lambda: replace(VERSIONS, **change))
    again = Replay(SMALL)
    found = run(again)
    assert measured == len(again.measured)
    assert found.versions == replace(VERSIONS, **change)
    hit = look_up(PROBLEM, H200, "fwd", versions=found.versions)
    assert hit is not None
    assert hit.differences == (), "a new run must end the doubt"


def test_changed_template_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run(Replay(SMALL))
    monkeypatch.setattr(tune_module, "template_digest", lambda kernel: "0123456789ab")
    again = Replay(SMALL)
    assert run(again).template_digest == "0123456789ab"
    assert len(again.measured) == 8


def test_ctrl_c_keeps_what_was_found_and_says_how_to_go_on(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replay = Replay(stop_at=13)
    with pytest.raises(KeyboardInterrupt):
        run(replay, trials=40)
    assert len(replay.measured) == len(trials_on_disk(cache)) == 13
    so_far = stored(cache)
    assert min(replay.measured, key=slowness) == so_far.config
    assert so_far.trials == 13
    last = caplog.messages[-1]
    assert last.startswith("interrupted; 13 trials are kept, the best so far is in ")
    assert last.endswith(f"to go on from here: tilegen tune '{PROBLEM}' --kernel fwd --trials 40")
    rest = Replay()
    run(rest, trials=40)
    assert len(rest.measured) == 27
    assert set(rest.measured).isdisjoint(replay.measured)


def test_ctrl_c_before_anything_ran_writes_no_record(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(Replay(stop_at=0))
    assert not (cache / "h200").exists()
    assert "0 trials are kept, none of them ran" in caplog.messages[-1]


def test_seconds_stop_the_search_but_not_before_one_config_ran() -> None:
    replay = Replay()

    def slowly(config: TileConfig) -> Measurement:
        time.sleep(0.02)
        return replay(config)

    failing_first = sorted(replay.space, key=slowness, reverse=True)
    options = {"candidates": ranking(failing_first), "space": [], "progress": False}
    tune(PROBLEM, H200, measure=slowly, seconds=1e-6, **options)
    assert len(replay.measured) == 1 + sum(isinstance(us, str) for us in TABLE.values())
    started = time.monotonic()
    tune(PROBLEM, H200, measure=slowly, seconds=0.2, **options)
    assert time.monotonic() - started < 2
    assert 11 < len(replay.measured) < 30


# --------------------------------------------------------------------------------------------------
# Compiling ahead


@dataclass(frozen=True)
class Used:
    """What a compiler would say."""

    shared_bytes: int = 64 * 1024
    spill_bytes: int = 0


Built = Iterator[tuple[TileConfig, Any]]


def compiler(usage: dict[str, Any]) -> Callable[[Sequence[TileConfig]], Built]:
    """Return a compiler with these results by config key; it finishes the last config first."""

    def compile_all(configs: Sequence[TileConfig]) -> Built:
        for config in reversed(configs):
            yield config, usage.get(config.key, Used())

    return compile_all


def test_hopeless_configs_cost_no_gpu_time(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    replay = Replay(SMALL)
    failed, too_large, spilling = replay.space[:3]
    usage = {
        failed.key: BuildFailed("attention_fwd for sm_90: PassManager::run failed"),
        too_large.key: Used(shared_bytes=264 * 1024),
        spilling.key: Used(spill_bytes=160),
    }
    found = run(replay, compile=compiler(usage))
    assert replay.space[3:] == replay.measured
    assert found.trials == 8
    lines = [json.loads(line) for line in trial_file(cache).read_text().splitlines()]
    assert [
        (line["measurement"]["status"], line["measurement"]["message"]) for line in lines[:3]
    ] == [
        ("build_failed", "attention_fwd for sm_90: PassManager::run failed"),
        ("out_of_resources", "264 KiB > 227 KiB"),
        ("out_of_resources", "160 bytes of registers spilled a thread"),
    ]
    assert caplog.messages[1].endswith(f"{too_large!r} out of resources: 264 KiB > 227 KiB")


def test_where_everything_spills_the_least_is_measured_after_all(cache: Path) -> None:
    replay = Replay(SMALL)
    slowest_first = sorted(replay.space, key=slowness, reverse=True)
    usage: dict[str, Any] = {
        config.key: Used(spill_bytes=8 + 8 * rank) for rank, config in enumerate(slowest_first)
    }
    usage[slowest_first[1].key] = BuildFailed("no")
    found = run(replay, compile=compiler(usage))
    expected = [slowest_first[0], *slowest_first[2:]]
    assert expected == replay.measured
    assert found.config == replay.fastest
    again = Replay(SMALL)
    assert run(again, compile=compiler(usage)).config == found.config
    assert again.measured == []


def test_seconds_are_not_all_spent_on_compiling_what_spills() -> None:
    replay = Replay()

    def compile_all(configs: Sequence[TileConfig]) -> Built:
        for config in configs:
            time.sleep(0.1)
            yield config, Used(spill_bytes=8)

    started = time.monotonic()
    found = run(replay, seconds=0.05, compile=compile_all)
    assert time.monotonic() - started < 2
    assert [found.config] == replay.measured


def test_the_next_configs_are_compiled_while_one_is_measured() -> None:
    replay = Replay(SMALL)
    compiled = {config: threading.Event() for config in replay.space}
    second = compiled[replay.space[1]]

    def compile_all(configs: Sequence[TileConfig]) -> Built:
        for config in configs:
            compiled[config].set()
            yield config, Used()

    def measure(config: TileConfig) -> Measurement:
        assert second.wait(timeout=20), "nothing was compiled during the first measurement"
        return replay(config)

    tune(
        PROBLEM,
        H200,
        measure=measure,
        compile=compile_all,
        candidates=ranking(replay.space),
        space=[],
        progress=False,
    )
    assert replay.space == replay.measured


def test_only_what_may_be_measured_soon_is_compiled() -> None:
    replay = Replay()
    asked: list[int] = []

    def compile_all(configs: Sequence[TileConfig]) -> Built:
        asked.append(len(configs))
        yield from compiler({})(configs)

    run(replay, trials=SEEDS + 5, compile=compile_all)
    assert asked[0] == SEEDS
    assert sum(asked) == SEEDS + 5


def test_a_compiler_that_breaks_is_an_error_not_a_result(cache: Path) -> None:
    def compile_all(configs: Sequence[TileConfig]) -> Built:
        yield configs[0], Used()
        raise OSError("no space left on device")

    replay = Replay(SMALL)
    with pytest.raises(OSError, match="no space left"):
        run(replay, compile=compile_all)
    assert replay.measured == replay.space[:1] == trials_on_disk(cache)


def test_a_compiler_that_forgets_a_config_does_not_hang() -> None:
    def compile_all(configs: Sequence[TileConfig]) -> Built:
        yield from ((config, Used()) for config in configs[1:])

    with pytest.raises(BuildFailed, match="gave no result"):
        run(Replay(SMALL), compile=compile_all)


def test_time_runs_out_while_the_compiler_works(cache: Path) -> None:
    release = threading.Event()

    def compile_all(configs: Sequence[TileConfig]) -> Built:
        yield configs[0], Used()
        release.wait(timeout=20)

    replay = Replay(SMALL)
    started = time.monotonic()
    found = run(replay, seconds=0.3, compile=compile_all)
    release.set()
    assert time.monotonic() - started < 5
    assert replay.measured == [found.config] == replay.space[:1]


# --------------------------------------------------------------------------------------------------
# What it says


def test_one_line_for_each_trial_and_a_last_one_to_paste(caplog: pytest.LogCaptureFixture) -> None:
    replay = Replay()
    found = run(replay, trials=30)
    lines = caplog.messages
    trial = re.compile(
        r"\[ +\d+\.\ds\] \d+/30 fwd "
        r"TileConfig\(block_m=\d+, block_n=\d+, num_warps=\d, num_stages=\d\)"
        r"(  \d+ us  predicted \d+  best \d+| (out of resources|launch failed): .+)"
    )
    assert all(trial.fullmatch(line) for line in lines[:30]), lines[:30]
    assert len(lines) == 32
    assert lines[30].endswith("written: no record was there")
    assert eval(lines[-1], {"TileConfig": TileConfig}) == found.config
    assert lines[-1].endswith(f"# 382 us, fwd, h200, {PROBLEM}")


def test_a_later_run_says_what_it_starts_from(caplog: pytest.LogCaptureFixture) -> None:
    run(Replay(SMALL), trials=4)
    caplog.clear()
    run(Replay(SMALL), trials=5)
    assert re.fullmatch(r"4 trials of earlier runs, 4 timed, best \d+ us", caplog.messages[0])
    assert "] 5/5 fwd " in caplog.messages[1]


def test_on_a_terminal_the_lines_go_above_a_bar(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    found = run(Replay(SMALL), progress=True)
    shown = capsys.readouterr().err
    assert "tuning fwd" in shown
    assert "8/8" in shown
    assert f"{found.config!r}  # " in shown
    assert "[  0." in shown
    assert caplog.messages == [], "said once, not twice"


def test_what_is_said_on_a_terminal_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    with Report("fwd", 1, enabled=True) as report:
        report.say("[red]not red[/red] [/] " + "x" * 200)
    assert "[red]not red[/red] [/] " + "x" * 200 in capsys.readouterr().err


def test_optuna_is_quiet_and_keeps_its_own_settings(capsys: pytest.CaptureFixture[str]) -> None:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.INFO)
    try:
        run(Replay(), trials=20)
        assert optuna.logging.get_verbosity() == optuna.logging.INFO
    finally:
        optuna.logging.set_verbosity(before)
    assert capsys.readouterr().err == ""


# --------------------------------------------------------------------------------------------------
# The record that is there already


def test_faster_record_from_elsewhere_stays(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tune_module, "current_versions", lambda: VERSIONS)
    elsewhere = record(us=100.0, template_digest=template_digest("fwd"))
    save(elsewhere)
    found = run(Replay())
    assert found.measurement.median_us == 382.28
    assert stored(cache) == replace(elsewhere, rivals=(found,))
    assert (
        "not won: the one there stays: faster (100 us, the other 382.28 us)" in caplog.messages[-2]
    )


def test_own_record_follows_the_ties_that_more_trials_bring(cache: Path) -> None:
    first = Replay({"m128n64w8s3": 100.0}, spread=0.015)
    run(first)
    assert stored(cache).config == TileConfig.parse("m128n64w8s3")
    found = run(Replay({"m128n64w8s3": 100.0, "m64n64w8s3": 101.0}, spread=0.015))
    assert found.config == TileConfig.parse("m64n64w8s3")
    assert stored(cache) == found


# --------------------------------------------------------------------------------------------------
# The machine, and the search by itself


@pytest.mark.parametrize("here", [None, "a100"])
def test_without_that_gpu_it_says_so_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, here: str | None
) -> None:
    from tilegen import device

    monkeypatch.setattr(device, "detect", lambda: here and device.gpu(here))
    found = "found a100 (sm_80)" if here else "found no GPU"
    with pytest.raises(Unsupported, match=re.escape(f"needs that GPU at hand, {found}; ")):
        tune(PROBLEM, H200)
    assert not cache.exists()


def checks_with(*wrong: str) -> tuple[Check, ...]:
    """Return what `verify` says when these tensors are wrong."""
    values = {"error": 1.0, "allowed": 0.1, "index": (0,), "found": 1.0, "expected": 0.0}
    names = ("out", "lse", "dq", "dk", "dv")
    return tuple(Check(tensor=name, ok=name not in wrong, **values) for name in names)


TRIED = TileConfig(block_m=64, block_n=64)
OUTPUTS = {
    "fwd": {"out", "lse"},
    "bwd_preprocess": {"dq", "dk", "dv"},
    "bwd_dkdv": {"dk", "dv"},
    "bwd_dq": {"dq"},
}


@pytest.mark.parametrize("tensor", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("kernel", LARGE_CACHE)
def test_real_check_judges_the_outputs_of_the_kernel(
    kernel: Kernel, tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[AttentionProblem, dict[str, TileConfig]]] = []

    def verified(problem: AttentionProblem, configs: dict[str, TileConfig]) -> tuple[Check, ...]:
        asked.append((problem, configs))
        return checks_with(tensor) if TRIED in configs.values() else checks_with()

    monkeypatch.setattr(verify, "verify", verified)
    found = check_config(PROBLEM, kernel, TRIED)
    if tensor in OUTPUTS[kernel]:
        assert found is not None
        assert found.status == "wrong"
        assert re.match(f"{tensor} +WRONG +error 1, allowed", found.message)
    else:
        assert found is None
    problem, configs = asked[0]
    assert problem == verify.reduced(PROBLEM)
    others = {k: bench_module.safe(k) for k in bench_module.partners(kernel) if k != kernel}
    assert configs == {kernel: TRIED, **others}


@pytest.mark.parametrize("kernel", [k for k in LARGE_CACHE if k != "fwd"])
@pytest.mark.parametrize("how", ["wrong", "raises"])
def test_other_kernels_that_fail_are_not_held_against_a_config(
    how: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verified(*_: Any) -> tuple[Check, ...]:
        if how == "raises":
            raise RuntimeError("CUDA error: out of memory")
        return checks_with("dq", "dk", "dv")

    monkeypatch.setattr(verify, "verify", verified)
    with pytest.raises(WrongResult, match=r"smallest tiles \(m16n16w4s1\), to check bwd_"):
        check_config(PROBLEM, kernel, TRIED)


@pytest.mark.parametrize("kernel", LARGE_CACHE)
def test_real_check_maps_what_a_kernel_raises(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(_: Any, configs: dict[str, TileConfig]) -> tuple[Check, ...]:
        if TRIED in configs.values():
            raise RuntimeError("CUDA error: invalid argument\n  more")
        return checks_with()

    monkeypatch.setattr(verify, "verify", explode)
    found = check_config(PROBLEM, kernel, TRIED)
    expected = Measurement(status="launch_failed", message="CUDA error: invalid argument more")
    assert expected == found


def test_inputs_that_cannot_be_made_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def too_large(*_: Any) -> list[Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 GiB")

    monkeypatch.setattr(bench_module, "make_launches", too_large)
    measure = bench_module._measure_with(PROBLEM, "fwd", H200)
    with pytest.raises(Unsupported, match=r"no inputs for 'b4 hq32 .*512.00 GiB"):
        measure(TileConfig(block_m=64, block_n=64))


def test_search_of_nothing_asks_nothing() -> None:
    assert Search([]).ask() is None


def test_search_goes_by_rank_when_optuna_only_proposes_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = Replay().space
    search = Search(space)
    stubborn = {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 2}
    asked: list[int] = []

    class SameAgain(optuna.samplers.BaseSampler):
        def infer_relative_search_space(self, *_: Any) -> dict[str, Any]:
            return {}

        def sample_relative(self, *_: Any) -> dict[str, Any]:
            return {}

        def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
            asked.append(trial.number)
            return stubborn[name]

    search._study.sampler = SameAgain()
    for expected in space[:4]:
        config = search.ask()
        assert expected == config
        search.tell(config, 100.0)
    assert len(set(asked)) == 1 + 3 * MAX_MISSES


def test_search_answers_every_proposal_it_does_not_try() -> None:
    space = [TileConfig.parse(key) for key in ("m16n16w4s1", "m32n32w4s1", "m64n64w4s1")]
    search = Search(space, seed=3)  # six of the nine products are illegal
    state = optuna.trial.TrialState
    times = dict(zip(space, (100.0, None, 300.0), strict=True))
    while (config := search.ask()) is not None:
        search.tell(config, times[config])
    assert len(search._study.trials) > len(space), "no illegal proposal: the test shows nothing"
    for trial in search._study.trials:
        us = times.get(TileConfig(**trial.params))
        assert trial.state == (state.PRUNED if us is None else state.COMPLETE)
        assert trial.values == (None if us is None else [us])
