"""The machine that jobs are measured on: the local device, or recordings of timings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tilegen.choose.ranker import search_space
from tilegen.compiling.workers import Pool
from tilegen.devices import device_named
from tilegen.errors import InvalidRecord, TilegenError, Unsupported
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store.fields import parse_json
from tilegen.store.record import KERNEL, MAX_SECONDS, measurement_from
from tilegen.tuning.bench import Bench, as_tuned, real_bench
from tilegen.tuning.jobs import Job
from tilegen.tuning.measure import Measurement

MAX_NAMED = 8
"""Maximum number of recordings that an error names."""

Key = tuple[str, Kernel, str]


class Machine(Protocol):
    """Measures the configs of jobs."""

    def space(self, job: Job) -> Sequence[TileConfig]:
        """Return all configs of a job."""
        ...

    def bench(self, job: Job) -> Bench:
        """Return the functions that compile, measure and check a job's configs."""
        ...


class RealMachine:
    """The local device, and a pool of processes that compile."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def space(self, job: Job) -> Sequence[TileConfig]:
        """Return all legal configs of a job."""
        return search_space(job.task)

    def bench(self, job: Job) -> Bench:
        """Return the bench of the local GPU. Raises Unsupported if the job is for another GPU."""
        return real_bench(job.task, self._pool)


class ReplayMachine:
    """Recordings of timings (benchmarks/recordings.py) in place of a GPU.

    A measurement takes the recorded time, and returns the recorded result.
    """

    def __init__(self, where: Path) -> None:
        """Read a file, or all `.jsonl` files below a folder. Raises InvalidRecord, Unsupported."""
        self._recorded: dict[Key, dict[TileConfig, tuple[Measurement, float]]] = {}
        files = sorted(where.rglob("*.jsonl")) if where.is_dir() else [where]
        for file in files:
            self._read(file)
        if not self._recorded:
            raise Unsupported(f"expected recordings in {str(where)!r}, found no .jsonl file")

    @property
    def gpus(self) -> list[str]:
        """GPU models that have recordings."""
        return sorted({gpu for gpu, _, _ in self._recorded})

    def jobs(self, problems: Sequence[AttentionProblem], gpu: str) -> list[Job]:
        """List the jobs of problems that were recorded on a GPU model. Raises Unsupported if there
        are none."""
        spec = device_named(gpu)
        wanted = dict.fromkeys(problem.bucket.key for problem in problems)
        jobs = [
            Job(gpu=spec, kernel=kernel, problem=AttentionProblem.parse(problem))
            for problem in wanted
            for model, kernel, recorded in self._recorded
            if (model, recorded) == (gpu, problem)
        ]
        if not jobs:
            known = dict.fromkeys(
                f"{recorded!r} on {model}" for model, _, recorded in self._recorded
            )
            raise Unsupported(
                f"expected recordings of {' or '.join(map(repr, wanted))} on {gpu}, found those of "
                f"{', '.join([*known][:MAX_NAMED])}{', ...' if len(known) > MAX_NAMED else ''}"
            )
        return jobs

    def space(self, job: Job) -> Sequence[TileConfig]:
        """Return the recorded configs of a job."""
        return list(self._recorded[_key(job)])

    def bench(self, job: Job) -> Bench:
        """Return a bench that sleeps for the recorded time, and returns the recorded result."""
        recorded = self._recorded[_key(job)]

        def measure(config: TileConfig) -> Measurement:
            measurement, seconds = recorded[config]
            time.sleep(seconds)
            return measurement

        return Bench(measure=measure)

    def _read(self, file: Path) -> None:
        try:
            lines = file.read_bytes().split(b"\n")
        except OSError as error:
            raise Unsupported(f"cannot read {str(file)!r}: {error.strerror}") from error
        results: dict[TileConfig, tuple[Measurement, float]] | None = None
        for line in filter(None, lines):
            try:
                fields = parse_json(line.decode("utf-8"))
                if "recording" in fields.values:
                    problem = AttentionProblem.parse(fields.text("problem", longest=1000))
                    key = (fields.text("gpu"), KERNEL.read(fields, "kernel"), problem.rounded.key)
                    results = self._recorded.setdefault(key, {})
                elif results is not None:
                    config = TileConfig.parse(fields.text("config"))
                    measurement = measurement_from(fields.group("measurement"))
                    if spilled := fields.integer("spill_bytes", 0, 2**31):
                        measurement = as_tuned(measurement, spilled)
                    results[config] = (measurement, fields.number("seconds", 0, MAX_SECONDS))
            except (UnicodeDecodeError, TilegenError):
                continue  # cut when the recorder was killed
        if results is None:
            raise InvalidRecord(f"expected a recording in {str(file)!r}, no line of it opens one")


def _key(job: Job) -> Key:
    return job.gpu.name, job.kernel, job.problem.key
