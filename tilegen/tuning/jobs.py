"""The jobs of a catalogue: one for each problem, kernel and device. Shards divide them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from tilegen.choose.families import kernels_of
from tilegen.device import Device
from tilegen.emit.identity import template_digest
from tilegen.errors import Unsupported
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem
from tilegen.store.trials import Conditions
from tilegen.store.versions import Versions, versions_for
from tilegen.task import KernelTask

AUTO = "auto"
MOST_SHARDS = 10_000
COMPLETIONS = "JOB_COMPLETIONS"
"""Variable with the number of completions of an indexed job. Kubernetes sets the index alone."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A kernel of a problem, to be tuned on a device."""

    gpu: Device
    kernel: Kernel
    problem: AttentionProblem
    """A problem with the batch and lengths of a bucket."""
    versions: Versions | None = None
    """Versions on the machines that measure; None: on this machine."""

    @property
    def task(self) -> KernelTask:
        """The job as a task of the compiler."""
        return KernelTask.of(self.kernel, self.problem, self.gpu)

    @cached_property
    def conditions(self) -> Conditions:
        """Conditions of the timings."""
        versions = self.versions or versions_for(self.gpu)
        return Conditions.of(self.problem, self.gpu, versions, template_digest(self.kernel))

    def __str__(self) -> str:
        return f"{self.kernel} '{self.problem}' on {self.gpu.name}"


def jobs_of(
    problems: Iterable[AttentionProblem],
    gpu: Device,
    kernels: Sequence[Kernel] | None = None,
    versions: Versions | None = None,
) -> list[Job]:
    """List the jobs of problems on a device, each once.

    By default for all kernels that they need: of a problem with one query those of the forward, and
    on a processor those with more than one tile.
    """
    jobs = [
        Job(gpu=gpu, kernel=kernel, problem=problem.bucket, versions=versions)
        for problem in problems
        for kernel in kernels or kernels_of(problem, gpu, _trained(problem))
    ]
    if not kernels and not isinstance(gpu, GpuSpec):
        from tilegen.choose.on_cpu import may_tune  # loads the model

        jobs = [job for job in jobs if may_tune(job.task)]
    return list(dict.fromkeys(jobs))


def _trained(problem: AttentionProblem) -> Direction | None:
    """Return `forward` for a step of decoding, which has no backward; otherwise None."""
    return "forward" if problem.seqlen_q == 1 else None


@dataclass(frozen=True)
class Shard:
    """A part of a catalogue's jobs: part `index` of `count`, counted from 0."""

    index: int
    count: int

    def has(self, job: Job) -> bool:
        """Return True if a job is in this part.

        The part with the highest digest has the job, so that other problems and kernels change
        nothing, and one part more takes over its share alone. All kernels of a problem are in one
        part, since a join is timed after its splits.
        """
        key = f"{job.gpu.name}\n{job.problem.key}"

        def digest(part: int) -> bytes:
            return hashlib.sha256(f"{part}\n{key}".encode()).digest()

        return max(range(self.count), key=digest) == self.index

    @classmethod
    def parse(cls, text: str, variables: Mapping[str, str]) -> Shard:
        """Parse `2/8`, or read the variables of a Slurm array or of an indexed job of Kubernetes
        for `auto`. Raises Unsupported."""

        def refuse(got: str) -> NoReturn:
            raise Unsupported(
                f"--shard must be I/N with I from 0 to N-1 and N at most {MOST_SHARDS}, or auto; "
                f"got {got}"
            )

        if text != AUTO:
            given = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
            part, count = map(int, given.groups()) if given else (0, 0)
            return cls(part, count) if part < count <= MOST_SHARDS else refuse(repr(text))
        slurm = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "COUNT", "MIN", "STEP")]
        indexed = ["JOB_COMPLETION_INDEX", COMPLETIONS]
        for names in (slurm, indexed):
            if names[0] not in variables:
                continue
            values = {name: variables.get(name, "1" if name == slurm[3] else "") for name in names}
            said = f"auto with {', '.join(f'{name}={value}' for name, value in values.items())}"
            if not all(re.fullmatch(r"[0-9]{1,9}", value) for value in values.values()):
                refuse(said)
            part, count, *spacing = map(int, values.values())
            if spacing:
                part, left = divmod(part - spacing[0], max(1, spacing[1]))
                if left:
                    refuse(f"{said}: an array must be a range")
            return cls(part, count) if 0 <= part < count <= MOST_SHARDS else refuse(said)
        raise Unsupported(
            f"--shard auto needs {slurm[0]}, which Slurm sets in arrays, or {indexed[0]}, which "
            f"Kubernetes sets in indexed jobs, with {COMPLETIONS}; found neither"
        )


def read_problems(catalogue: Sequence[str]) -> list[AttentionProblem]:
    """Read a catalogue, whose entries are files or notations. Raises TilegenError."""
    from tilegen.catalog import read_catalogue

    problems: list[AttentionProblem] = []
    for entry in catalogue:
        is_file = len(entry.split()) == 1 or _is_file(Path(entry))  # no notation is a single word
        problems += read_catalogue(Path(entry)) if is_file else [AttentionProblem.parse(entry)]
    return problems


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a notation may be too long for a file name
        return False
