"""The jobs of a fleet: one for each problem, kernel and GPU model of a catalogue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from tilegen.choose.families import kernels_of
from tilegen.device import Device
from tilegen.emit.identity import template_digest
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem
from tilegen.store.record import slug
from tilegen.store.trials import Conditions
from tilegen.store.versions import versions_for
from tilegen.task import KernelTask

ATTRIBUTES = ("gpu", "kernel", "problem", "policy")
"""Attributes by which a study describes its job, for `tilegen fleet status`."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A kernel of a problem, to be tuned on a GPU model."""

    gpu: Device
    kernel: Kernel
    problem: AttentionProblem
    """A problem with the batch and lengths of a bucket."""

    @property
    def task(self) -> KernelTask:
        """The job as a task of the compiler."""
        return KernelTask.of(self.kernel, self.problem, self.gpu)

    @cached_property
    def conditions(self) -> Conditions:
        """Conditions of the timings. Workers under other conditions share another study."""
        digest = template_digest(self.kernel)
        return Conditions.of(self.problem, self.gpu, versions_for(self.gpu), digest)

    @cached_property
    def study(self) -> str:
        """Name of the job's study."""
        conditions = json.dumps(asdict(self.conditions), sort_keys=True).encode()
        digest = hashlib.sha256(conditions).hexdigest()[:12]
        return f"{slug(self.gpu.name)}/{self.kernel}/{slug(self.problem.key)}/{digest}"

    @property
    def attributes(self) -> dict[str, str]:
        """Values of `ATTRIBUTES` in the job's study."""
        values = self.gpu.name, self.kernel, self.problem.key, self.gpu.policy
        return dict(zip(ATTRIBUTES, values, strict=True))

    def __str__(self) -> str:
        return f"{self.kernel} '{self.problem}' on {self.gpu.name}"


def jobs_of(
    problems: Iterable[AttentionProblem], gpu: Device, kernels: Sequence[Kernel] | None = None
) -> list[Job]:
    """List the jobs of problems on a device, each once.

    By default for all kernels that they need: of a problem with one query those of the forward, and
    on a processor those with more than one tile.
    """
    jobs = [
        Job(gpu=gpu, kernel=kernel, problem=problem.bucket)
        for problem in problems
        for kernel in kernels or kernels_of(problem, gpu, _trained(problem))
    ]
    if not kernels and not isinstance(gpu, GpuSpec):
        from tilegen.choose.on_cpu import may_tune  # loads the model

        jobs = [job for job in jobs if may_tune(job.task)]
    return list({job.study: job for job in jobs}.values())


def _trained(problem: AttentionProblem) -> Direction | None:
    """Return `forward` for a step of decoding, which has no backward; otherwise None."""
    return "forward" if problem.seqlen_q == 1 else None


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
