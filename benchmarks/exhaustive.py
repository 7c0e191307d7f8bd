"""Time every config of a kernel on the GPU at hand, to judge the model and the search by.

    python -m benchmarks.exhaustive llama3-8b-8k "b2 hq8 q4096 d64 bf16 full" --kernel fwd

A problem is a workload's name or the notation, and is recorded as its bucket, as tuning does.
Kernels that spill much are timed too, which the tuner does not do. Every timing is on disk when it
is taken; the same command continues where it stopped. `python -m benchmarks.tuner_quality` reads
what this writes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import RESULTS, Minutes, gpu_at_hand, start_over
from benchmarks.recordings import Recorder, file_of, new_session
from benchmarks.workloads import CATALOGUE
from tilegen.choose.ranker import search_space
from tilegen.compiling.acceptable import why_not_spilled
from tilegen.compiling.workers import Pool
from tilegen.errors import BuildFailed, TilegenError
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.model.resources import Resources
from tilegen.problem import AttentionProblem
from tilegen.store.trials import Trial, of_one_binary, one_binary_line
from tilegen.task import KernelTask
from tilegen.tuning.bench import Ahead, Bench, real_bench, refused
from tilegen.tuning.measure import DeviceLost
from tilegen.tuning.tuner import pick


def record(
    recorder: Recorder,
    space: Sequence[TileConfig],
    spec: GpuSpec,
    bench: Bench,
    *,
    deadline: float,
) -> int:
    """Time the configs that the recording lacks; return how many are left when the time is over.

    `deadline` is a time of `time.monotonic`. Raises DeviceLost after writing what was lost.
    """
    todo = recorder.todo(list(space))
    assert bench.compile
    with closing(Ahead(bench.compile)) as ahead:
        ahead.submit(todo)
        for done, config in enumerate(todo):
            try:
                built = ahead.result(config, max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return len(todo) - done
            _time(config, built, recorder, spec, bench)
            if time.monotonic() > deadline and done + 1 < len(todo):
                return len(todo) - done - 1
    _check_the_fastest(recorder, bench)
    return 0


def _time(
    config: TileConfig, built: Resources | BuildFailed, recorder: Recorder, spec: GpuSpec,
    bench: Bench,
) -> None:  # fmt: skip
    """Time and write down one config, or why it cannot run. Raises DeviceLost."""
    started = time.monotonic()
    spill_bytes = 0 if isinstance(built, BuildFailed) else built.spill_bytes
    if isinstance(built, BuildFailed) or built.shared_bytes > spec.smem_per_block:
        measurement = refused(built, spec)
        assert measurement
    else:
        try:
            measurement = bench.measure(config)
        except DeviceLost as lost:
            recorder.append(Trial(config=config, measurement=lost.measurement, device_lost=True))
            raise
    seconds = round(time.monotonic() - started, 3)
    recorder.append(
        Trial(config=config, measurement=measurement, seconds=seconds, spill_bytes=spill_bytes)
    )


def _check_the_fastest(recorder: Recorder, bench: Bench) -> None:
    """Write down that the fastest config is wrong, if it is; then the next, until one is right."""
    while best := pick(
        {c: t for c, t in recorder.trials.items() if not why_not_spilled(t.spill_bytes)}
    ):
        try:
            trouble = bench.check(best) if bench.check else None
        except DeviceLost as lost:
            recorder.append(Trial(config=best, measurement=lost.measurement, device_lost=True))
            raise
        if trouble is None:
            return
        recorder.append(Trial(config=best, measurement=trouble))


def problems_of(texts: Sequence[str]) -> list[AttentionProblem]:
    """Return the buckets of problems given by workload name or notation. Raises TilegenError."""
    by_name = {workload.name: workload.problem for workload in CATALOGUE}
    return [(by_name.get(text) or AttentionProblem.parse(text)).bucket for text in texts]


def main(
    problem: Annotated[list[str], typer.Argument(help="Workload names or problems.")],
    kernel: Annotated[
        list[str], typer.Option(help=f"One of {', '.join(KERNELS)}; may be repeated.")
    ] = ["fwd"],  # noqa: B006  # typer reads it
    out: Annotated[
        Path | None,
        typer.Option(help="Folder. Default: benchmarks/results/<gpu>/exhaustive."),
    ] = None,
    minutes: Minutes = 10.0,
) -> None:
    """Time every config of the kernels of some problems.

    Example: python -m benchmarks.exhaustive llama3-8b-8k --kernel fwd --minutes 5
    """
    if unknown := [name for name in kernel if name not in KERNELS]:
        raise typer.BadParameter(f"kernel must be one of {', '.join(KERNELS)}; got {unknown[0]}")
    try:
        problems = problems_of(problem)
    except TilegenError as error:
        print(error)
        raise typer.Exit(1) from None
    spec = gpu_at_hand("nothing to time")
    deadline = time.monotonic() + 60 * minutes
    folder = out or RESULTS / spec.name / "exhaustive"
    with Pool() as pool:
        for bucket, name in product(problems, kernel):
            _record_one(KernelTask.of(name, bucket, spec), folder, pool, deadline)


def _record_one(task: KernelTask, folder: Path, pool: Pool, deadline: float) -> None:
    """Record one kernel of a problem, and say how far it has come."""
    kernel, problem, space = task.kernel, task.problem, search_space(task)
    spec = task.device
    assert isinstance(spec, GpuSpec)
    path = file_of(folder, kernel, problem)
    recorder = Recorder(path, new_session(spec, kernel, problem, len(space)))
    try:
        left = record(recorder, space, spec, real_bench(task, pool), deadline=deadline)
    except DeviceLost as lost:
        print(f"{lost}; starting over with the next config", flush=True)
        start_over(deadline)
    timed = sum(t.measurement.status == "ok" for t in recorder.trials.values())
    state = f"{left} left; the same command goes on from here" if left else "complete"
    print(f"{kernel} '{problem}': {timed} of {len(space)} timed, {state}: {path}", flush=True)
    for configs in of_one_binary(recorder.trials.values()):
        print(f"{kernel} '{problem}': {one_binary_line(configs)}", flush=True)


if __name__ == "__main__":
    typer.run(main)
