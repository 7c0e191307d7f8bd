"""The study of I/O: words that tilegen's kernels move beside what the papers prove. No GPU needed.

    python -m benchmarks.io_study

The emitted kernels run compiled for the CPU, at sizes that fit, and every word they load or
store is counted. Writes result files, figures and the tables of benchmarks/io_study.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.environment import RESULTS, ROOT
from benchmarks.rows import append, read

OUT = RESULTS / "io_study"
PAGE = ROOT / "benchmarks" / "io_study.md"


def write(path: Path, rows: Iterable[Any]) -> None:
    """Replace a result file by these rows; a run that is killed leaves those it has."""
    path.unlink(missing_ok=True)
    for row in rows:
        append(path, row)


def main(
    out: Annotated[Path, typer.Option(help="Folder for result files and figures.")] = OUT,
    processes: Annotated[int, typer.Option(help="Processes that count; 0: one for each core.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only d = 64 and short sequences: a minute.")
    ] = False,
    draw: Annotated[
        bool, typer.Option("--draw", help="Count nothing: figures and tables from the files.")
    ] = False,
) -> None:
    """Count what emitted kernels move and compare it with bounds and closed forms.

    Example: python -m benchmarks.io_study
    """
    from benchmarks import plots
    from benchmarks.study import figures, masks, page, sweep
    from benchmarks.study.counting import Counters

    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)

    plots.require_matplotlib()
    if not draw:
        dims = (64,) if quick else sweep.HEAD_DIMS
        write(out / "sweep.csv", sweep.sweep_rows(dims))
        say("best tiles: done")
        with Counters(processes or None) as counters:
            lengths = masks.LENGTHS[:2] if quick else masks.LENGTHS
            write(out / "masks.csv", masks.mask_rows(counters, lengths))
            say("masks: counted")
            largest = 60.0 if quick else sweep.LARGEST_COUNTED_KB
            write(
                out / "counts.csv", sweep.count_rows(counters, head_dims=dims, largest_kb=largest)
            )
            say("tiles: counted")
        rows = read(out / "counts.csv")
        write(out / "crossovers.csv", sweep.crossover_rows(rows, dims))
    unequal = [row["tiles"] for row in read(out / "counts.csv") if row["equal"] != "True"]
    figures.draw_all(out)
    say("figures: drawn")
    if out == OUT:
        PAGE.write_text(page.fill(PAGE.read_text(encoding="utf-8"), out), encoding="utf-8")
    say(f"{len(unequal)} tile sets moved other words than predicted {unequal or ''}")
    if unequal:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
