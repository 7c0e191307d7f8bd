"""The search when configs fail: failures are values, wrong ones lose, trials outlive the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.records import TASK
from tests.support.replay import (
    LAUNCH_FAILED,
    SMALL,
    TABLE,
    Replay,
    ranking,
    run,
    slowness,
    stored,
    trial_file,
    trials_on_disk,
)
from tilegen.errors import NoRecord
from tilegen.kernels.config import TileConfig
from tilegen.store import TuningRecord
from tilegen.tuning.measure import DeviceLost, Measurement
from tilegen.tuning.tuner import tune

pytestmark = pytest.mark.usefixtures("own_cache")


def test_failures_are_values(own_cache: Path) -> None:
    run(Replay())
    lines = [json.loads(line) for line in trial_file(own_cache).read_text().splitlines()]
    statuses = {TileConfig(**line["config"]).key: line["measurement"]["status"] for line in lines}
    expected = {key: us.split(":")[0] if isinstance(us, str) else "ok" for key, us in TABLE.items()}
    assert expected == statuses


def test_only_failed_launches_are_tried_again() -> None:
    run(Replay())
    again = Replay()
    assert run(again).trials == len(TABLE)
    assert len(LAUNCH_FAILED) >= 1
    assert again.measured == LAUNCH_FAILED


def test_a_launch_that_failed_for_a_while_wins_later(own_cache: Path) -> None:
    replay = Replay(SMALL)
    crowded = Replay({**SMALL, replay.fastest.key: "launch_failed: CUDA error: out of memory"})
    assert run(crowded, trials=8).config != replay.fastest
    record = run(replay, trials=8)
    assert (record.config, record.trials) == (replay.fastest, 8)
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


def test_nothing_that_runs_is_an_error_with_the_reasons(own_cache: Path) -> None:
    broken = {key: "launch_failed: no such luck" for key in SMALL}
    with pytest.raises(NoRecord, match=r"none of 8 tried did \(m32n32w4s2 launch_failed: no such"):
        run(Replay(broken))
    assert not (own_cache / "h200").exists()
    assert len(trials_on_disk(own_cache)) == 8


def test_wrong_results_lose_to_slower_right_ones(
    own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replay = Replay()
    by_speed = sorted(replay.space, key=slowness)
    checked: list[TileConfig] = []

    def check(config: TileConfig) -> Measurement | None:
        checked.append(config)
        wrong = Measurement(status="wrong", message="out error 3, allowed 0.01")
        return wrong if config in by_speed[:2] else None

    record = run(replay, check=check)
    assert by_speed[2] == record.config
    assert len(checked) == len(set(checked)) < len(TABLE) / 2, "only what would win is checked"
    assert any(
        f"{by_speed[0]!r} is fastest but wrong: out error 3, allowed 0.01" in line
        for line in caplog.messages
    )
    again = Replay()
    assert run(again, check=check).config == by_speed[2]
    assert again.measured == LAUNCH_FAILED


def test_device_lost_in_a_check_leaves_the_winner_that_was_right(own_cache: Path) -> None:
    replay = Replay(SMALL)
    slowest_first = sorted(replay.space, key=slowness, reverse=True)

    def check(config: TileConfig) -> Measurement | None:
        if config == slowest_first[5]:
            raise DeviceLost(Measurement(status="launch_failed", message="illegal address"))
        return None

    with pytest.raises(DeviceLost):
        run(replay, check=check, candidates=ranking(slowest_first))
    # First its time, then that it is bad.
    assert [*slowest_first[:6], slowest_first[5]] == trials_on_disk(own_cache)
    assert stored(own_cache).config == slowest_first[4]
    record = run(Replay(SMALL), check=check, candidates=ranking(slowest_first))
    assert record.config == replay.fastest


def test_winner_of_an_earlier_run_is_checked_before_it_wins_again() -> None:
    replay = Replay(SMALL)
    run(replay)
    wrong = Measurement(status="wrong", message="out")
    record = run(Replay(SMALL), check=lambda c: wrong if c == replay.fastest else None)
    assert record.config != replay.fastest


def test_lost_device_keeps_everything_and_is_not_met_again(own_cache: Path) -> None:
    replay = Replay()
    poison = replay.space[5]

    def measure(config: TileConfig) -> Measurement:
        if config == poison:
            raise DeviceLost(Measurement(status="launch_failed", message="illegal address"))
        return replay(config)

    def tune_it() -> TuningRecord:
        return tune(
            TASK,
            measure=measure,
            candidates=ranking(replay.space),
            space=replay.space,
            progress=False,
        )

    with pytest.raises(DeviceLost, match="illegal address"):
        tune_it()
    assert replay.space[:6] == trials_on_disk(own_cache)
    assert stored(own_cache).trials == 6
    record = tune_it()  # in the next process
    assert replay.fastest == record.config
    assert record.trials == len(TABLE)
