"""The machine that a worker measures on: the GPU at hand, or timings recorded elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tilegen.choose.ranker import search_space
from tilegen.compiling.workers import Pool
from tilegen.errors import InvalidRecord, TilegenError, Unsupported
from tilegen.fleet.jobs import Job
from tilegen.gpus.spec import gpu as gpu_named
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store.fields import parse_json
from tilegen.store.record import MAX_SECONDS, kernel_of, measurement_from
from tilegen.tuning.bench import Bench, as_tuned, real_bench
from tilegen.tuning.measure import Measurement

MAX_NAMED = 8
"""Number of recordings that an error names at the most."""

Key = tuple[str, Kernel, str]


class Machine(Protocol):
    """Measures the configs of jobs."""

    def space(self, job: Job) -> Sequence[TileConfig]:
        """Return the configs there are."""
        ...

    def bench(self, job: Job) -> Bench:
        """Return the bench that compiles, measures and checks the configs."""
        ...


class RealMachine:
    """The GPU at hand, and its cores to compile on."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def space(self, job: Job) -> Sequence[TileConfig]:
        """Return all legal configs."""
        return search_space(job.task)

    def bench(self, job: Job) -> Bench:
        """Return the bench of the GPU at hand. Raises Unsupported if the job is for another GPU."""
        return real_bench(job.task, self._pool)


class ReplayMachine:
    """Recordings of timings (benchmarks/recordings.py) in the place of a GPU.

    A config takes as long as its recording says, and comes out as the recording says.
    """

    def __init__(self, where: Path) -> None:
        """Reads a file, or all `.jsonl` files below a folder. Raises InvalidRecord, Unsupported."""
        self._recorded: dict[Key, dict[TileConfig, tuple[Measurement, float]]] = {}
        files = sorted(where.rglob("*.jsonl")) if where.is_dir() else [where]
        for file in files:
            self._read(file)
        if not self._recorded:
            raise Unsupported(f"expected recordings in {str(where)!r}, found no .jsonl file")

    @property
    def gpus(self) -> list[str]:
        """The GPU models there are recordings of."""
        return sorted({gpu for gpu, _, _ in self._recorded})

    def jobs(self, problems: Sequence[AttentionProblem], gpu: str) -> list[Job]:
        """Return the jobs of a catalogue that have been recorded on a GPU model. Raises Unsupported
        where none has been."""
        spec = gpu_named(gpu)
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
        """Return the configs recorded."""
        return list(self._recorded[_key(job)])

    def bench(self, job: Job) -> Bench:
        """Return a bench that answers as the recording does, after as long."""
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
        found: dict[TileConfig, tuple[Measurement, float]] | None = None
        for line in filter(None, lines):
            try:
                fields = parse_json(line.decode("utf-8"))
                if "recording" in fields.values:
                    problem = AttentionProblem.parse(fields.text("problem", longest=1000))
                    key = (fields.text("gpu"), kernel_of(fields), problem.rounded.key)
                    found = self._recorded.setdefault(key, {})
                elif found is not None:
                    config = TileConfig.parse(fields.text("config"))
                    measurement = measurement_from(fields.group("measurement"))
                    if spilled := fields.integer("spill_bytes", 0, 2**31):
                        measurement = as_tuned(measurement, spilled)
                    found[config] = (measurement, fields.number("seconds", 0, MAX_SECONDS))
            except (UnicodeDecodeError, TilegenError):
                continue  # torn by a kill
        if found is None:
            raise InvalidRecord(f"expected a recording in {str(file)!r}, no line of it opens one")


def _key(job: Job) -> Key:
    return job.gpu.name, job.kernel, job.problem.key
