"""Tuning of jobs by this process together with the workers of a storage."""

from __future__ import annotations

from collections.abc import Sequence

from tilegen.compiling.workers import Pool
from tilegen.fleet.bench import RealMachine
from tilegen.fleet.jobs import Job
from tilegen.fleet.storage import open_storage
from tilegen.fleet.worker import Worker
from tilegen.store import TuningRecord


def tune_together(jobs: Sequence[Job], trials: int | None, storage: str) -> list[TuningRecord]:
    """Tune jobs with the other workers of a storage, and return their records, which are saved in
    the local cache. Raises Unsupported for winners that cannot be saved."""
    with Pool() as pool:
        worker = Worker(open_storage(storage), RealMachine(pool), trials=trials, again=True)
        records = worker.run(jobs)
    worker.require_saved()
    return [record for record in records.values() if record]
