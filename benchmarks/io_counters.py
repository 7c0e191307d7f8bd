"""The experiments on I/O that need a GPU and Nsight Compute, judged by the model's closed forms.

    python -m benchmarks.io_counters --out DIR --minutes 20

E1 wire bytes of every kernel, E3 and E4 families of the forward and the backward, E5 capped shared
memory, E6 L2 as slow memory. Each case runs in a process of its own;
what is on disk when one fails, or when the time is over, stays:

    rows.csv       one row per quantity: predicted, measured, verdict
    verdicts.csv   one row per experiment, written again after every case
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.counters import Counted, ncu
from benchmarks.environment import gpu_at_hand
from benchmarks.rows import append, write
from benchmarks.study.experiments import EXPERIMENTS, PEERS, Case, cases
from benchmarks.study.verdicts import (
    NEEDED,
    WANTED,
    MeasureRow,
    group_rows,
    rows_of,
    verdicts,
)
from tilegen.gpus.spec import GpuSpec

ONE_CASE = 180.0
"""Longest time of a case [seconds]."""


def program(case: Case) -> list[str]:
    """Return the command that runs a case's kernels once."""
    return [sys.executable, "-m", "benchmarks.io_counters", f"--launch={case.to_json()}"]


def profile(case: Case, *, timeout: float) -> list[Counted]:
    """Count between the profiler's start and stop in the case's process.

    Counters that this ncu does not know make it fail; then only the counters that verdicts need are
    used.
    """
    started = time.monotonic()
    options = ("--profile-from-start", "off")
    try:
        return ncu(program(case), metrics=WANTED, options=options, timeout=timeout)
    except RuntimeError as error:
        left = timeout - (time.monotonic() - started)
        if "metric" not in str(error).lower() or left <= 0:
            raise
        return ncu(program(case), metrics=NEEDED, options=options, timeout=left)


def launch(case: Case) -> None:
    """Run the kernels of a case: first unseen, so that nothing compiles under the profiler."""
    import torch

    run = _runner(case)
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _runner(case: Case) -> Any:
    """Return the function that runs a case once on the GPU."""
    from functools import partial

    from benchmarks.providers import providers
    from benchmarks.study.counting import run_pass
    from tilegen.check.reference import make_inputs
    from tilegen.emit.kernel_files import load
    from tilegen.emit.render import render
    from tilegen.kernels.config import Kernel
    from tilegen.kernels.panels import Launch
    from tilegen.problem import AttentionProblem

    problem = AttentionProblem.parse(case.problem)
    inputs = make_inputs(problem, device="cuda")
    if case.provider != "tilegen":
        (peer,) = (one for one in providers() if one.name == case.provider)
        return partial(peer.prepare(problem, "cuda"), inputs.q, inputs.k, inputs.v)
    kernels: dict[Kernel, Launch] = {
        kernel: load(render(problem, config, kernel)).launch
        for kernel, config in case.tiles.items()
    }
    return partial(run_pass, kernels, inputs, panel_rows=case.panel_rows)


def run_all(todo: list[Case], gpu: GpuSpec, out: Path, *, deadline: float) -> bool:
    """Profile the cases until the time is over; return whether nothing failed."""
    rows: list[MeasureRow] = []
    broken: Counter[str] = Counter()
    for index, case in enumerate(todo):
        left = deadline - time.monotonic()
        if left <= 0:
            print(f"time is over, {len(todo) - index} cases left", flush=True)
            break
        try:
            new = rows_of(case, profile(case, timeout=min(left, ONE_CASE)), gpu)
        except RuntimeError as error:
            # A library may not take a problem, and the last case has no more time than is left.
            if case.provider not in PEERS and time.monotonic() < deadline:
                broken[case.experiment] += 1
            print(f"{case.name}: {error}", flush=True)
            new = []
        rows += new
        if not any(_same_group(case, later) for later in todo[index + 1 :]):
            new += (together := group_rows([row for row in rows if _same_group(case, row)]))
            rows += together
        for row in new:
            append(out / "rows.csv", row)
            print(_line(row), flush=True)
        write(out / "verdicts.csv", list(verdicts(rows, broken)))
    return not broken and not any(row.verdict == "fail" for row in rows)


def _same_group(case: Case, other: Case | MeasureRow) -> bool:
    return (case.experiment, case.group) == (other.experiment, other.group)


def _line(row: MeasureRow) -> str:
    ratio = "" if row.ratio is None else f" {row.ratio} of predicted"
    who = " ".join(filter(None, (row.provider, row.family, row.kernel)))
    return f"{row.experiment} {row.group} {who} {row.quantity}:{ratio} {row.verdict}  {row.detail}"


def main(
    out: Annotated[Path, typer.Option(help="Folder for the result files.")] = Path("out"),
    minutes: Annotated[float, typer.Option(help="Start nothing new after this long.")] = 20.0,
    only: Annotated[
        list[str] | None, typer.Option(help="Experiments to run: E1, E3, ...; all by default.")
    ] = None,
    launch_only: Annotated[
        str | None,
        typer.Option("--launch", help="Only run this case's kernels, unprofiled."),
    ] = None,
) -> None:
    """Measure experiments E1 and E3 to E6 with Nsight Compute and judge them.

    Example: python -m benchmarks.io_counters --out io-counters --minutes 20
    """
    if unknown := set(only or ()) - EXPERIMENTS.keys():
        print(f"expected experiments out of {', '.join(EXPERIMENTS)}, got {', '.join(unknown)}")
        raise typer.Exit(1)
    gpu = gpu_at_hand("nothing to count")
    if launch_only is not None:
        launch(Case.from_json(launch_only))
        return
    if shutil.which("ncu") is None:
        print("ncu (Nsight Compute) is not installed: nothing counted")
        return
    deadline = time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    (out / "rows.csv").unlink(missing_ok=True)
    if not run_all(cases(gpu, only or ()), gpu, out, deadline=deadline):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
