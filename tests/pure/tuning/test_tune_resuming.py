"""The search that stops and goes on: what is kept, what is measured again, what a budget counts."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.records import PROBLEM, TASK, VERSIONS
from tests.support.replay import (
    LAUNCH_FAILED,
    SMALL,
    TABLE,
    Clock,
    Replay,
    ranking,
    run,
    slowness,
    stored,
    trial_file,
    trials_on_disk,
)
from tilegen.kernels.config import TileConfig
from tilegen.store import look_up
from tilegen.tuning import tuner as tune_module
from tilegen.tuning.measure import Measurement
from tilegen.tuning.tuner import tune

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("own_cache")]
ROOT = Path(__file__).parents[3]


def test_each_trial_is_on_disk_before_the_next_is_measured(own_cache: Path) -> None:
    replay = Replay(SMALL)

    def measure(config: TileConfig) -> Measurement:
        if replay.measured:
            assert replay.measured == trials_on_disk(own_cache)
        return replay(config)

    tune(
        TASK,
        measure=measure,
        candidates=ranking(replay.space),
        space=[],
        progress=False,
    )
    assert len(replay.measured) == 8


def test_kill_9_loses_nothing(own_cache: Path) -> None:
    killed = warm.start("from tests.support.replay import Killed, run; run(Killed(stop_at=17))")
    _, said = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, said
    before = trials_on_disk(own_cache)
    assert len(before) == 17
    replay = Replay()
    record = run(replay)
    assert set(before).isdisjoint(replay.measured)
    assert set(before) | set(replay.measured) == set(replay.space)
    assert replay.fastest == record.config
    assert record.trials == len(TABLE)


def test_budget_counts_the_trials_of_earlier_runs() -> None:
    run(Replay(), trials=12)
    more = Replay()
    record = run(more, trials=20)
    assert len(more.measured) == 8
    assert record.trials == 20
    enough = Replay()
    run(enough, trials=20)
    assert enough.measured == []


def test_torn_line_is_passed_over_and_written_behind(
    own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(Replay(), trials=5)
    file = trial_file(own_cache)
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    replay = Replay()
    run(replay, trials=6)
    assert len(replay.measured) == 2
    assert any("skipped 1 bad lines, first line 5" in line for line in caplog.messages)
    last = Replay()
    assert run(last, trials=6).trials == 6
    assert last.measured == []


def test_hostile_trial_log_is_data(own_cache: Path) -> None:
    run(Replay(SMALL), trials=3)
    file = trial_file(own_cache)
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
    record = run(replay)
    assert replay.measured == [*LAUNCH_FAILED, TileConfig.parse(new)]
    assert record.trials == len(TABLE)


def test_config_that_left_the_space_no_longer_wins() -> None:
    first = Replay()
    run(first)
    fewer = {key: us for key, us in TABLE.items() if key != first.fastest.key}
    replay = Replay(fewer)
    record = run(replay)
    assert replay.fastest == record.config
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
    monkeypatch.setattr(tune_module, "versions_for", lambda _: VERSIONS)
    run(Replay(SMALL))
    monkeypatch.setattr(tune_module, "versions_for", lambda _: replace(VERSIONS, **change))
    again = Replay(SMALL)
    record = run(again)
    assert measured == len(again.measured)
    had = replace(VERSIONS, **change) if measured else VERSIONS
    assert record.versions == had, "of who has measured it"
    hit = look_up(TASK, versions=record.versions)
    assert hit is not None
    assert hit.differences == (), "a new run must end the doubt"


def test_changed_template_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run(Replay(SMALL))
    monkeypatch.setattr(tune_module, "template_digest", lambda kernel: "0123456789ab")
    again = Replay(SMALL)
    assert run(again).template_digest == "0123456789ab"
    assert len(again.measured) == 8


def test_ctrl_c_keeps_results_and_says_how_to_continue(
    own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replay = Replay(stop_at=13)
    with pytest.raises(KeyboardInterrupt):
        run(replay, trials=40)
    assert len(replay.measured) == len(trials_on_disk(own_cache)) == 13
    so_far = stored(own_cache)
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
    own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(Replay(stop_at=0))
    assert not (own_cache / "h200").exists()
    assert "0 trials are kept, none of them ran" in caplog.messages[-1]


def test_seconds_stop_the_search_but_not_before_one_config_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay, clock = Replay(), Clock()
    clock.replaces_time_of("tilegen.tuning.tuner", monkeypatch)

    def slowly(config: TileConfig) -> Measurement:
        clock.sleep(0.02)
        return replay(config)

    failing_first = sorted(replay.space, key=slowness, reverse=True)
    options = {"candidates": ranking(failing_first), "space": [], "progress": False}
    tune(TASK, measure=slowly, seconds=1e-6, **options)
    assert len(replay.measured) == 1 + sum(isinstance(us, str) for us in TABLE.values())
    before = len(replay.measured)
    tune(TASK, measure=slowly, seconds=0.19, **options)
    assert len(replay.measured) - before == 10
