"""Run the net: `python -m tests.differential --seed 1 --minutes 60 --out found.jsonl`.

The problems are run by a child, a chunk at a time, on kernels compiled for the CPU: a crash costs
one problem, and memory starts anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

CHUNK = 100
"""Problems that one child runs."""


def main(
    minutes: Annotated[float, typer.Option(help="How long to go on; 0: to the range's end.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the problems.")] = 1,
    numbers: Annotated[str, typer.Option("--range", help="A:B, the problems A to B - 1.")] = "0:",
    out: Annotated[
        Path | None, typer.Option(help="File of results; problems it has are not run again.")
    ] = None,
    problem: Annotated[str, typer.Option(help="Run this problem alone.")] = "",
    summary: Annotated[
        list[Path] | None, typer.Option(help="Print the summary of such files.")
    ] = None,
    compile_every: Annotated[
        int, typer.Option(help="Compile every so many for sm_90 too; 0: none.")
    ] = 20,
) -> None:
    """Run random problems through tilegen's kernels; exit 1 where any is wrong or crashes."""
    if summary:
        from tests.differential.report import read
        from tests.differential.report import summary as told

        print(told(read(summary)), end="")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = out or Path(folder) / "lines.jsonl"
        first, last = (int(end) if end else None for end in numbers.split(":"))
        if problem:
            raise typer.Exit(_child("--problem", problem).returncode)
        deadline = time.monotonic() + 60 * minutes if minutes else None
        if deadline is None and last is None:
            raise typer.BadParameter("expected --minutes, or an end of --range")
        failed = _all(seed, first or 0, last, path, deadline, compile_every)
    raise typer.Exit(1 if failed else 0)


def _all(
    seed: int, first: int, last: int | None, path: Path, deadline: float | None, every: int
) -> int:
    """Run chunks until the range or the time ends; return how many problems failed."""
    from tests.differential.report import append, lost, read, summary

    while (last is None or first < last) and (deadline is None or time.monotonic() < deadline):
        end = first + CHUNK if last is None else min(last, first + CHUNK)
        left = 0.0 if deadline is None else deadline - time.monotonic()
        child = _child("--chunk", f"{seed} {first} {end} {every} {left}", str(path))
        if child.returncode > 0:  # an error of the net itself
            raise typer.Exit(child.returncode)
        if child.returncode and (number := _first_missing(seed, first, end, path)) is not None:
            append(path, lost(seed, number, f"the process ended by signal {-child.returncode}"))
            continue  # with what follows
        first = end
    lines = [line for line in read([path]) if line.seed == seed]
    print(summary(lines), end="")
    return sum(line.outcome in ("wrong", "crashed") for line in lines)


def _first_missing(seed: int, first: int, end: int, path: Path) -> int | None:
    from tests.differential.report import read

    known = {line.number for line in read([path]) if line.seed == seed}
    return next((number for number in range(first, end) if number not in known), None)


def _child(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run `tests.differential.chunk` with compiled kernels and a cache directory of its own."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "TILEGEN_CPU": "kernels",
            "OMP_NUM_THREADS": "1",
            "TILEGEN_CACHE_DIR": cache,
        }
        for name in ("TILEGEN_CACHE_PATH", "TILEGEN_TUNE", "TILEGEN_DETERMINISTIC"):
            environment.pop(name, None)
        command = [sys.executable, "-m", "tests.differential.chunk", *arguments]
        return subprocess.run(command, env=environment, check=False)


if __name__ == "__main__":
    typer.run(main)
