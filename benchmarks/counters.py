"""Predicted against counted: the model's bytes and resources beside Nsight Compute's counters.

    python -m benchmarks.counters --csv counters.csv

Needs `ncu`. For every workload of the catalogue's head all its kernels run once under the profiler,
with the configs that a call would use, from cold caches.
"""

from __future__ import annotations

import contextlib
import csv as csv_module
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.environment import ROOT, Environment, gpu_at_hand
from benchmarks.rows import write
from benchmarks.workloads import Workload, head
from tilegen.choose.ranker import estimate
from tilegen.compiling.digests import noting_launches
from tilegen.emit.render import render
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.model.estimate import CostEstimate
from tilegen.pipeline import choose
from tilegen.task import KernelTask, Tiled

READ = "l1tex__m_xbar2l1tex_read_bytes.sum"
WRITE = "l1tex__m_l1tex2xbar_write_bytes.sum"
DRAM_READ = "dram__bytes_read.sum"
DRAM_WRITE = "dram__bytes_write.sum"
REGISTERS = "launch__registers_per_thread"
SMEM = "launch__shared_mem_per_block_dynamic"
DIGEST = "binary:"
"""Start of the lines in which the profiled program names its binaries."""
METRICS = (READ, WRITE, DRAM_READ, DRAM_WRITE, REGISTERS, SMEM)


@dataclass(frozen=True, kw_only=True)
class CounterRow(Environment):
    """One kernel launch: what the model says, what was counted, and counted over predicted."""

    workload: str
    problem: str
    kernel: str
    config: str
    predicted_read_bytes: int
    counted_read_bytes: int
    read_ratio: float | None
    predicted_write_bytes: int
    counted_write_bytes: int
    write_ratio: float | None
    predicted_dram_bytes: int
    counted_dram_bytes: int
    dram_ratio: float | None
    predicted_registers: int
    counted_registers: int
    registers_ratio: float | None
    predicted_smem_bytes: int
    counted_smem_bytes: int
    smem_ratio: float | None
    digest: str
    """Digest of the binary that was counted; empty if it is not known."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The profiler's counts of one launch."""

    function: str
    values: dict[str, float]
    """Counts by metric; those of traffic in bytes."""
    digest: str = ""
    """Digest of the binary, where the program named it."""


def kernels_of(workload: Workload, spec: GpuSpec) -> dict[Kernel, TileConfig]:
    """Return the configs that a call of the workload would use."""
    direction = None if "backward" in workload.directions else "forward"
    chosen = choose(workload.problem.bucket, spec, direction, may_compile=True)
    return {kernel: one.config for kernel, one in chosen.items()}


def launch(workload: Workload, spec: GpuSpec) -> None:
    """Run every kernel of the workload once, under the profiler."""
    from benchmarks.check import make_inputs
    from tilegen.check.verification import run

    problem = workload.problem.normal()
    kernels = {k: render(problem, config, k) for k, config in kernels_of(workload, spec).items()}
    with noting_launches() as launched:
        run(kernels, make_inputs(problem), problem.head_dim_qk**-0.5)
    print("\n".join(["", *(f"{DIGEST} {name} {digest}" for name, digest in launched.named)]))


def profile(workload: Workload, *, timeout: float) -> list[Counted]:
    """Count a workload's kernels with Nsight Compute. Raises RuntimeError."""
    program = [sys.executable, "-m", "benchmarks.counters", f"--launch={workload.name}"]
    only = ("--kernel-name", "regex:^attention_(fwd|bwd)")
    return ncu(program, options=only, timeout=timeout)


def ncu(
    program: Sequence[str],
    *,
    metrics: Sequence[str] = METRICS,
    options: Sequence[str] = (),
    timeout: float,
) -> list[Counted]:
    """Count the launches of `program` with Nsight Compute, from cold caches.

    Raises RuntimeError with the program's last line if it fails.
    """
    command = [
        *("ncu", "--csv", "--print-units", "base", "--metrics", ",".join(metrics)),
        *("--clock-control", "none", "--cache-control", "all", *options),
        *program,
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, process_group=0
    ) as process:
        try:
            said, errors = process.communicate(timeout=timeout)
        except BaseException as error:  # no program that is profiled may go on beside the next
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"ncu took longer than {timeout:.0f} s") from None
            raise
    counted = parse(said)
    if process.returncode or not counted:  # without the right to count it exits with 0
        words = (said + errors).strip().splitlines()[-3:]
        raise RuntimeError(f"ncu counted nothing ({process.returncode}): {' / '.join(words)}")
    return counted


def parse(text: str) -> list[Counted]:
    """Return the launches in the CSV that ncu printed, after lines of its own."""
    _, header, table = text.partition('"ID",')
    digests = dict(re.findall(rf"^{DIGEST} (\S+) (\S+)$", text, re.MULTILINE))
    launches: dict[str, Counted] = {}
    for row in csv_module.DictReader(io.StringIO(header + table)):
        function = row["Kernel Name"]
        new = Counted(function=function, values={}, digest=digests.get(function, ""))
        counted = launches.setdefault(row["ID"], new)
        with contextlib.suppress(ValueError):  # n/a: this GPU does not have the counter
            counted.values[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return list(launches.values())


def compare(workload: Workload, predicted: CostEstimate, counted: Counted) -> CounterRow:
    """Return the row of one launch."""
    values = counted.values
    pairs = {
        "read": (predicted.read_bytes, values[READ]),
        "write": (predicted.write_bytes, values[WRITE]),
        "dram": (predicted.dram_bytes, values[DRAM_READ] + values[DRAM_WRITE]),
        "registers": (predicted.registers, values[REGISTERS]),
        "smem": (predicted.smem_bytes, values[SMEM]),
    }
    columns: dict[str, Any] = {}
    for name, (expected, counted_bytes) in pairs.items():
        unit = "" if name == "registers" else "_bytes"
        columns[f"predicted_{name}{unit}"] = expected
        columns[f"counted_{name}{unit}"] = int(counted_bytes)
        columns[f"{name}_ratio"] = round(counted_bytes / expected, 4) if expected else None
    return CounterRow(
        workload=workload.name,
        problem=workload.problem.key,
        kernel=predicted.kernel,
        config=predicted.config.key,
        digest=counted.digest,
        **columns,
    )


def measure(workload: Workload, spec: GpuSpec, *, timeout: float) -> Iterator[CounterRow]:
    """Yield one row per kernel of the workload. Raises RuntimeError if ncu fails."""
    counted = {launch.function: launch for launch in profile(workload, timeout=timeout)}
    split: TileConfig | None = None
    for kernel, config in kernels_of(workload, spec).items():
        function = render(workload.problem, config, kernel).function
        if function not in counted:
            raise RuntimeError(f"ncu saw no launch of {function}, only {', '.join(counted)}")
        if missing := [m for m in METRICS if m not in counted[function].values]:
            raise RuntimeError(f"ncu has no value of {', '.join(missing)} for {function}")
        joined = split if KERNELS[kernel].joins else None
        predicted = estimate(
            Tiled(replace(KernelTask.of(kernel, workload.problem, spec), joined=joined), config)
        )
        split = config if KERNELS[kernel].splits else split
        yield compare(workload, predicted, counted[function])


def main(
    csv: Annotated[Path, typer.Option(help="Result file; replaced.")] = Path("counters.csv"),
    minutes: Annotated[float, typer.Option(help="Start nothing new after this long.")] = 10.0,
    launch_only: Annotated[
        str | None,
        typer.Option("--launch", help="Only run this workload's kernels once, unprofiled."),
    ] = None,
) -> None:
    """Compare predicted with counted bytes, registers and shared memory.

    Example: python -m benchmarks.counters --csv counters.csv
    """
    spec = gpu_at_hand("nothing to count")
    if launch_only is not None:
        launch(next(w for w in head() if w.name == launch_only), spec)
        return
    if shutil.which("ncu") is None:
        print("ncu (Nsight Compute) is not installed: nothing counted")
        return
    deadline = time.monotonic() + 60 * minutes
    failures = 0
    lines: list[CounterRow] = []
    for workload in head():
        left = deadline - time.monotonic()
        if left <= 0:
            print("time is over")
            break
        try:
            for row in measure(workload, spec, timeout=left):
                lines.append(row)
                write(csv, lines)
                print(f"{row.workload} {row.kernel} {row.config}: {ratios(row)}", flush=True)
        except RuntimeError as error:
            failures += time.monotonic() < deadline  # or only its time was over
            print(f"{workload.name}: {error}", flush=True)
    if failures:
        raise typer.Exit(1)


def ratios(row: CounterRow) -> str:
    """Return counted over predicted, as the terminal shows it."""
    return (
        f"read {row.read_ratio}, write {row.write_ratio}, dram {row.dram_ratio}, "
        f"registers {row.registers_ratio}, smem {row.smem_ratio} of predicted"
    )


if __name__ == "__main__":
    typer.run(main)
