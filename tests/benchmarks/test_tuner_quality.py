"""Recordings of every config, how they are taken, and what is concluded from them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import exhaustive, tuner_quality
from benchmarks.ranking import spearman
from benchmarks.recordings import Recorder, Recording, Session, file_of, new_session, read
from benchmarks.rows import read as read_rows
from benchmarks.tuner_quality import BUDGETS, order, quantile, regrets
from tests.support.problems import used
from tests.support.records import H200, timed
from tilegen.choose.ranker import estimate, search_space
from tilegen.errors import BuildFailed, InvalidRecord
from tilegen.kernels.config import TileConfig
from tilegen.model.resources import Resources
from tilegen.problem import AttentionProblem
from tilegen.store.trials import Trial
from tilegen.task import KernelTask, Tiled
from tilegen.tuning.bench import Bench
from tilegen.tuning.measure import DeviceLost, Measurement
from tilegen.tuning.tuner import SEEDS

SMALL = AttentionProblem.parse("hq2 q64 kv64 d64 bf16 causal")
FIRST, SECOND, THIRD, FOURTH = (
    TileConfig.parse(key) for key in ("m16n16w4s1", "m16n32w4s1", "m32n32w4s2", "m64n64w4s3")
)
SPACE = [FIRST, SECOND, THIRD, FOURTH]
BROKEN = Measurement(status="launch_failed", message="no such luck")


class Machine:
    """A bench of configs that take 100, 200, 300 and 400 us."""

    def __init__(self, **answers: object) -> None:
        """`answers` replaces measurements by config key; an exception is raised by the launch."""
        self.answers = answers
        self.measured: list[TileConfig] = []

    def compile(
        self, configs: Sequence[TileConfig]
    ) -> Iterator[tuple[TileConfig, Resources | BuildFailed]]:
        for config in configs:
            answer = self.answers.get(config.key)
            yield config, answer if isinstance(answer, Resources | BuildFailed) else used()

    def measure(self, config: TileConfig) -> Measurement:
        answer = self.answers.get(config.key)
        if isinstance(answer, BaseException):
            raise answer
        self.measured.append(config)
        return (
            answer if isinstance(answer, Measurement) else timed(100.0 + 100 * SPACE.index(config))
        )

    @property
    def bench(self) -> Bench:
        return Bench(measure=self.measure, compile=self.compile)


def session(**changes: object) -> Session:
    return replace(new_session(H200, "fwd", SMALL, len(SPACE)), **changes)


def record(path: Path, machine: Machine, *, seconds: float = 60.0, **changes: object) -> int:
    recorder = Recorder(path, session(**changes))
    deadline = time.monotonic() + seconds
    return exhaustive.record(recorder, SPACE, H200, machine.bench, deadline=deadline)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return file_of(tmp_path, "fwd", SMALL)


# --------------------------------------------------------------------------------------------------
# Recording


def test_everything_is_timed_and_reads_back(path: Path) -> None:
    assert record(path, Machine()) == 0
    rows = read(path)
    assert rows.session == session()
    assert rows.times() == {config: 100.0 + 100 * i for i, config in enumerate(SPACE)}
    assert path.name == f"{SMALL.key.replace(' ', '_')}.jsonl"


def test_failures_are_values(path: Path) -> None:
    machine = Machine(
        m16n16w4s1=BuildFailed("no layout"), m16n32w4s1=BROKEN, m32n32w4s2=used(shared_bytes=10**6)
    )
    record(path, machine)
    status = {c: trial.measurement.status for c, trial in read(path).trials.items()}
    assert [status[config] for config in SPACE] == [
        "build_failed",
        "launch_failed",
        "out_of_resources",
        "ok",
    ]


def test_kernels_that_spill_much_are_timed_but_not_for_the_tuner(path: Path) -> None:
    record(path, Machine(m16n16w4s1=used(spill_bytes=136)))
    rows = read(path)
    assert rows.trials[FIRST].measurement.median_us == 100.0
    assert rows.trials[FIRST].spill_bytes == 136
    assert rows.as_tuned()[FIRST].status == "declined"
    assert FIRST not in rows.times()


def test_an_interrupted_recording_loses_nothing_and_goes_on(path: Path) -> None:
    order = Recorder(path, session()).todo(SPACE)
    first = Machine(**{order[2].key: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        record(path, first)
    assert first.measured == order[:2] == list(read(path).trials)
    with path.open("a") as file:
        file.write('{"config": "m16n1')  # killed while writing
    second = Machine()
    record(path, second)
    assert second.measured == order[2:]
    assert sorted(read(path).times()) == sorted(SPACE)
    third = Machine()
    assert record(path, third) == 0
    assert third.measured == []


def test_a_recording_killed_before_it_began_starts_anew(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text('{"recording": 1, "sour')
    assert record(path, Machine()) == 0
    assert len(read(path).times()) == len(SPACE)


def test_a_recording_under_other_conditions_starts_anew(path: Path) -> None:
    record(path, Machine())
    other = replace(session().environment, triton="99.0")
    order = Recorder(path, session(environment=other)).todo(SPACE)
    machine = Machine(**{order[1].key: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        record(path, machine, environment=other)
    assert read(path).session.environment.triton == "99.0"
    assert list(read(path).trials) == machine.measured == order[:1], "the others are stale"
    machine = Machine()
    record(path, machine, environment=other)
    assert machine.measured == order[1:]
    later = replace(session().environment, date="2031-01-01", command="again")
    again = Machine()
    record(path, again, environment=replace(later, triton="99.0"))
    assert again.measured == [], "neither date nor command change a timing"


def test_time_limit_is_kept(path: Path) -> None:
    machine = Machine()
    assert record(path, machine, seconds=-1.0) == len(SPACE)
    assert machine.measured == []


def test_failed_launches_are_retried_unless_they_broke_the_device(path: Path) -> None:
    order = Recorder(path, session()).todo(SPACE)
    machine = Machine(**{order[0].key: BROKEN, order[1].key: DeviceLost(BROKEN)})
    with pytest.raises(DeviceLost):
        record(path, machine)
    again = Machine()
    record(path, again)
    assert again.measured == [order[0], *order[2:]]


def test_the_fastest_is_wrong_if_the_check_says_so(path: Path) -> None:
    machine = Machine()
    wrong = Measurement(status="wrong", message="out error 3")
    bench = replace(machine.bench, check=lambda config: wrong if config == FIRST else None)
    recorder = Recorder(path, session())
    exhaustive.record(recorder, SPACE, H200, bench, deadline=time.monotonic() + 60)
    assert read(path).trials[FIRST].measurement == wrong
    assert min(read(path).times().values()) == 200.0


def test_a_file_that_is_no_recording_says_so(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"config": FIRST.key}))
    with pytest.raises(InvalidRecord, match=r"expected a recording in .* found no line that opens"):
        read(path)


def test_without_a_gpu_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda: None)
    result = call(exhaustive.main, "llama3-8b-8k", SMALL.key)
    assert result.exit_code == 1
    assert result.output == "no GPU that PyTorch can use: nothing to time\n"


def test_an_invalid_problem_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    result = call(exhaustive.main, "llama9")
    assert result.exit_code == 1
    assert result.output.startswith("expected a problem such as")
    assert result.output.count("\n") == 1


def test_problems_are_workloads_or_notation_and_become_their_bucket() -> None:
    actual = exhaustive.problems_of(["vit-l16-224", "b3 hq4 q100 d64 fp16 full"])
    assert [one.key for one in actual] == [
        "b64 hq16 hkv16 q256 kv256 d64 bf16 full",
        "b4 hq4 hkv4 q128 kv128 d64 fp16 full",
    ]


def call(main: Callable[..., None], *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, list(arguments))


# --------------------------------------------------------------------------------------------------
# Judging


@pytest.mark.parametrize(
    "numbers, other, expected",
    [
        ([1, 2, 3, 4], [10, 20, 30, 400], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 2, 3], [1, 2, 3, 4], 0.9486833),  # ties share a rank: 4.5 / sqrt(4.5 * 5)
        ([1, 2, 3], [2, 1, 3], 0.5),  # 1 - 6 * 2 / (3 * 8)
        ([5, 5, 5], [1, 2, 3], 0.0),
    ],
)
def test_spearman(numbers: list[float], other: list[float], expected: float) -> None:
    assert spearman(numbers, other) == pytest.approx(expected)


def test_quantiles_of_few_values_and_infinity() -> None:
    assert quantile([3.0, 1.0, 2.0, 5.0, 4.0], 0.5) == 3.0
    assert quantile([3.0, 1.0, 2.0, 5.0, 4.0], 0.2) == 1.0
    assert quantile([1.0, float("inf")], 0.8) == float("inf")
    assert quantile([7.0], 0.2) == quantile([7.0], 0.8) == 7.0


def test_regret_is_that_of_the_tuners_pick_after_each_budget() -> None:
    configs = [TileConfig.parse(f"m{m}n{n}w4s1") for m in (16, 32) for n in (16, 32, 64)]
    timings = dict(
        zip(configs, [BROKEN, *map(timed, (300.0, 150.0, 120.0, 400.0, 100.0))], strict=True)
    )
    results = dict(zip(BUDGETS, regrets(timings, configs), strict=True))
    assert results[1] == float("inf")  # has only failed so far
    assert results[3] == pytest.approx(0.5)
    assert results[5] == pytest.approx(0.2)
    assert results[10] == results[40] == 0.0


@pytest.fixture(scope="module")
def made_up() -> Recording:
    """A recording of times that the model is up to 20 % off from."""
    space = search_space(KernelTask.of("fwd", SMALL, H200))
    times = {
        config: 1e6 * estimate(Tiled.of("fwd", SMALL, H200, config)).seconds for config in space
    }
    trials = {
        config: Trial(config=config, measurement=timed(us * (1 + i % 3 / 10)))
        for i, (config, us) in enumerate(times.items())
    }
    made = replace(new_session(H200, "fwd", SMALL, len(space)), source="made up")
    return Recording(session=made, trials=trials)


@pytest.mark.slow
def test_strategies_measure_their_configs(made_up: Recording) -> None:
    ranked = tuner_quality.ranking(made_up)
    best_first = [candidate.config for candidate in ranked]
    results = {s: order(made_up, ranked, s, 0) for s in tuner_quality.STRATEGIES}
    for tried in results.values():
        assert len(tried) == len(set(tried)) == min(BUDGETS[-1], len(made_up.trials))
        assert set(tried) <= set(made_up.trials)
    assert results["model"] == best_first[: BUDGETS[-1]]
    assert results["prior"][:SEEDS] == best_first[:SEEDS]
    assert order(made_up, ranked[::-1], "no prior", 0) == results["no prior"]
    assert order(made_up, ranked[::-1], "random", 0) == results["random"]
    for strategy in ("prior", "no prior", "random"):
        assert order(made_up, ranked, strategy, 0) == results[strategy], "the same each time"
        assert order(made_up, ranked, strategy, 1) != results[strategy], "seeds differ"


@pytest.mark.slow
def test_a_model_that_knows_the_times_wins(made_up: Recording) -> None:
    rows = {(row.strategy, row.trials): row for row in tuner_quality.judge(made_up, seeds=1)}
    assert rows["model", 1].spearman > 0.8
    assert rows["model", 1].median <= 0.25 < rows["random", 1].median
    for strategy in tuner_quality.STRATEGIES:
        medians = [rows[strategy, budget].median for budget in BUDGETS]
        assert medians == sorted(medians, reverse=True)


def test_a_run_writes_rows_and_says_what_it_cannot_judge(path: Path, tmp_path: Path) -> None:
    record(path, Machine())
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}")
    out = tmp_path / "rows.csv"
    result = call(tuner_quality.main, str(path), str(broken), "--seeds", "1", "--out", str(out))
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith(f"{broken}: expected a recording")
    assert lines[1].startswith("measured on h200: 1 recordings, median Spearman")
    rows = read_rows(out)
    assert [row["strategy"] for row in rows[:: len(BUDGETS)]] == list(tuner_quality.STRATEGIES)
    assert rows[0]["recorded_on"] == "h200"
    assert [row["trials"] for row in rows[: len(BUDGETS)]] == [str(one) for one in BUDGETS]
    assert rows[len(BUDGETS) - 1]["median"] == "0.0"


def test_trials_survive_json(path: Path) -> None:
    recorder = Recorder(path, session())
    recorder.append(trial := Trial(config=FOURTH, measurement=BROKEN, seconds=1.5, spill_bytes=4))
    assert asdict(read(path).trials[FOURTH]) == asdict(trial)
