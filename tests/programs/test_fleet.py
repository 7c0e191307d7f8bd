"""A fleet on a journal and on PostgreSQL: workers are killed, the server goes away."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests import warm
from tests.fleet_workers import JOB, SPACE, measured
from tests.postgres import Server, postgres
from tests.replay import Replay, run
from tilegen.choose.ranker import ranked_space
from tilegen.fleet.status import progress
from tilegen.fleet.storage import StorageBroken, open_storage
from tilegen.store import Location, TuningRecord, look_up
from tilegen.store.places import read_trials
from tilegen.store.trials import trials_path
from tilegen.store.versions import current_versions
from tilegen.task import KernelTask

RUNS = [config for config in SPACE if not str(Replay().table[config.key]).startswith("launch_")]
"""A failed launch may be another's doing: who publishes tries it once more."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres() as running:
        yield running


def start(storage: str, folder: Path, workers: int, victims: int, seconds: float) -> Fleet:
    return Fleet(
        "from pathlib import Path\nfrom tests.fleet_workers import main\n"
        f"main({storage!r}, Path({str(folder)!r}), {workers}, {victims}, {seconds})",
        env=None,
        seed=1,
    )


class Fleet(warm.Program):
    def codes(self) -> dict[int, int]:
        """Return how each worker, by its process, has ended; once all have."""
        out, err = self.communicate()
        assert self.returncode == 0, err
        assert "Traceback" not in err, err
        return {int(process): code for process, code in json.loads(out).items()}


def alone() -> TuningRecord:
    """Return the result of `tune` without a fleet."""
    _, candidates = ranked_space(KernelTask.of(JOB.kernel, JOB.problem, JOB.gpu), SPACE)
    return run(Replay(), candidates=candidates, space=SPACE)


def check(storage: str, folder: Path, codes: dict[int, int], put_back: range) -> None:
    """Every config was finished once, measured once, and the winner is that of one process.

    What a worker was about to write down when it was killed is measured by another, too.
    """
    (study,) = progress(open_storage(storage))
    assert (study.waiting, study.running, study.finished) == (0, 0, len(SPACE))
    assert study.state == "published"
    assert study.abandoned in put_back
    known = measured(folder)
    times = Counter(config for config, process in known if codes[process] == 0)
    lost = Counter(config for config, process in known if codes[process] != 0)
    twice = [config.key for config in RUNS if times[config.key] + lost[config.key] > 1]
    assert max(times[config.key] for config in RUNS) == 1
    assert {config for config, _ in known} == {config.key for config in SPACE}
    assert len(twice) <= study.abandoned
    store = Location(str(folder / "store"), "shared")
    entry = look_up(
        KernelTask.of(JOB.kernel, JOB.problem, JOB.gpu),
        versions=current_versions(),
        template_digest=JOB.conditions.template_digest,
        where=[store],
    )
    assert entry is not None
    winner = alone()
    assert (entry.record.config, entry.record.measurement) == (winner.config, winner.measurement)
    assert study.winner == winner.config.key
    lines = read_trials(store, trials_path(JOB.gpu.name, JOB.kernel, JOB.problem)).splitlines()
    assert {json.loads(line)["measurement"]["status"] for line in lines} > {"ok"}
    assert len(lines) == len(SPACE)


def test_killed_workers_on_a_journal(tmp_path: Path) -> None:
    storage = f"journal:{tmp_path}/trials.journal"
    codes = start(storage, tmp_path, 4, 2, 0.05).codes()
    assert sorted(codes.values()) == [-signal.SIGKILL] * 2 + [0] * 2
    check(storage, tmp_path, codes, range(1, 3))


def test_killed_workers_on_postgres(tmp_path: Path, server: Server) -> None:
    storage = server.database("killed")
    codes = start(storage, tmp_path, 6, 3, 0.05).codes()
    assert sorted(codes.values()) == [-signal.SIGKILL] * 3 + [0] * 3
    check(storage, tmp_path, codes, range(2, 4))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_worker_leaves_a_server_that_is_gone_at_the_first_ctrl_c(
    is_frozen: bool, tmp_path: Path, server: Server
) -> None:
    storage = server.database(f"gone_{is_frozen}".lower())
    worker = warm.start(
        "import logging, signal\nfrom pathlib import Path\n"
        "from tests.fleet_workers import warm_up, work\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "logging.basicConfig(level=logging.INFO)\n"
        f"folder = Path({str(tmp_path)!r})\n"
        f"warm_up(folder / 'warm')\nwork({storage!r}, folder, 0.1)"
    )
    while len(measured(tmp_path)) < 2:
        assert worker.poll() is None
        time.sleep(0.02)
    server.signal(signal.SIGSTOP) if is_frozen else server.stop()
    try:
        time.sleep(1.5)  # the worker finds out, and waits for the server
        (process,) = {process for _, process in measured(tmp_path)}
        os.kill(process, signal.SIGINT)
        _, err = worker.communicate(timeout=60)
    finally:
        server.signal(signal.SIGCONT) if is_frozen else server.start()
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert "cancel" not in err, "psycopg waits for 10 s before it leaves a query"


@pytest.mark.parametrize("wrong", ["no such database", "no such user", "no right"])
def test_permanent_errors_end_at_once(
    wrong: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(_: float) -> NoReturn:
        raise AssertionError("waiting does not help")

    import psycopg

    url = server.database(wrong.replace(" ", "_"))
    expected = "permission denied for schema public"
    if wrong == "no such database":
        url, expected = f"{url}_at_all", 'database "no_such_database_at_all" does not exist'
    elif wrong == "no such user":
        url, expected = url.replace("tilegen@", "me@"), 'role "me" does not exist'
    else:
        with psycopg.connect(url) as connection:
            connection.execute("CREATE ROLE guest LOGIN")
        url = url.replace("tilegen@", "guest@")
    monkeypatch.setattr(time, "sleep", wait)
    with pytest.raises(StorageBroken, match=expected):
        open_storage(url)


def test_workers_that_find_an_empty_database_make_its_tables_once(server: Server) -> None:
    url = server.database("empty")
    opening = (
        "from tilegen.fleet import storage\n"
        "make = storage._opener\n"
        "def opener(*of):\n"
        "    once = make(*of)\n"
        "    def call():\n"
        "        try:\n"
        "            return once()\n"
        "        except Exception as error:\n"
        "            print(error)\n"
        "            raise\n"
        "    return call\n"
        "storage._opener = opener\n"
        f"storage.open_storage({url!r})"
    )
    assert [one.communicate()[0] for one in [warm.start(opening) for _ in range(4)]] == [""] * 4


def test_a_server_that_restarts_costs_no_worker(tmp_path: Path, server: Server) -> None:
    storage = server.database("restarted")
    fleet = start(storage, tmp_path, 3, 0, 0.1)
    while len(measured(tmp_path)) < len(SPACE) // 4:
        assert fleet.poll() is None
        time.sleep(0.02)
    server.stop()
    before = len(measured(tmp_path))
    time.sleep(1.5)
    assert len(measured(tmp_path)) <= before + 3, "nobody claims without a server"
    server.start()
    codes = fleet.codes()
    assert list(codes.values()) == [0] * 3
    check(storage, tmp_path, codes, range(5))  # a claim whose answer was lost is put back
