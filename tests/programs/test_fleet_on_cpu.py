"""Two workers that tune kernels of this machine's processor together, as a user starts them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.postgres import Server, postgres
from tilegen import pipeline
from tilegen.choose.on_cpu import tuned_space
from tilegen.cpus.host import current_cpu
from tilegen.device import ONE_THREAD
from tilegen.fleet.jobs import Job, jobs_of
from tilegen.fleet.status import progress
from tilegen.fleet.storage import open_storage
from tilegen.problem import AttentionProblem
from tilegen.store import Location, TuningRecord
from tilegen.store.places import read_trials
from tilegen.store.record import record_path
from tilegen.store.trials import trials_path

PROBLEMS = [
    "b1 hq2 hkv2 q64 kv64 d32 fp32 causal",
    "b1 hq2 hkv1 q64 kv64 d64 fp32 full",
    "b1 hq2 hkv2 q128 kv128 d32 bf16 causal",
]
TRIALS = 3


@pytest.fixture(params=["journal", "postgres"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty storage in a shared folder, or in a database."""
    if request.param == "journal":
        yield f"journal:{tmp_path}/journal"
        return
    with postgres() as server:
        assert isinstance(server, Server)
        yield server.database("tuning")


def work(storage: str, folder: Path, number: int) -> warm.Program:
    """Start a worker with a local cache of its own, and a GPU that nobody sees."""
    arguments = ["worker", "--storage", storage, "--catalog", str(folder / "models.txt")]
    arguments += ["--kernel", "fwd", "--trials", str(TRIALS), "--store", str(folder / "shared")]
    changes = {
        "TILEGEN_CACHE_DIR": str(folder / f"own-{number}"),
        "TILEGEN_CPU": "kernels",
        "CUDA_VISIBLE_DEVICES": "",
    }
    code = "from tilegen.cli.main import main\nmain()"
    return warm.start(code, *arguments, env={**os.environ, **changes})


def test_two_workers_measure_each_tile_once(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models.txt").write_text("\n".join(PROBLEMS) + "\n", encoding="utf-8")
    said: list[str] = []
    workers = [work(storage, tmp_path, number) for number in range(2)]
    for worker in workers:
        out, err = worker.communicate()
        assert worker.returncode == 0, err
        assert "Traceback" not in err, err
        said.append(out)
    measured = [int(re.findall(r"(\d+) configs measured", out)[0]) for out in said]

    jobs = jobs_of(map(AttentionProblem.parse, PROBLEMS), current_cpu(), ["fwd"])
    wanted = {job: tuned_space(job.task) for job in jobs}
    assert sum(measured) == sum(min(TRIALS, len(configs)) for configs in wanted.values())
    studies = {study.problem: study for study in progress(open_storage(storage))}
    assert {*studies} == {job.problem.key for job in jobs}
    assert {study.state for study in studies.values()} == {"published"}

    shared = Location(str(tmp_path / "shared"), "shared")
    for job in jobs:
        lines = read_trials(shared, trials_path(job.gpu.name, "fwd", job.problem)).splitlines()
        trials = [json.loads(line) for line in lines]
        assert len(trials) == min(TRIALS, len(wanted[job]))
        assert len({json.dumps(trial["config"]) for trial in trials}) == len(trials)
        assert {trial["measurement"]["status"] for trial in trials} == {"ok"}
        assert winner_of(job, shared).measurement.status == "ok"

    # Whoever looks in the shared store has the winners.
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "another"))
    monkeypatch.setenv("TILEGEN_CACHE_PATH", str(tmp_path / "shared"))
    for job in jobs:
        choice = pipeline.choose(job.problem, current_cpu(), "forward")["fwd"]
        assert choice.ranked.origin == "record"
        assert choice.config == winner_of(job, shared).config


def winner_of(job: Job, store: Location) -> TuningRecord:
    """Return the record of a job in a store."""
    path = store.address(record_path(job.gpu.name, "fwd", job.problem, ONE_THREAD))
    return TuningRecord.from_json(Path(path).read_text(encoding="utf-8"))
