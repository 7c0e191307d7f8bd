"""The parts of a fleet: queue, workers, replay, command line."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.recordings import Recorder, new_session
from tests.clock import Clock
from tests.fleet_workers import JOB, SPACE, Machine
from tests.records import H200, PROBLEM
from tests.replay import Replay
from tilegen import api
from tilegen.cli import fleet
from tilegen.cli.main import app
from tilegen.errors import Unsupported
from tilegen.fleet.bench import ReplayMachine
from tilegen.fleet.jobs import Job
from tilegen.fleet.queue import Claim, Queue
from tilegen.fleet.status import progress
from tilegen.fleet.storage import open_storage
from tilegen.fleet.worker import Worker
from tilegen.kernels.config import TileConfig
from tilegen.store import Location, TuningRecord
from tilegen.store.record import record_path
from tilegen.store.transfer import put
from tilegen.store.trials import Trial
from tilegen.tuning.bench import Bench
from tilegen.tuning.measure import DeviceLost, Measurement

FEW = SPACE[:4]
STALE = 0.4


def queue(storage: Any, **options: Any) -> Queue:
    return Queue(storage, JOB.study, JOB.attributes, stale_seconds=STALE, **options)


def taken(queue: Queue) -> Claim:
    claim = queue.claim()
    assert claim is not None
    return claim


def finish(queue: Queue, claim: Claim, us: float = 5.0) -> bool:
    measurement = Measurement(status="ok", median_us=us, p20_us=us, p80_us=us, repeats=9)
    trial = Trial(config=claim.config, measurement=measurement)
    return queue.finish(claim, trial, JOB.conditions)


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of one test are not known in another."""
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "own"))


@pytest.fixture(params=["journal:{}/trials.journal", "sqlite:///{}/trials.db"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return open_storage(request.param.format(tmp_path))


def test_configs_are_claimed_in_order_and_once(storage: Any) -> None:
    mine = queue(storage)
    assert mine.ready(FEW)
    others = queue(storage)
    assert others.ready([])
    claims = [taken(one) for one in (mine, others, mine, others)]
    assert [claim.config for claim in claims] == FEW
    assert mine.claim() is None
    assert all(finish(mine, claim) for claim in claims)
    assert mine.results(FEW) is not None


def test_only_who_made_the_study_fills_it_unless_he_died_of_it(storage: Any) -> None:
    queue(storage)  # dies before it fills
    mine = queue(storage)
    assert not mine.ready(FEW)
    time.sleep(1.2 * STALE)
    assert mine.ready(FEW)
    assert taken(mine).config == FEW[0]


def test_a_config_enqueued_twice_is_measured_once(storage: Any) -> None:
    mine = queue(storage)
    mine.ready(FEW)
    mine._put(FEW[0].key)
    claims = [taken(mine) for _ in FEW]
    assert mine.claim() is None
    assert [claim.config for claim in claims] == FEW


def test_a_claim_without_a_beat_goes_back(storage: Any) -> None:
    mine, dead = queue(storage), queue(storage)
    mine.ready(FEW[:2])
    lost, alive = taken(dead), taken(dead)
    for count in range(6):
        mine.reap(FEW[:2])
        time.sleep(STALE / 4)
        alive.beat(count + 1)
    again = taken(mine)
    assert again.config == lost.config == FEW[0]
    assert mine.claim() is None, "the other one is alive"
    assert not finish(dead, lost, 1.0), "too late"
    assert finish(mine, again, 2.0)
    assert finish(dead, alive)
    results = mine.results(FEW[:2])
    assert results is not None
    assert results[FEW[0]]["measurement"]["median_us"] == 2.0


def test_time_without_the_storage_is_no_silence(storage: Any) -> None:
    mine, other = queue(storage), queue(storage)
    mine.ready(FEW)
    taken(other)
    mine.reap(FEW)
    time.sleep(1.2 * STALE)
    storage.failed_at = time.monotonic()
    mine.reap(FEW)
    assert [claim.config for claim in (taken(mine), taken(mine), taken(mine))] == FEW[1:]
    assert mine.claim() is None


def test_a_config_lost_on_the_way_back_is_found(storage: Any) -> None:
    mine = queue(storage)
    mine.ready(FEW[:1])
    assert finish(mine, taken(mine))
    mine.reap(FEW[:2])  # as if who failed it had died before putting it back
    assert taken(mine).config == FEW[1]


def test_results_from_elsewhere_are_not_found_again(storage: Any) -> None:
    queue_a = queue(storage)
    queue_a.ready(FEW[:1])
    finish(queue_a, taken(queue_a))
    results = queue_a.results(FEW[:1])
    assert results is not None
    other = Queue(storage, "another", {}, stale_seconds=STALE)
    other.ready(FEW, results.values)
    assert taken(other).config == FEW[1]


# --------------------------------------------------------------------------------------------------
# Workers


def worker(storage: Any, machine: Any) -> Worker:
    return Worker(storage, machine, trials=4, stale_seconds=STALE)


def test_claims_are_released_when_a_worker_fails(storage: Any, tmp_path: Path) -> None:
    class Lost(Machine):
        def _measure(self, config: TileConfig) -> Measurement:
            if self._replay.measured:
                raise DeviceLost(Measurement(status="launch_failed", message="illegal address"))
            return super()._measure(config)

        def bench(self, job: Job) -> Bench:
            return Bench(measure=self._measure, compile=lambda cs: ((c, Uses()) for c in cs))

    class Uses:
        shared_bytes = spill_bytes = 0
        registers = 255
        step_code = None

    with pytest.raises(DeviceLost):
        worker(storage, Lost(tmp_path)).run([JOB])
    (study,) = progress(storage)
    # One measured, one that broke the GPU, and both that were compiled ahead are free again.
    assert (study.finished, study.waiting, study.running, study.abandoned) == (2, 2, 0, 2)
    worker(storage, Machine(tmp_path)).run([JOB])
    assert progress(storage)[0].state == "published"


def test_a_job_that_cannot_be_done_is_passed_over(
    storage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Picky(Machine):
        def bench(self, job: Job) -> Bench:
            if job.problem != PROBLEM:
                raise Unsupported("no inputs for it")
            return super().bench(job)

    other = replace(JOB, problem=replace(PROBLEM, batch=1))
    with caplog.at_level(logging.WARNING, "tilegen"):
        published = worker(storage, Picky(tmp_path)).run([other, JOB])
    assert list(published) == [JOB]
    assert "no inputs for it" in caplog.text


def test_trials_of_tuning_alone_are_taken_over(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Machine(tmp_path), Machine(tmp_path)
    monkeypatch.setattr("tilegen.fleet.worker.this_machine", lambda: "aa")
    worker(open_storage(f"journal:{tmp_path}/other.journal"), first).run([JOB])
    monkeypatch.setattr("tilegen.fleet.worker.this_machine", lambda: "bb")
    record = worker(storage, second).run([JOB])[JOB]
    assert len(first._replay.measured) == 4
    assert second._replay.measured == []
    assert record is not None
    assert record.source == "aa", "the machine that measured, not the one that publishes"


def test_winners_are_published_to_a_shared_store_once_and_to_every_own_one(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Location(str(tmp_path / "shared"), "shared")

    def published(host: str, store: Location | None, **options: Any) -> bool:
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / host))
        worker = Worker(
            storage, Machine(tmp_path), trials=4, store=store, stale_seconds=STALE, **options
        )
        return JOB in worker.run([JOB])

    assert [published(host, shared) for host in "ab"] == [True, False]
    assert [published(host, None) for host in "abb"] == [True, True, False]
    assert published("b", None, again=True)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_winner_that_another_has_published_meanwhile_is_not_published_here(
    is_shared: bool, storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last two workers of a study see both that it is done and not yet published."""
    stored: list[TuningRecord] = []

    def put_once(record: TuningRecord, store: Location) -> Any:
        stored.append(record)
        return put(record, store)

    monkeypatch.setattr("tilegen.fleet.worker.put", put_once)
    store = Location(str(tmp_path / "shared"), "shared") if is_shared else None
    first, second = (Worker(storage, Machine(tmp_path), trials=4, store=store) for _ in "ab")
    publish = second._publish

    def late(job: Job) -> Any:
        assert first.run([JOB])[JOB] is not None
        return publish(job)

    second._publish = late
    assert second.run([JOB]) == {}
    assert len(stored) == is_shared


def test_a_winner_that_the_store_refuses_is_not_published(
    storage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = Location(str(tmp_path / "shared"), "shared")
    there = tmp_path / "shared" / record_path(JOB.gpu.name, JOB.kernel, JOB.problem)
    there.parent.mkdir(parents=True)
    there.write_text('{"schema": 99}')
    worker = Worker(storage, Machine(tmp_path), trials=4, store=shared)
    with caplog.at_level(logging.WARNING, "tilegen"):
        assert worker.run([JOB]) == {}
    assert "refused" in caplog.text
    assert progress(storage)[0].state == "done"
    there.unlink()
    assert JOB in worker.run([JOB])
    assert progress(storage)[0].state == "published"


# --------------------------------------------------------------------------------------------------
# Replay, and the command line


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    folder = tmp_path / "recordings"
    recorder = Recorder(folder / "one.jsonl", new_session(H200, "fwd", PROBLEM, len(FEW)))
    for config in FEW:
        recorder.append(Trial(config=config, measurement=Replay().timings[config], seconds=0.01))
    spilled = TileConfig(block_m=256, block_n=256, num_warps=4, num_stages=1)
    recorder.append(
        Trial(config=spilled, measurement=Replay().timings[FEW[0]], spill_bytes=136, seconds=0.01)
    )
    with (folder / "one.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"config": "m1')
    return folder


def test_a_replay_answers_as_recorded(recordings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = ReplayMachine(recordings)
    other = replace(PROBLEM, batch=1)
    with pytest.raises(Unsupported, match=f"expected recordings of '{other}' on h200, found those"):
        machine.jobs([other], "h200")
    (job,) = machine.jobs([PROBLEM, other], machine.gpus[0])
    assert (job.gpu, job.kernel, job.problem) == (H200, "fwd", PROBLEM)
    *space, spilled = machine.space(job)
    assert space == FEW
    measure = machine.bench(job).measure
    clock = Clock()
    clock.replaces_time_of("tilegen.fleet.bench", monkeypatch)
    assert [measure(config) for config in FEW] == [Replay().timings[config] for config in FEW]
    assert clock.now == pytest.approx(0.01 * len(FEW))
    assert measure(spilled).status == "declined"


def test_without_recordings_there_is_nothing_to_replay(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="found no"):
        ReplayMachine(tmp_path)
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="expected a recording"):
        ReplayMachine(tmp_path)


@pytest.mark.slow
def test_workers_by_one_command_and_their_status(
    recordings: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    catalogue = tmp_path / "models.txt"
    catalogue.write_text(f"{PROBLEM.key}\n")
    url = f"journal:{tmp_path}/trials.journal"
    common = ["--storage", url, "--catalog", str(catalogue)]
    command = ["worker", *common, "--replay", str(recordings), "--gpus", "2"]
    assert subprocess.call([sys.executable, "-m", "tilegen", *command]) == 0
    counts = [int(line.split()[0]) for line in capfd.readouterr().out.splitlines()]
    assert len(counts) == 2
    assert sum(counts) == len(FEW) + 1
    said = CliRunner().invoke(app, ["fleet", "status", *common, "--json"], catch_exceptions=False)
    results = {one["kernel"]: one for one in json.loads(said.stdout)}
    assert results["fwd"]["state"] == "published"
    assert (results["fwd"]["finished"], results["fwd"]["configs"]) == (5, 5)
    assert results["bwd_dq"]["state"] == "not begun"
    said = CliRunner().invoke(app, ["fleet", "status", *common], catch_exceptions=False)
    assert said.stdout.splitlines()[-1] == ("4 studies: 3 not begun, 1 published; 5 of 5 configs")


def test_workers_over_the_proxy(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="needs grpcio; pip install 'tilegen[dev]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    database = f"sqlite:///{tmp_path}/trials.db"
    command = ["fleet", "proxy", "--storage", database, "--host", "127.0.0.1", "--port", port]
    with subprocess.Popen([sys.executable, "-m", "tilegen", *command]) as proxy:
        try:
            over = open_storage(f"grpc://127.0.0.1:{port}")
            assert worker(over, Machine(tmp_path)).run([JOB])[JOB] is not None
            assert [one.state for one in progress(over)] == ["published"]
        finally:
            proxy.kill()
    assert [one.finished for one in progress(open_storage(database))] == [4]


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert fleet._devices("2", False) == ["0", "1"]
    assert fleet._devices("1,3", False) == ["1", "3"]
    assert fleet._devices("all", False) == ["0", "1", "2", "3"]
    assert fleet._devices("GPU-1a, MIG-2b", False) == ["GPU-1a", "MIG-2b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert fleet._devices("all", False) == ["4", "5"]
    assert fleet._devices("1", False) == ["4"]
    with pytest.raises(Unsupported, match=r"among the 2 that PyTorch can use \(4, 5\), got '0'"):
        fleet._devices("0", False)
    for wrong in ("1,,2", "-1", "some", "65", "1" * 5000, "²", "3,3"):
        with pytest.raises(Unsupported, match="--gpus must be"):
            fleet._devices(wrong, False)
    assert fleet._without_gpus(["a", "--gpus", "2", "b", "--gpus=3"]) == ["a", "b"]


def test_a_worker_is_started_for_gpus_that_are_here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)  # there is no sixth
    for wrong in ("3", "64", "4,6", "0,1"):
        with pytest.raises(Unsupported, match=r"among the 2 that PyTorch can use \(4, 5\), got"):
            fleet._devices(wrong, False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for wrong in ("all", "1"):
        with pytest.raises(Unsupported, match=r"among the 0 that PyTorch can use \(none\)"):
            fleet._devices(wrong, False)
    assert len(fleet._devices("9", True)) == 9


def test_a_worker_needs_a_gpu_or_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    import tilegen.gpus.spec

    monkeypatch.setattr(tilegen.gpus.spec, "detect", lambda: None)
    with pytest.raises(Unsupported, match="PyTorch sees none"):
        fleet._detected()
    with pytest.raises(Unsupported, match="PyTorch sees none"):
        api.tune(PROBLEM, kernel="fwd", storage="journal:/nowhere")
