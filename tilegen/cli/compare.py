"""The command `tilegen compare`."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilegen.cli.options import (
    Gpu,
    Json,
    columns,
    console,
    joined,
    positive,
    print_json,
    print_wrapped,
    working,
)
from tilegen.plots import check_file
from tilegen.problem import AttentionProblem

if TYPE_CHECKING:
    from tilegen.comparing.compare import Row


def _without_length(words: list[str]) -> list[str]:
    """Return one notation for words, with a length if it has none."""
    has_length = re.search(r"(?:^|\s)q\d", " ".join(words))
    return joined(words if has_length else [*words, "q512"])


def compare(
    problem: Annotated[
        list[str],
        typer.Argument(help='notation, such as "hq8 d64 bf16 causal"', callback=_without_length),
    ],
    lengths: Annotated[
        str, typer.Option(help="512..8192 doubles from 512 to 8192; or 512,4096")
    ] = "512..8192",
    gpu: Gpu = None,
    backward: Annotated[bool, typer.Option(help="the backward, too")] = False,
    minutes: Annotated[float, typer.Option(help="at most", callback=positive)] = 2.0,
    plot: Annotated[Path | None, typer.Option(help="draw to this .png or .svg")] = None,
    json_: Json = False,
) -> None:
    """Compare time and memory with SDPA, FlexAttention and standard attention, length by length.

    Ctrl-C keeps what is measured. Example: tilegen compare "hq8 d64 bf16 causal" --backward
    """
    from tilegen.comparing import report
    from tilegen.comparing.compare import rows_of

    if plot is not None:
        check_file(plot, report.FORMATS)
    rows: list[Row] = []
    measured = rows_of(
        AttentionProblem.parse(problem[0]), lengths, gpu, backward=backward, minutes=minutes
    )
    try:
        with working(f"measuring, for at most {minutes:.3g} min"):
            for row in measured:
                rows.append(row)
                if not json_:
                    _print(row, rows)
    finally:
        if rows and json_:
            print_json([asdict(row) for row in rows])
        elif rows:
            console.print("")
            print_wrapped(report.notes(rows))
        if rows and plot is not None:
            report.draw(rows, plot)
            if not json_:
                console.print(f"drawn to {plot}")


def _print(row: Row, rows: list[Row]) -> None:
    """Print a row as it is measured, the first after its title."""
    from tilegen.comparing import report

    width = columns()
    if len(rows) == 1:
        console.print(report.title(row))
        console.print(report.header(row, width))
    for line in report.lines(row, width):
        console.print(line)
