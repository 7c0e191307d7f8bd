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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import RESULTS, ROOT, environment
from benchmarks.rows import CpuRow, append, with_environment
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
class Number:
    """One result, with what it compares to."""

    benchmark: str
    value: float
    unit: str
    baseline: str = ""
    baseline_value: float | None = None

    @property
    def ratio(self) -> float | None:
        """Value over baseline, None if there is none."""
        return self.value / self.baseline_value if self.baseline_value else None

    def __str__(self) -> str:
        ratio = f"  ({self.ratio:.3g} times {self.baseline})" if self.ratio is not None else ""
        return f"{self.benchmark:44} {self.value:10.4g} {self.unit}{ratio}"


def benchmarks() -> tuple[Callable[[], Iterator[Number]], ...]:
    """Return every CPU benchmark; each yields its numbers."""
    return (imports, calling, proposing, rendering, compiling)


def imports() -> Iterator[Number]:
    """Time of `import tilegen` in a fresh interpreter, beside torch's."""
    yield Number(
        benchmark="import tilegen",
        value=_milliseconds_of_import("tilegen"),
        unit="ms",
        baseline="import torch",
        baseline_value=_milliseconds_of_import("torch"),
    )


def calling() -> Iterator[Number]:
    """CPU time of `attention` up to the driver, and of its parts, beside PyTorch's attention."""
    from benchmarks.call_cost import measured

    for name, value, baseline, of_baseline in measured(calls=CALLS, repeats=TURNS):
        yield Number(
            benchmark=name,
            value=value,
            unit="us",
            baseline=baseline,
            baseline_value=of_baseline,
        )


def proposing() -> Iterator[Number]:
    """Time of `propose`: the very first call, which builds the model, and the median of later ones.

    Later ones are for problems never seen before: the catalogue's masks at other lengths, then at
    other lengths and head dims. (A mask of a new form adds 30 ms: SymPy solves it.)
    """
    h200 = gpu("h200")
    problems = [workload.problem for workload in CATALOGUE]
    first = seconds_of(lambda: propose(KernelTask.of("fwd", problems[0], h200)))
    yield Number(benchmark="propose, first call", value=1e3 * first, unit="ms")
    for kernel in PROPOSED:
        for problem in problems:
            propose(KernelTask.of(kernel, problem, h200))
        longer = [replace(one, seqlen_q=one.seqlen_q + 8) for one in problems]
        narrower = [replace(one, head_dim_qk=one.head_dim_qk - 8) for one in longer]
        for what, new in (("new lengths", longer), ("new head dims", narrower)):
            tasks = [KernelTask.of(kernel, one, h200) for one in new]
            times = [seconds_of(partial(propose, task)) for task in tasks]
            name = f"propose {kernel}, {what}"
            yield Number(benchmark=name, value=1e3 * statistics.median(times), unit="ms")


def rendering() -> Iterator[Number]:
    """Kernels rendered per second, on one core."""
    kernels = list(_proposals())
    render(*kernels[0])  # loads the templates
    times = [seconds_of(partial(render, *arguments)) for arguments in kernels]
    yield Number(benchmark="render", value=1 / statistics.median(times), unit="kernels/s")


def compiling() -> Iterator[Number]:
    """Kernels compiled to cubin per second, on all cores, with nothing cached."""
    kernels = [render(*arguments) for arguments in _proposals()][:COMPILED]
    one_core = _compile_seconds(kernels[:2], workers=1) / 2
    cores = len(os.sched_getaffinity(0))
    yield Number(
        benchmark=f"compile for sm_90, {cores} cores",
        value=len(kernels) / _compile_seconds(kernels, workers=cores),
        unit="kernels/s",
        baseline="one core",
        baseline_value=1 / one_core,
    )


def _compile_seconds(kernels: list[RenderedKernel], *, workers: int) -> float:
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_CACHE_DIR"] = empty
        try:
            return seconds_of(lambda: list(compile_many(kernels, "sm_90", workers=workers)))
        finally:
            del os.environ["TRITON_CACHE_DIR"]
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before


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


def write(numbers: Iterable[Number], path: Path) -> None:
    """Print numbers as they come, and append each to a CSV file with the environment."""
    for number in numbers:
        print(number, flush=True)
        row = with_environment(
            CpuRow,
            environment(),
            benchmark=number.benchmark,
            value=number.value,
            unit=number.unit,
            baseline=number.baseline,
            ratio=number.ratio,
        )
        append(path, row)
    print(f"written to {path}")


def main(
    csv: Annotated[
        Path | None, typer.Option(help="Result file. Default: benchmarks/results/cpu/<date>.csv.")
    ] = None,
    only: Annotated[
        str, typer.Option(help="One of imports, calling, proposing, rendering, compiling.")
    ] = "",
) -> None:
    """Measure import, propose, render, compile and the hot path up to the driver.

    Example: python -m benchmarks.cpu --only calling
    """
    chosen = [one for one in benchmarks() if only in ("", one.__name__)]
    if not chosen:
        raise typer.BadParameter(f"expected a name of a benchmark, got {only!r}")
    path = csv or RESULTS / "cpu" / f"{environment().date}.csv"
    write((number for benchmark in chosen for number in benchmark()), path)


if __name__ == "__main__":
    typer.run(main)
