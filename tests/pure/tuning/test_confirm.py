"""Confirmation of winners of other machines, on functions whose times are known."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tilegen
from tests.support.problems import used
from tests.support.records import H200, PROBLEM, TASK, own, place, record, timed
from tilegen.cli.main import app
from tilegen.emit.identity import template_digest
from tilegen.errors import BuildFailed, InvalidRecord, NoRecord
from tilegen.kernels.config import TileConfig
from tilegen.store import TuningRecord, current_versions, look_up, this_machine
from tilegen.tuning import confirming
from tilegen.tuning.bench import Bench
from tilegen.tuning.confirming import PAIRS, confirm
from tilegen.tuning.measure import Measurement

THEIRS, OWN = TileConfig.parse("m128n64w8s3"), TileConfig.parse("m64n64w4s2")
FAILED = Measurement(status="launch_failed", message="an illegal memory access")


class Machine:
    """Measures configs, each with times in turn; remembers what was measured."""

    def __init__(self, **times: float | list[float] | Measurement) -> None:
        self.times = {
            TileConfig.parse(key): itertools.cycle(us if isinstance(us, list) else [us])
            for key, us in times.items()
        }
        self.measured: list[TileConfig] = []

    def __call__(self, config: TileConfig) -> Measurement:
        self.measured.append(config)
        us = next(self.times[config])
        return us if isinstance(us, Measurement) else timed(us, 0.001)

    def bench(self, **options: Any) -> Bench:
        return Bench(measure=self, **{"in_hand": OWN, **options})


@pytest.fixture
def theirs(own_cache: Path) -> TuningRecord:
    """Return a winner of another machine, which the own store holds."""
    finding = found(THEIRS, 300.0, "aa")
    place(own_cache, finding)
    return finding


def found(config: TileConfig, us: float, source: str, **changes: Any) -> TuningRecord:
    """Return a finding under the present conditions."""
    return record(
        config=config,
        us=us,
        source=source,
        versions=current_versions(),
        template_digest=template_digest("fwd"),
        **changes,
    )


def findings(cache: Path) -> dict[str, TuningRecord]:
    stored = TuningRecord.from_json((cache / TASK_PATH).read_text())
    return {finding.source: finding for finding in stored.findings}


TASK_PATH = record().path

CASES: dict[str, tuple[Machine, str, float]] = {
    "theirs is faster": (Machine(m128n64w8s3=310.0, m64n64w4s2=400.0), "m128n64w8s3", 310.0),
    "own is faster": (Machine(m128n64w8s3=310.0, m64n64w4s2=200.0), "m64n64w4s2", 200.0),
    "a tie": (Machine(m128n64w8s3=310.0, m64n64w4s2=309.0), "m128n64w8s3", 310.0),
    "own is faster in three of five pairs": (
        Machine(m128n64w8s3=310.0, m64n64w4s2=[200.0, 400.0, 200.0, 400.0, 200.0]),
        "m128n64w8s3",
        310.0,
    ),
    "theirs does not run": (Machine(m128n64w8s3=FAILED, m64n64w4s2=400.0), "m64n64w4s2", 400.0),
    "theirs does not always run": (
        Machine(m128n64w8s3=[300.0, 300.0, FAILED], m64n64w4s2=400.0),
        "m64n64w4s2",
        400.0,
    ),
    "own does not run": (Machine(m128n64w8s3=310.0, m64n64w4s2=FAILED), "m128n64w8s3", 310.0),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_recorded(own_cache: Path, theirs: TuningRecord, name: str) -> None:
    machine, expected, us = CASES[name]
    made = confirm(TASK, bench=machine.bench())
    assert made is not None
    assert made.config.key == expected
    assert machine.measured[:4] == [THEIRS, OWN, OWN, THEIRS], "in turns, with either first"
    assert len(machine.measured) == 2 * PAIRS
    stored = findings(own_cache)
    assert stored == {"aa": theirs, this_machine(): made}
    assert made.trials == 2
    assert made.command == f"tilegen tune '{PROBLEM}' --kernel fwd --confirm"
    assert made.measurement.median_us == us
    (file,) = (own_cache / "trials").rglob("*.jsonl")
    trials = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(one["config"]["block_m"], one["source"]) for one in trials} == {
        (128, this_machine()),
        (64, this_machine()),
    }


def test_the_median_measurement_of_a_config_is_recorded(
    own_cache: Path, theirs: TuningRecord
) -> None:
    machine = Machine(m128n64w8s3=[350.0, 310.0, 330.0, 320.0, 900.0], m64n64w4s2=1000.0)
    made = confirm(TASK, bench=machine.bench())
    assert made is not None
    assert made.measurement == timed(330.0, 0.001)


def test_earlier_trials_do_not_count(own_cache: Path, theirs: TuningRecord) -> None:
    for us in (310.0, 320.0):
        made = confirm(TASK, bench=Machine(m128n64w8s3=us, m64n64w4s2=400.0).bench())
        assert made is not None
        assert made.measurement.median_us == us


def test_the_own_choice_is_the_config_of_the_own_finding(
    own_cache: Path, theirs: TuningRecord
) -> None:
    other = TileConfig.parse("m128n128w8s2")
    mine = found(other, 400.0, this_machine())
    place(own_cache, replace(theirs, rivals=(mine,)))
    machine = Machine(m128n64w8s3=310.0, m128n128w8s2=200.0)
    made = confirm(TASK, bench=machine.bench())
    assert made is not None
    assert made.config == other
    assert made.date > mine.date, "it takes the place of the earlier finding"
    assert findings(own_cache) == {"aa": theirs, this_machine(): made}


def test_without_an_own_finding_the_choice_is_the_models(
    own_cache: Path, theirs: TuningRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chosen:
        config = OWN

    monkeypatch.setattr(confirming, "choose_by_model", lambda task: Chosen)
    machine = Machine(m128n64w8s3=310.0, m64n64w4s2=400.0)
    assert confirm(TASK, bench=machine.bench(in_hand=None)) is not None
    assert set(machine.measured) == {THEIRS, OWN}


def test_where_both_chose_one_config_it_is_measured(own_cache: Path, theirs: TuningRecord) -> None:
    machine = Machine(m128n64w8s3=310.0)
    made = confirm(TASK, bench=machine.bench(in_hand=THEIRS))
    assert made is not None
    assert (made.config, made.source, made.trials) == (THEIRS, this_machine(), 1)
    assert set(machine.measured) == {THEIRS}


def test_a_winner_with_wrong_results_is_not_confirmed(
    own_cache: Path, theirs: TuningRecord
) -> None:
    wrong = Measurement(status="wrong", message="out[0] is off")
    machine = Machine(m128n64w8s3=310.0, m64n64w4s2=400.0)
    bench = machine.bench(check=lambda config: wrong if config == THEIRS else None)
    made = confirm(TASK, bench=bench)
    assert made is not None
    assert made.config == OWN


def test_a_winner_that_does_not_compile_here_is_not_measured(
    own_cache: Path, theirs: TuningRecord
) -> None:
    def compile_all(configs: Iterable[TileConfig]) -> Iterator[tuple[TileConfig, Any]]:
        for config in configs:
            yield config, BuildFailed("no") if config == THEIRS else used(registers=64)

    machine = Machine(m64n64w4s2=400.0)
    made = confirm(TASK, bench=machine.bench(compile=compile_all))
    assert made is not None
    assert made.config == OWN
    assert set(machine.measured) == {OWN}


def test_a_winner_of_this_machine_needs_no_confirmation(own_cache: Path) -> None:
    place(own_cache, found(THEIRS, 300.0, this_machine()))
    machine = Machine()
    assert confirm(TASK, bench=machine.bench()) is None
    assert machine.measured == []


def test_a_winner_of_a_shared_location_behind_the_own_finding(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls use the own record, which comes first; a faster one is elsewhere."""
    place(own_cache, found(OWN, 400.0, this_machine()))
    place(tmp_path / "shared", found(THEIRS, 300.0, "aa"))
    monkeypatch.setenv("TILEGEN_CACHE_PATH", str(tmp_path / "shared"))
    machine = Machine(m128n64w8s3=310.0, m64n64w4s2=400.0)
    made = confirm(TASK, bench=machine.bench(in_hand=None))
    assert made is not None
    assert made.config == THEIRS
    assert findings(own_cache) == {this_machine(): made}


def test_a_winner_of_another_gpu_model(own_cache: Path) -> None:
    place(own_cache, found(THEIRS, 300.0, this_machine(), gpu="h100"))
    machine = Machine(m128n64w8s3=310.0, m64n64w4s2=400.0)
    made = confirm(TASK, bench=machine.bench())
    assert made is not None
    assert (made.gpu, made.config) == (H200.name, THEIRS)
    assert set(machine.measured) == {THEIRS, OWN}, "a choice for another GPU is not the own one"
    entry = look_up(TASK, where=[own(own_cache)], borrow=False)
    assert entry is not None
    assert entry.record == made


@pytest.mark.usefixtures("own_cache")
def test_without_a_record_there_is_nothing_to_confirm() -> None:
    with pytest.raises(NoRecord, match="to confirm, found none; make one: tilegen tune 'b4 hq32"):
        confirm(TASK, bench=Machine().bench())


def test_an_impossible_time_is_not_recorded(own_cache: Path, theirs: TuningRecord) -> None:
    machine = Machine(m128n64w8s3=0.002, m64n64w4s2=0.003)
    with pytest.raises(InvalidRecord, match="median_us must be at least"):
        confirm(TASK, bench=machine.bench())
    assert findings(own_cache) == {"aa": theirs}


def test_the_command_confirms(
    own_cache: Path, theirs: TuningRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda: H200)
    machine = Machine(m128n64w8s3=310.0, m64n64w4s2=400.0)
    monkeypatch.setattr(confirming, "real_bench", lambda *_: machine.bench())
    (made,) = tilegen.tune(str(PROBLEM), kernel="fwd", confirm=True)
    assert (made.config, made.source) == (THEIRS, this_machine())
    asked = ["tune", str(PROBLEM), "--kernel", "fwd", "--confirm", "--json"]
    result = CliRunner().invoke(app, asked, catch_exceptions=False)
    (told,) = json.loads(result.stdout)
    assert told["source"] == this_machine()
    place(own_cache, found(OWN, 200.0, this_machine()))
    result = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert json.loads(result.stdout) == []


REFUSED: dict[str, Callable[[], list[str]]] = {
    "a budget": lambda: ["--seconds", "3"],
    "trials": lambda: ["--trials", "3"],
    "a plan": lambda: ["--dry-run"],
    "a replay": lambda: ["--replay", "benchmarks/example"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_confirmation_has_no_other_option(name: str) -> None:
    result = CliRunner().invoke(app, ["tune", str(PROBLEM), "--confirm", *REFUSED[name]()])
    assert "--confirm goes with a problem, --kernel and --json alone" in str(result.exception)
