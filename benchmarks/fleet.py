"""Wall time of a fleet of 8 workers against 1, and of many workers over the gRPC proxy.

    python -m benchmarks.fleet
    python -m benchmarks.fleet --storage postgresql://user@host/empty --crowd 1000

Workers are processes that replay made-up timings (benchmarks/synthetic.py) and sleep as long as a
trial would take; imports are done before the clock starts. The crowd are real clients of the proxy
and of its database, threads of a few processes on this same machine, that claim, sleep and finish;
what they do not do is measure, nor ask the model. So the latencies include those of many Python
threads that share the cores with the proxy and the database.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from unittest import mock

import typer

import tilegen
from benchmarks.cpu import Number, write
from benchmarks.environment import RESULTS
from benchmarks.recordings import Recorder, new_session
from benchmarks.synthetic import make
from tilegen.fleet.bench import ReplayMachine
from tilegen.fleet.jobs import Job
from tilegen.fleet.queue import Claim, Queue
from tilegen.fleet.storage import open_storage
from tilegen.fleet.worker import Worker
from tilegen.gpus.spec import gpu
from tilegen.problem import AttentionProblem
from tilegen.store.trials import Trial
from tilegen.tuning.measure import Measurement

H200 = gpu("h200")
PROBLEMS = [AttentionProblem.parse(f"b4 hq32 hkv8 q{1 << n} d128 bf16 causal") for n in (11, 12)]
TRIALS = 32
"""Number of trials of each problem."""
STUDIES, CONFIGS = 80, 50
"""Numbers of studies that the crowd shares, and of configs of each."""
PROCESSES = 4
"""Number of processes that the threads of the crowd are in."""


def recordings(folder: Path, seconds: float) -> list[Job]:
    """Write recordings in which every trial takes `seconds`; return their jobs."""
    for number, problem in enumerate(PROBLEMS):
        made = make("synthetic: good model", problem, H200, "fwd")
        session = replace(new_session(H200, "fwd", problem, len(made.trials)), source="synthetic")
        recorder = Recorder(folder / f"{number}.jsonl", session)
        for trial in made.trials.values():
            recorder.append(replace(trial, seconds=seconds))
    return [Job(gpu=H200, kernel="fwd", problem=problem) for problem in PROBLEMS]


def _work(storage: str, recorded: Path, own: Path, jobs: list[Job]) -> None:
    tilegen.settings(cache_dir=own)
    random.seed()
    Worker(open_storage(storage), ReplayMachine(recorded), trials=TRIALS).run(jobs)


def wall_seconds(storage: str, workers: int, seconds: float) -> float:
    """Measure how long some workers take for the same trials, once they are ready to begin."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = recordings(folder / "recorded", seconds)
        with mock.patch.object(time, "sleep"):  # a worker that imports and works out everything
            warm = folder / "warm"
            _work(f"sqlite:///{folder}/warm.db", folder / "recorded", warm, jobs)
        with contextlib.suppress(ImportError):
            __import__("psycopg")
        __import__("optuna.storages.journal")
        fork = multiprocessing.get_context("fork")
        arguments = [
            (storage, folder / "recorded", folder / f"own-{number}", jobs)
            for number in range(workers)
        ]
        processes = [fork.Process(target=_work, args=some) for some in arguments]
        started = time.monotonic()
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
        return time.monotonic() - started


def speed_up(storage: str | None, seconds: float) -> Iterator[Number]:
    """Yield the wall times of 1 and of 8 workers at equal trials."""
    times: dict[int, float] = {}
    kind = (storage or "journal:").partition(":")[0]
    for workers in (1, 8):
        with tempfile.TemporaryDirectory() as folder, _new_studies():
            url = storage or f"journal:{folder}/trials.journal"
            times[workers] = wall_seconds(url, workers, seconds)
        trials = len(PROBLEMS) * TRIALS
        what = f"{workers} workers, {trials} trials of {seconds:g} s, {kind}"
        yield _number(what, times[workers], "s", "an eighth of 1 worker's", times[1] / 8)


def _number(
    what: str, value: float, unit: str, baseline: str = "", against: float | None = None
) -> Number:
    return Number(benchmark=what, value=value, unit=unit, baseline=baseline, baseline_value=against)


@contextlib.contextmanager
def _new_studies() -> Iterator[None]:
    """Give studies names of their own, so that a storage can be used again."""
    name, tail = Job.study.func, secrets.token_hex(4)
    with mock.patch.object(Job, "study", property(lambda job: f"{name(job)}/{tail}")):
        yield


# --------------------------------------------------------------------------------------------------
# The crowd


def crowd(storage: str, workers: int, think: float, seconds: float) -> Iterator[Number]:
    """Yield rates and latencies of many workers over one proxy; a trial takes them `think` s."""
    run, jobs = secrets.token_hex(4), Job(gpu=H200, kernel="fwd", problem=PROBLEMS[0])
    configs = [trial for trial in make("synthetic: good model", PROBLEMS[0], H200, "fwd").trials]
    started = time.monotonic()
    database = open_storage(storage)
    for number in range(STUDIES):
        Queue(database, f"crowd/{run}/{number}", jobs.attributes).ready(configs[:CONFIGS])
    each = (time.monotonic() - started) / (STUDIES * CONFIGS)
    yield _number("putting a config into a study, directly into the database", 1e3 * each, "ms")
    with _proxy(storage) as url, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.fleet", "--member-of", url, "--run", run]
        command += ["--crowd", str(workers // PROCESSES), "--think", str(think)]
        command += ["--seconds", str(seconds)]
        processes = [
            subprocess.Popen(
                [*command, "--csv", f"{folder}/{number}"],
            )
            for number in range(PROCESSES)
        ]
        for process in processes:
            assert process.wait() == 0
        members = [json.loads(Path(folder, str(number)).read_text()) for number in range(PROCESSES)]
    trials = sum(len(one["finish"]) for one in members)
    who = f"{workers} workers over 1 proxy, trials of {think:g} s"
    yield _number(f"{who}: finished", trials / seconds, "1/s", "asked for", workers / think)
    for name in ("claim", "finish"):
        times = [1e3 * took for one in members for took in one[name]]
        yield _number(f"{who}: {name}, median", statistics.median(times), "ms")
        yield _number(f"{who}: {name}, p99", statistics.quantiles(times, n=100)[98], "ms")
    calls = sum(one["calls"] for one in members)
    yield _number(f"{who}: requests per trial", calls / max(1, trials), "")


@contextlib.contextmanager
def _proxy(storage: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "tilegen", "fleet", "proxy", "--storage", storage]
    process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)])
    try:
        open_storage(f"grpc://127.0.0.1:{port}")
        yield f"grpc://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def member(url: str, workers: int, think: float, seconds: float, run: str, file: Path) -> None:
    """Run a process of the crowd; write the latencies of claims and results."""
    job = Job(gpu=H200, kernel="fwd", problem=PROBLEMS[0])
    took: dict[str, list[float]] = {"claim": [], "finish": []}
    storage = open_storage(url)
    calls = [0]
    ask = type(storage)._call

    def counted(self: object, call: object, *args: object, **options: object) -> object:
        calls[0] += 1
        return ask(self, call, *args, **options)

    type(storage)._call = counted
    conditions = job.conditions
    started = time.monotonic()
    steady = started + 2.2 * think  # by then all have started, and are out of step
    deadline = steady + seconds

    def one() -> None:
        mine, queues = open_storage(url), dict[int, Queue]()
        time.sleep(random.uniform(0, think))
        while time.monotonic() < deadline:
            number = random.randrange(STUDIES)
            if number not in queues:
                queues[number] = Queue(mine, f"crowd/{run}/{number}", {})
            queue = queues[number]
            begun = time.monotonic()
            if not queue.ready([]) or (claim := queue.claim()) is None:
                continue
            if begun > steady:
                took["claim"].append(time.monotonic() - begun)
            time.sleep(think * random.uniform(0.8, 1.2))
            _finish(queue, claim)

    def _finish(queue: Queue, claim: Claim) -> None:
        begun = time.monotonic()
        timed = Measurement(status="ok", median_us=9.0, p20_us=9.0, p80_us=9.0, repeats=9)
        queue.finish(claim, Trial(config=claim.config, measurement=timed), conditions)
        if steady < begun < deadline:
            took["finish"].append(time.monotonic() - begun)

    threads = [threading.Thread(target=one, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, steady - time.monotonic()))
    calls[0] = 0
    time.sleep(max(0.0, deadline - time.monotonic()))
    file.write_text(json.dumps({**took, "calls": calls[0]}), encoding="utf-8")
    os._exit(0)  # threads are in the middle of something


def main(
    storage: Annotated[
        str | None, typer.Option(help="Database to use; default: a journal in a new folder.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Result file. Default: benchmarks/results/cpu/fleet.csv.")
    ] = None,
    trial: Annotated[float, typer.Option(help="Seconds of a replayed trial.")] = 1.0,
    crowd_: Annotated[
        int, typer.Option("--crowd", help="Workers over the proxy; needs --storage.")
    ] = 0,
    think: Annotated[float, typer.Option(help="Seconds that a trial of the crowd takes.")] = 60.0,
    seconds: Annotated[float, typer.Option(help="How long the crowd is watched.")] = 60.0,
    member_of: Annotated[str, typer.Option(hidden=True)] = "",
    run: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure 8 workers against 1, or with --crowd many workers over one gRPC proxy.

    Example: python -m benchmarks.fleet
    """
    path = csv or RESULTS / "cpu" / "fleet.csv"
    if member_of:
        member(member_of, crowd_, think, seconds, run, path)
    if crowd_ and not storage:
        raise typer.BadParameter("--crowd needs --storage postgresql://...")
    numbers = crowd(storage, crowd_, think, seconds) if crowd_ and storage else None
    write(numbers or speed_up(storage, trial), path)


if __name__ == "__main__":
    typer.run(main)
