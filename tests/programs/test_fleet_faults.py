"""Faults of a fleet: a worker told to end, a broken GPU, forged results."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.storages.journal import JournalFileBackend
from typer.testing import CliRunner

from benchmarks.recordings import Recorder, new_session
from tests import warm
from tests.fleet_workers import JOB, SPACE, Machine
from tests.records import PROBLEM
from tests.replay import Replay
from tilegen.cli import fleet
from tilegen.cli.main import app
from tilegen.compiling import workers
from tilegen.fleet import bench, storage, worker
from tilegen.fleet.queue import RESULT, Queue
from tilegen.fleet.status import progress
from tilegen.fleet.worker import Worker
from tilegen.kernels.config import TileConfig
from tilegen.store.trials import Trial, trial_line
from tilegen.tuning.measure import DeviceLost, Measurement


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "own"))
    return storage.open_storage(f"journal:{tmp_path}/trials.journal")


@pytest.fixture
def _terminated_as_interrupted() -> Iterator[None]:
    """Take SIGTERM as `tilegen worker` does, and SIGINT although a shell may have it ignored, as
    for what runs in the background."""
    both = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(item, signal.default_int_handler) for item in both]
    yield
    for item, handler in zip(both, before, strict=True):
        signal.signal(item, handler)


@pytest.mark.usefixtures("_terminated_as_interrupted")
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_terminated_worker_releases_its_claims(
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


@pytest.mark.usefixtures("_terminated_as_interrupted")
@pytest.mark.parametrize("fault", ["away", "hanging"])
def test_a_terminated_worker_does_not_wait_for_its_storage(
    fault: str,
    opened: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(worker, "GIVE_BACK_SECONDS", 0.5)
    let_go = threading.Event()

    def append_logs(*_: Any) -> None:
        if fault == "hanging":
            let_go.wait()
        raise OSError(errno.EIO, "the server is gone")

    class Stopped(Machine):
        def _measure(self, config: TileConfig) -> Measurement:
            monkeypatch.setattr(JournalFileBackend, "append_logs", append_logs)
            os.kill(os.getpid(), signal.SIGINT)
            return super()._measure(config)

    with caplog.at_level(logging.INFO, "tilegen"), pytest.raises(KeyboardInterrupt):
        Worker(opened, Stopped(tmp_path), trials=4).run([JOB])
    let_go.set()
    assert "giving back 1 claim, for at most 0.5 s" in caplog.messages
    assert (
        "1 of 1 claim could not be given back; other workers take over after 60 s of silence"
        in (caplog.messages)
    )


@pytest.mark.parametrize(
    "form, limit, reason",
    [
        ("journal:{}", 2000, "trials': File too large; raise the limit"),
        ("sqlite:///{}", 20000, "the database cannot grow (disk I/O error)"),
    ],
)
def test_a_worker_whose_storage_takes_no_more_ends_with_the_reason(
    form: str, limit: int, reason: str, tmp_path: Path
) -> None:
    """The limit of a file's size stands for a full disk, which no right is needed for."""
    recorder = Recorder(tmp_path / "one.jsonl", new_session(JOB.gpu, "fwd", PROBLEM, 8))
    for config in SPACE[:8]:
        recorder.append(Trial(config=config, measurement=Replay().timings[config]))
    command = ["tilegen", "worker", "--storage", form.format(tmp_path / "trials")]
    command += ["--catalog", PROBLEM.key, "--replay", str(tmp_path)]
    process = warm.start(
        "import resource, sys\nfrom tilegen.cli.main import main\n"
        "sys.dont_write_bytecode = True\n"  # else modules are kept, cut off at the limit
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        f"sys.argv = {command!r}\nmain()",
        env={**os.environ, "TILEGEN_CACHE_DIR": str(tmp_path / "own")},
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert reason in err
    assert "trying again" not in err


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_worker_that_cannot_save_its_winner_fails(
    is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path / "one.jsonl", new_session(JOB.gpu, "fwd", PROBLEM, 4))
    for config in SPACE[:4]:
        recorder.append(Trial(config=config, measurement=Replay().timings[config]))
    (tmp_path / "file").write_text("no folder")
    url = f"journal:{tmp_path}/trials.journal"
    command = ["worker", "--storage", url, "--catalog", PROBLEM.key, "--replay", str(tmp_path)]
    command += ["--store", str(tmp_path / "file")] if is_shared else []
    own = tmp_path / ("own" if is_shared else "file")
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(own))
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "4 configs measured, 0 winners published here" in result.stdout
    told = str(result.exception)
    assert told.startswith("1 winner measured, not saved, first fwd ")
    assert f"cannot write '{tmp_path}/file" in told


def test_a_worker_whose_gpu_is_lost_starts_itself_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Restarted(Exception):
        """The command that would replace the process."""

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
