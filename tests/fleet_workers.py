"""Workers of a fleet that replay a table, some of which are killed.

In a process of its own, because it forks: the children share what is imported, and start at once.
A victim dies in its second measurement, with a claim in its hands; the last one at any moment.
FOLDER gets a file `measured` with a line for every measurement that came to its end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.records import H200, PROBLEM
from tests.replay import Replay
from tilegen.environment import reread
from tilegen.fleet.jobs import Job
from tilegen.fleet.storage import open_storage
from tilegen.fleet.worker import Worker
from tilegen.kernels.config import TileConfig
from tilegen.store import Location
from tilegen.tuning.bench import Bench
from tilegen.tuning.measure import Measurement
from tilegen.tuning.trials import append_line

JOB = Job(gpu=H200, kernel="fwd", problem=PROBLEM)
SPACE = [one for one in Replay().space if one.block_m in (64, 128) and one.num_stages != 3]
STALE_SECONDS = 6.0
"""More than a busy machine keeps a worker from running."""


class Machine:
    """Measures by the table of tests/replay.py; `dies_in` is the measurement that kills it."""

    def __init__(self, folder: Path, seconds: float = 0.0, dies_in: int = -1) -> None:
        self._folder, self._seconds, self._dies_in = folder, seconds, dies_in
        self._replay = Replay()

    def space(self, job: Job) -> Sequence[TileConfig]:
        return SPACE

    def bench(self, job: Job) -> Bench:
        return Bench(measure=self._measure)

    def _measure(self, config: TileConfig) -> Measurement:
        if len(self._replay.measured) == self._dies_in:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._seconds)
        measurement = self._replay(config)
        append_line(self._folder / "measured", {"config": config.key, "by": os.getpid()})
        return measurement


def work(storage: str, folder: Path, seconds: float = 0.0, dies_in: int = -1) -> None:
    """Be one worker until all is done; publish to FOLDER/store."""
    Worker(
        open_storage(storage),
        Machine(folder, seconds, dies_in),
        store=Location(str(folder / "store"), "shared"),
        stale_seconds=STALE_SECONDS,
    ).run([JOB])


def measured(folder: Path) -> list[tuple[str, int]]:
    """Return the configs measured so far, each with the process that has done it."""
    file = folder / "measured"
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [(one["config"], one["by"]) for one in map(json.loads, filter(None, lines))]


def warm_up(folder: Path) -> None:
    """Import and compute everything that workers need, so that the children need not."""
    folder.mkdir()
    with contextlib.suppress(ImportError):
        importlib.import_module("psycopg")
    importlib.import_module("optuna.storages.journal")
    os.environ["TILEGEN_CACHE_DIR"] = str(folder)
    reread()
    Worker(open_storage(f"sqlite:///{folder}/warm.db"), Machine(folder), trials=1).run([JOB])


def main(storage: str, folder: Path, workers: int, victims: int, seconds: float) -> None:
    warm_up(folder / "warm")
    children: list[int] = []
    for number in range(workers):
        if (child := os.fork()) == 0:
            code = 1
            try:
                os.environ["TILEGEN_CACHE_DIR"] = str(folder / f"own-{number}")
                reread()
                random.seed(number)
                work(storage, folder, seconds, 1 if number < victims - 1 else -1)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    if victims:
        while len(measured(folder)) < len(SPACE) // 3:
            time.sleep(0.01)
        os.kill(children[victims - 1], signal.SIGKILL)
    codes = {child: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
    print(json.dumps(codes))
