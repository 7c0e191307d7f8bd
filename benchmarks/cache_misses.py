"""The theory, measured: misses of emitted kernels in simulated caches, beside formulas and bounds.

    python -m benchmarks.cache_misses --minutes 30   # counts; the same command goes on
    python -m benchmarks.cache_misses --times        # seconds; on an idle machine
    python -m benchmarks.cache_misses --draw         # figures and tables of benchmarks/io_study.md

Forward and backward kernels run under valgrind's cachegrind, compiled for AVX2, by both schedules:
FlashAttention's and the small-cache one. The last level of the simulated cache is the fast memory
M of the theorems. Needs valgrind, cc and objcopy; no GPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import typer

from benchmarks.environment import ROOT, environment
from benchmarks.io_study import OUT, PAGE
from benchmarks.rows import append, read, same_values, with_environment, write
from benchmarks.study import miss_figures, miss_page, miss_times, misses, page
from benchmarks.study.miss_plan import plan
from benchmarks.study.misses import MissRow, Point
from tilegen.compiling import workers

SHORTEST = 5.0
"""Do not start a point with less time than this left [s]."""


def main(
    out: Annotated[Path, typer.Option(help="Folder for result file and figures.")] = OUT,
    minutes: Annotated[float, typer.Option(help="Time limit; the same command goes on.")] = 30.0,
    processes: Annotated[int, typer.Option(help="Points that are counted at once.")] = 1,
    times: Annotated[
        bool, typer.Option("--times", help="Count nothing: time both schedules on one core.")
    ] = False,
    draw: Annotated[
        bool, typer.Option("--draw", help="Count nothing: figures and tables from the file.")
    ] = False,
) -> None:
    """Count cache misses of emitted kernels and compare them with formulas and bounds.

    Example: python -m benchmarks.cache_misses --minutes 30 --out /tmp/misses
    """
    if times:
        write(out / miss_page.TIMES, list(miss_times.time_rows()))
        return
    if draw:
        miss_figures.draw_all(out)
        if out == OUT:
            PAGE.write_text(page.fill(PAGE.read_text(encoding="utf-8"), out), encoding="utf-8")
        return
    if reason := misses.missing():
        print(f"skipped: {reason}")
        return
    count_all(out / miss_page.FILE, time.monotonic() + 60 * minutes, processes)


def count_all(path: Path, deadline: float, processes: int = 1) -> None:
    """Append the rows of points that a file lacks, until the deadline."""
    points = list(plan())
    known = same_values(read(path), [*asdict(points[0])])
    writing = Lock()

    def count(number: int, point: Point) -> None:
        said, started = f"[{number}/{len(points)}] {describe(point)}", time.monotonic()
        if started + SHORTEST > deadline:
            return
        try:
            columns = counted_apart(point, deadline - started)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{said}: not counted: {str(error)[-500:]}", flush=True)
            return
        seconds = time.monotonic() - started
        with writing:
            append(path, row_of(point, columns, seconds))
        megabytes, ratio = columns["counted_bytes"] / 1e6, columns["counted_over_predicted"]
        print(f"{said}: {megabytes:.2f} MB, {ratio:.3f} of predicted, {seconds:.0f} s", flush=True)

    pool = ThreadPoolExecutor(processes)
    try:
        for done in [
            pool.submit(count, number, point)
            for number, point in enumerate(points, 1)
            if tuple(map(str, asdict(point).values())) not in known
        ]:
            done.result()
    finally:  # a stopped run keeps the points that it has begun
        pool.shutdown(cancel_futures=True)
    counted = len(same_values(read(path), [*asdict(points[0])]))
    print(
        f"{counted} of {len(points)} points are counted; the same command goes on with the others"
    )


def counted_apart(point: Point, limit: float) -> dict[str, Any]:
    """Count a point in a process of its own. Raises RuntimeError if that fails, and TimeoutExpired
    after `limit` seconds."""
    command = workers.python("from benchmarks.study.misses import serve; serve()")
    with subprocess.Popen(
        [*command, json.dumps(asdict(point))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=workers.environment(TRITON_INTERPRET="0", OMP_NUM_THREADS="1"),
        start_new_session=True,  # so that valgrind ends too
    ) as process:
        try:
            printed, errors = process.communicate(timeout=limit)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise RuntimeError(errors.strip()[-1500:])
    return json.loads(printed)


def row_of(point: Point, columns: dict[str, Any], seconds: float) -> MissRow:
    """Return the row of a counted point."""
    values = asdict(point) | columns | {"seconds": seconds}
    version = misses.valgrind_version()
    return with_environment(MissRow, environment(), **values, valgrind=version)


def describe(point: Point) -> str:
    """Return a point in a few words."""
    cache = f"{point.memory_kb} KB, {misses.SCHEDULES[point.schedule]} {point.tiles}"
    return f"{point.direction} {point.mask} {point.seqlen}, d {point.head_dim}, {cache}"


if __name__ == "__main__":
    typer.run(main)
