"""Tune the head of the catalogue on the GPU at hand, forward kernels first, within a time limit.

    python -m benchmarks.tune --minutes 10

Winners go to the own record directory (TILEGEN_CACHE_DIR); what has a measured record there is left
alone, so a stopped run continues where it stopped.
"""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import Minutes, gpu_at_hand, start_over
from benchmarks.workloads import TRAINED, Workload, head
from tilegen.choose.families import kernels_of
from tilegen.compiling.workers import Pool
from tilegen.disk import write_whole
from tilegen.environment import current
from tilegen.errors import TilegenError
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel
from tilegen.problem import AttentionProblem
from tilegen.store import Location, list_records, locations, look_up
from tilegen.task import KernelTask
from tilegen.tuning.bench import compile_ahead
from tilegen.tuning.measure import DeviceLost
from tilegen.tuning.tuner import tune

Job = tuple[AttentionProblem, Kernel]


def jobs(workloads: Sequence[Workload], spec: GpuSpec) -> list[Job]:
    """Return the kernels to tune: those of the forward first, no backward for what only serves."""
    return [
        (workload.problem, kernel)
        for direction in TRAINED
        for workload in workloads
        if direction in workload.directions
        for kernel in kernels_of(workload.problem, spec, direction)
    ]


def own() -> list[Location]:
    """Return the own directory of records."""
    return [location for location in locations() if location.origin == "own"]


def untuned(wanted: Sequence[Job], spec: GpuSpec) -> list[Job]:
    """Return the jobs without a measured record in the own directory."""
    return [
        (problem, kernel)
        for problem, kernel in wanted
        if look_up(KernelTask.of(kernel, problem, spec), where=own(), borrow=False) is None
    ]


def tune_all(todo: Sequence[Job], spec: GpuSpec, *, deadline: float, pack: Path | None) -> int:
    """Tune one job after the other, each with an equal part of what is left; return the failures.

    `deadline` is a time of `time.monotonic`. DeviceLost escapes: the process is of no more use.
    """
    failures = 0
    with Pool() as pool:  # for all jobs: compilers take seconds to start
        for index, (problem, kernel) in enumerate(todo):
            left = deadline - time.monotonic()
            if left <= 0:
                print(f"time is over, {len(todo) - index} kernels left untuned", flush=True)
                break
            task = KernelTask.of(kernel, problem.bucket, spec)
            try:
                tune(
                    task,
                    seconds=left / (len(todo) - index),
                    compile=partial(compile_ahead, task, pool=pool),
                    progress=False,
                )
            except DeviceLost:
                raise
            except TilegenError as error:
                failures += 1
                print(f"{kernel} for '{problem}': {error}", flush=True)
            finally:
                if pack:
                    pack_records(pack)
    return failures


def pack_records(path: Path) -> None:
    """Put the records of the own directory into one archive, which is written whole."""
    root = current().cache_dir
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for listed in list_records(own()):
            archive.add(root / listed.name, arcname=listed.name)
    write_whole(path, packed.getvalue())


def main(
    minutes: Minutes = 10.0,
    pack: Annotated[
        Path | None, typer.Option(help="Archive (.tar.gz) to put the records into as well.")
    ] = None,
) -> None:
    """Tune the kernels of the catalogue's head that have no measured record yet.

    Example: python -m benchmarks.tune --minutes 10
    """
    spec = gpu_at_hand("nothing to tune")
    deadline = time.monotonic() + 60 * minutes
    try:
        failures = tune_all(untuned(jobs(head(), spec), spec), spec, deadline=deadline, pack=pack)
    except DeviceLost as lost:
        print(f"{lost}; starting over with the next kernel", flush=True)
        start_over(deadline)
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
