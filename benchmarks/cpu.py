"""Benchmarks that need no GPU: what tilegen costs before a kernel runs.

    python -m benchmarks.cpu [--only calling]

Each number stands beside a baseline measured in the same run, so that the ratio travels between
machines where the number does not.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated
from unittest import mock

import typer

from benchmarks.environment import RESULTS, ROOT, Csv, Environment
from benchmarks.rows import keep
from benchmarks.workloads import CATALOGUE, head
from tilegen.choose.ranker import propose
from tilegen.compiling.workers import compile_many
from tilegen.emit.render import RenderedKernel, render
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask

REPEATS = 7
CALLS, TURNS = 100, 70
"""Calls of `attention` per turn, and turns: other programs disturb some turns."""
PROPOSED: tuple[Kernel, ...] = ("fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq")
COMPILED = 16
"""Number of kernels that the throughput of compiling is measured with."""


@dataclass(frozen=True, kw_only=True)
class Number(Environment):
    """One number that needs no GPU."""

    benchmark: str
    value: float
    unit: str
    baseline: str
    """The call that `ratio` divides by; empty without a ratio."""
    ratio: float | None
    """Value over baseline."""


def number(
    benchmark: str, value: float, unit: str, baseline: str = "", of_baseline: float | None = None
) -> Number:
    """Return a number beside that of its baseline, if there is one."""
    ratio = value / of_baseline if of_baseline else None
    return Number(benchmark=benchmark, value=value, unit=unit, baseline=baseline, ratio=ratio)


def imports() -> Iterator[Number]:
    """Time of `import tilegen` in a fresh interpreter, beside torch's."""
    own, of_torch = map(_milliseconds_of_import, ("tilegen", "torch"))
    yield number("import tilegen", own, "ms", "import torch", of_torch)


def calling() -> Iterator[Number]:
    """CPU time of `attention` up to the driver, beside PyTorch's attention."""
    from benchmarks.call_cost import measured

    for name, value, baseline, of_baseline in measured(calls=CALLS, repeats=TURNS):
        yield number(name, value, "us", baseline, of_baseline)


def proposing() -> Iterator[Number]:
    """Time of `propose`: the very first call, which builds the model, and the median of later ones.

    Later ones are for problems never seen before: the catalogue's masks at other lengths, then at
    other lengths and head dims. (A mask of a new form adds 30 ms: SymPy solves it.)
    """
    h200 = gpu("h200")
    problems = [workload.problem for workload in CATALOGUE]
    first = seconds_of(lambda: propose(KernelTask.of("fwd", problems[0], h200)))
    yield number("propose, first call", 1e3 * first, "ms")
    for kernel in PROPOSED:
        for problem in problems:
            propose(KernelTask.of(kernel, problem, h200))
        longer = [replace(one, seqlen_q=one.seqlen_q + 8) for one in problems]
        narrower = [replace(one, head_dim_qk=one.head_dim_qk - 8) for one in longer]
        for what, new in (("new lengths", longer), ("new head dims", narrower)):
            tasks = [KernelTask.of(kernel, one, h200) for one in new]
            median = statistics.median(seconds_of(partial(propose, task)) for task in tasks)
            yield number(f"propose {kernel}, {what}", 1e3 * median, "ms")


def rendering() -> Iterator[Number]:
    """Kernels rendered per second, on one core."""
    kernels = list(_proposals())
    render(*kernels[0])  # loads the templates
    median = statistics.median(seconds_of(partial(render, *one)) for one in kernels)
    yield number("render", 1 / median, "kernels/s")


def compiling() -> Iterator[Number]:
    """Kernels compiled to cubin per second, on all cores, with nothing cached."""
    kernels = [render(*arguments) for arguments in _proposals()][:COMPILED]
    one_core = _compile_seconds(kernels[:2], workers=1) / 2
    cores = len(os.sched_getaffinity(0))
    rate = len(kernels) / _compile_seconds(kernels, workers=cores)
    yield number(f"compile for sm_90, {cores} cores", rate, "kernels/s", "one core", 1 / one_core)


BENCHMARKS = {one.__name__: one for one in (imports, calling, proposing, rendering, compiling)}


def _compile_seconds(kernels: list[RenderedKernel], *, workers: int) -> float:
    with (
        tempfile.TemporaryDirectory() as empty,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=empty),
    ):
        return seconds_of(lambda: list(compile_many(kernels, "sm_90", workers=workers)))


def _proposals() -> Iterator[tuple[AttentionProblem, TileConfig, Kernel]]:
    """Yield the arguments of `render` for the best configs of the head's problems."""
    for workload, kernel in product(head(), PROPOSED):
        for candidate in propose(KernelTask.of(kernel, workload.problem, gpu("h200")), top=2):
            yield workload.problem, candidate.config, kernel


def seconds_of(function: Callable[[], object]) -> float:
    """Return the time of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _milliseconds_of_import(module: str) -> float:
    """Return the median time that importing a module takes, in fresh interpreters."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"

    def run() -> float:
        command = [sys.executable, "-c", code]
        return float(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)

    return 1e3 * statistics.median(run() for _ in range(REPEATS))


def line(row: Number) -> str:
    """Return a number as a terminal shows it."""
    ratio = f"  ({row.ratio:.3g} times {row.baseline})" if row.ratio is not None else ""
    return f"{row.benchmark:44} {row.value:10.4g} {row.unit}{ratio}"


def main(
    csv: Csv = None,
    only: Annotated[str, typer.Option(help=f"One of {', '.join(BENCHMARKS)}.")] = "",
) -> None:
    """Measure import, propose, render, compile and the hot path up to the driver.

    Example: python -m benchmarks.cpu --only calling
    """
    if only and only not in BENCHMARKS:
        raise typer.BadParameter(f"expected a name of a benchmark, got {only!r}")
    path = csv or RESULTS / "cpu" / f"{Environment().date}.csv"
    for name, benchmark in BENCHMARKS.items():
        if only in ("", name):
            keep(path, benchmark(), line)
    print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
