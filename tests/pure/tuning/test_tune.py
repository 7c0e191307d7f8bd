"""The search on recorded timings: its results, messages and files."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.support.records import H200, PROBLEM, TASK, VERSIONS, record, timed
from tests.support.replay import SMALL, TABLE, Replay, ranking, run, slowness, stored
from tilegen.emit.identity import template_digest
from tilegen.errors import Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store import look_up, save
from tilegen.store.trials import Trial
from tilegen.task import KernelTask
from tilegen.tuning import tuner as tune_module
from tilegen.tuning.measure import TIE_LIMIT, Measurement
from tilegen.tuning.report import Report
from tilegen.tuning.tuner import SEEDS, pick, tune

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("own_cache")]

# --------------------------------------------------------------------------------------------------
# What it finds


def test_tries_everything_without_a_budget_and_finds_the_best(own_cache: Path) -> None:
    replay = Replay()
    record = run(replay)
    assert replay.fastest == record.config
    assert sorted(replay.space) == sorted(replay.measured)
    assert record.trials == len(TABLE)
    assert record.measurement == timed(382.28, replay.spread)
    assert stored(own_cache) == record


def test_finds_the_best_from_the_worst_ranking_in_half_the_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worst_first = sorted(Replay().space, key=slowness, reverse=True)
    regrets: list[float] = []
    for seed in range(8):
        monkeypatch.setattr(tune_module, "SAMPLER_SEED", seed)
        monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / str(seed)))
        replay = Replay()
        record = run(replay, trials=len(TABLE) // 2, candidates=ranking(worst_first))
        regrets.append(slowness(record.config) / slowness(replay.fastest) - 1)
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
    record = run(replay, trials=trials)
    assert trials == len(replay.measured) == len(set(replay.measured))
    assert trials == record.trials


def test_record_says_how_it_is_known(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "versions_for", lambda _: VERSIONS)
    replay = Replay(SMALL)
    record = run(replay, trials=8, seconds=60.0)
    assert (record.gpu, record.arch, record.kernel, record.problem) == (
        "h200",
        "sm_90",
        "fwd",
        PROBLEM,
    )
    assert record.versions == VERSIONS
    assert re.fullmatch(r"[0-9a-f]{12,}", record.template_digest)
    assert record.estimate is not None
    rank = replay.space.index(record.config)
    assert record.estimate.seconds == pytest.approx((300 + rank) * 1e-6)
    assert (record.estimate.limit, record.estimate.read_bytes) == ("tensor", 1000)
    assert record.command == f"tilegen tune '{PROBLEM}' --kernel fwd --trials 8 --seconds 60"
    hit = look_up(
        TASK,
        versions=VERSIONS,
        template_digest=record.template_digest,
    )
    assert hit is not None
    assert (hit.record, hit.origin, hit.differences) == (record, "own", ())


def test_a_ragged_problem_is_tuned_as_its_bucket(own_cache: Path) -> None:
    replay = Replay(SMALL)
    ragged = AttentionProblem.parse("b3 hq32 hkv8 q61 kv33 d128 bf16 causal")
    record = tune(
        KernelTask.of("fwd", ragged, H200),
        measure=replay,
        candidates=ranking(replay.space),
        space=[],
        progress=False,
    )
    assert record.problem == PROBLEM
    assert look_up(TASK) is not None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"trials": 0}, "trials must be at least 1, got 0"),
        ({"seconds": 0.0}, "seconds must be above 0, got 0.0"),
        ({"seconds": float("nan")}, "seconds must be above 0, got nan"),
    ],
    ids=["no trials", "no seconds", "nan"],
)
def test_invalid_budgets(options: dict[str, Any], message: str) -> None:
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


@pytest.mark.slow
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
# What it says


def test_one_line_for_each_trial_and_a_last_one_to_paste(caplog: pytest.LogCaptureFixture) -> None:
    replay = Replay()
    record = run(replay, trials=30)
    lines = caplog.messages
    trial = re.compile(
        r"\[ +\d+\.\ds\] \d+/30 fwd "
        r"TileConfig\(block_m=\d+, block_n=\d+, num_warps=\d, num_stages=\d\)"
        r"(  [\d.]+ [mu]s  predicted [\d.]+ [mu]s  best [\d.]+ [mu]s"
        r"| (out of resources|launch failed): .+)"
    )
    assert all(trial.fullmatch(line) for line in lines[:30]), lines[:30]
    assert len(lines) == 32
    assert lines[30].endswith("written: there was no record")
    assert eval(lines[-1], {"TileConfig": TileConfig}) == record.config
    assert lines[-1].endswith(f"# 382 us, fwd, h200, {PROBLEM}")


def test_a_later_run_reports_its_start(caplog: pytest.LogCaptureFixture) -> None:
    run(Replay(SMALL), trials=4)
    caplog.clear()
    run(Replay(SMALL), trials=5)
    assert re.fullmatch(r"4 trials of earlier runs, 4 timed, best \d+ us", caplog.messages[0])
    assert "] 5/5 fwd " in caplog.messages[1]


def test_on_a_terminal_the_lines_go_above_a_bar(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    record = run(Replay(SMALL), progress=True)
    shown = capsys.readouterr().err
    assert "tuning fwd" in shown
    assert "8/8" in shown
    assert f"{record.config!r}  # " in shown
    assert "[  0." in shown
    assert caplog.messages == [], "said once, not twice"


def test_terminal_output_is_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
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
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tune_module, "versions_for", lambda _: VERSIONS)
    elsewhere = record(us=100.0, template_digest=template_digest("fwd"))
    save(elsewhere)
    winner = run(Replay())
    assert winner.measurement.median_us == 382.28
    assert stored(own_cache) == replace(elsewhere, rivals=(winner,))
    assert (
        "not won: the existing record stays: faster (100 us, the other 382 us)"
        in caplog.messages[-2]
    )


def test_own_record_follows_the_ties_that_more_trials_bring(own_cache: Path) -> None:
    first = Replay({"m128n64w8s3": 100.0}, spread=0.015)
    run(first)
    assert stored(own_cache).config == TileConfig.parse("m128n64w8s3")
    record = run(Replay({"m128n64w8s3": 100.0, "m64n64w8s3": 101.0}, spread=0.015))
    assert record.config == TileConfig.parse("m64n64w8s3")
    assert stored(own_cache) == record


# --------------------------------------------------------------------------------------------------
# The machine


@pytest.mark.parametrize("here", [None, "a100"])
def test_without_that_gpu_it_says_so_and_leaves_nothing(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, here: str | None
) -> None:
    from tilegen.gpus import spec

    monkeypatch.setattr(spec, "detect", lambda: here and spec.gpu(here))
    actual = "found a100 (sm_80)" if here else "found no GPU"
    with pytest.raises(Unsupported, match=re.escape(f"needs that GPU at hand, {actual}; ")):
        tune(TASK)
    assert not own_cache.exists()
