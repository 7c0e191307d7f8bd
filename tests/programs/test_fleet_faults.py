"""Faults of a fleet: a worker told to end, a broken GPU, forged results."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.fleet_workers import JOB, Machine
from tests.records import PROBLEM
from tilegen.build import workers
from tilegen.cli import fleet
from tilegen.cli.main import app
from tilegen.fleet import bench, storage, worker
from tilegen.fleet.queue import RESULT, Queue
from tilegen.fleet.status import progress
from tilegen.fleet.worker import Worker
from tilegen.kernels.config import TileConfig
from tilegen.measure import DeviceLost, Measurement
from tilegen.store.trials import Trial, trial_line


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "own"))
    return storage.open_storage(f"journal:{tmp_path}/trials.journal")


@pytest.fixture
def _terminated_as_interrupted() -> Iterator[None]:
    """Take SIGTERM as `tilegen worker` does, and SIGINT although a shell may have it ignored, as
    for what runs in the background."""
    both = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(one, signal.default_int_handler) for one in both]
    yield
    for one, handler in zip(both, before, strict=True):
        signal.signal(one, handler)


@pytest.mark.usefixtures("_terminated_as_interrupted")
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_is_asked_to_end_puts_back_what_it_has_claimed(
    opened: Any, tmp_path: Path, stop: signal.Signals
) -> None:
    class Stopped(Machine):
        def _measure(self, config: TileConfig) -> Measurement:
            if self._replay.measured:
                os.kill(os.getpid(), stop)
            return super()._measure(config)

    with pytest.raises(KeyboardInterrupt):
        Worker(opened, Stopped(tmp_path), trials=4).run([JOB])
    (study,) = progress(opened)
    assert (study.finished, study.waiting, study.running) == (1, 3, 0)


def test_a_worker_whose_gpu_is_lost_starts_itself_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Restarted(Exception):
        """What the process would be replaced by."""

    def run(*_: Any) -> Any:
        raise DeviceLost(Measurement(status="launch_failed", message="illegal address"))

    def execv(*arguments: Any) -> Any:
        raise Restarted(arguments)

    machine = Machine(tmp_path)
    machine.jobs = lambda *_: [JOB]  # type: ignore[attr-defined]
    machine.gpus = ["h200"]  # type: ignore[attr-defined]
    monkeypatch.setattr(bench, "ReplayMachine", lambda _: machine)
    monkeypatch.setattr(worker.Worker, "run", run)
    monkeypatch.setattr(workers, "Pool", lambda: closing(SimpleNamespace(close=lambda: None)))
    monkeypatch.setattr(fleet.os, "execv", execv)
    url = f"journal:{tmp_path}/trials.journal"
    before = signal.getsignal(signal.SIGTERM)
    command = ["worker", "--storage", url, "--catalog", PROBLEM.key, "--replay", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    signal.signal(signal.SIGTERM, before)
    assert isinstance(result.exception, Restarted), result.output
    program, arguments = result.exception.args[0]
    assert (program, arguments) == (sys.executable, [sys.executable, *sys.orig_argv[1:]])


FORGED: dict[str, Any] = {
    "faster than any GPU": {"median_us": 0.002, "p20_us": 0.002, "p80_us": 0.002},
    "no number": {"median_us": "fast"},
    "no JSON": None,
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_results_win_nothing(opened: Any, tmp_path: Path, name: str) -> None:
    machine = Machine(tmp_path)
    publisher = Worker(opened, machine, trials=4)
    few = publisher._plan(JOB)[0]
    queue = Queue(opened, JOB.study, JOB.attributes)
    assert queue.ready(few)
    claim = queue.claim()
    assert claim is not None
    honest = Machine(tmp_path)._measure(claim.config)
    said = trial_line(Trial(config=claim.config, measurement=honest), JOB.conditions)
    forged = FORGED[name]
    if forged is not None:
        said["measurement"] = {**said["measurement"], **forged}
    claim.trial.set_user_attr(RESULT, "{torn" if forged is None else json.dumps(said))
    queue._study.tell(claim.trial, 0.002)
    record = publisher.run([JOB])[JOB]
    assert record is not None
    times = {config: machine._replay.timings[config].median_us for config in few}
    assert record.measurement.median_us == times[record.config]
    assert sorted(machine._replay.measured) == sorted(few), "the forged one is measured again"
