"""The tables of benchmarks/whole_runs.md and their figure, from the result files of whole runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks import plots
from benchmarks.environment import RESULTS
from benchmarks.plots import BLUE, GREEN, GREY, ORANGE
from benchmarks.rows import grouped, markdown, read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, str]
MISSING = "-"
PAGE = RESULTS.parent / "whole_runs.md"
TABLES = "## Tables\n"
"""Heading of the page, after which nothing else follows."""
Column = tuple[str, Sequence[tuple[str, str, str]]]
"""Name of a column, and its numbers: attention, column of the result file, format."""
OWN = ("tilegen", "sdpa", "eager")
BOTH_TIMES = ("over_tilegen", "{:.2f}"), ("cpu_over_tilegen", "{:.2f}")
BOTH_TOKENS = ("first_over_tilegen", "{:.2f}"), ("per_token_over_tilegen", "{:.2f}")
COLUMNS: dict[str, tuple[str, Sequence[Column]]] = {
    "Training": (
        "train",
        (
            ("tokens/s", [("tilegen", "tokens_per_s", "{:.0f}")]),
            ("over eager: wall, CPU", [("eager", *one) for one in BOTH_TIMES]),
            ("over SDPA: wall, CPU", [("sdpa", *one) for one in BOTH_TIMES]),
            (
                "attention's share: tilegen, SDPA, eager",
                [(name, "attention_share", "{:.0%}") for name in OWN],
            ),
            ("peak MiB: tilegen, SDPA, eager", [(name, "peak_mib", "{:.0f}") for name in OWN]),
            ("losses apart from eager", [("tilegen", "deviation", "{:.1g}")]),
        ),
    ),
    "Losses of fifty steps": (
        "losses",
        (
            ("eager", [("eager", "deviation", "{:.2g}")]),
            ("SDPA", [("sdpa", "deviation", "{:.2g}")]),
            ("tilegen", [("tilegen", "deviation", "{:.2g}")]),
            ("of SDPA's", [("tilegen", "of_sdpa", "{:.2g}")]),
            ("a repeat", [("tilegen", "noise", "{:.2g}")]),
        ),
    ),
    "Generation": (
        "generate",
        (
            ("first token", [("tilegen", "first_ms", "{:.1f} ms")]),
            ("each", [("tilegen", "per_token_ms", "{:.1f} ms")]),
            ("over eager: first, each", [("eager", *one) for one in BOTH_TOKENS]),
            ("over SDPA: first, each", [("sdpa", *one) for one in BOTH_TOKENS]),
            ("tokens like eager's", [("tilegen", "same_tokens", "{:.0%}")]),
            ("error of logits, of SDPA's", [("tilegen", "logits_of_sdpa", "{:.2f}")]),
        ),
    ),
}
"""The tables by title: result file and columns."""
STYLES = {
    "tilegen": (BLUE, "tilegen"),
    "sdpa": (ORANGE, "SDPA"),
    "eager": (GREY, "eager attention"),
    "flex_attention": (GREEN, "FlexAttention"),
}
"""Colour and label of each attention."""


def lines_of(folder: Path) -> Iterator[str]:
    """Yield the tables of a folder's result files with their titles; none without rows."""
    for title, (file, columns) in COLUMNS.items():
        rows = read(folder / f"{file}.csv")
        names = [name for name in ("case", "threads") if rows and name in rows[0]]
        cells = [
            [*key, *(", ".join(_cell(case, *one) for one in numbers) for _, numbers in columns)]
            for key, case in grouped(rows, names, "attention").items()
        ]
        if cells:
            yield f"### {title}\n\n{markdown((*names, *(name for name, _ in columns)), cells)}\n"


def _cell(case: Mapping[str, Row], name: str, column: str, form: str) -> str:
    """Return a number of an attention, or why there is none."""
    row = case.get(name)
    if row is None:
        return MISSING
    if row.get("status", "ok") != "ok":
        return row["status"]
    return form.format(float(row[column])) if row[column] else MISSING


def with_tables(page: str, folder: Path) -> str:
    """Return a page with the tables of a folder after its heading TABLES."""
    prose, heading, _ = page.partition(TABLES)
    return f"{prose}{heading}\n" + "\n".join(lines_of(folder))


def figure(rows: Sequence[Row]) -> Figure:
    """Draw the time of a step over tilegen's, with the part that attention takes."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    some = [row for row in rows if row["status"] != "unsupported"]
    cases = grouped(some, ("case", "threads"), "attention")
    shown = [name for name in STYLES if any(name in case for case in cases.values())]
    drawn, axis = plt.subplots(figsize=(9.0, 1.2 + 0.62 * len(cases)))
    height = 0.8 / len(shown)
    for place, case in enumerate(cases.values()):
        for number, name in enumerate(shown):
            at, (colour, label) = place + (number - (len(shown) - 1) / 2) * height, STYLES[name]
            row = case.get(name)
            if row is None:
                continue
            if row["status"] != "ok" or not row["over_tilegen"]:
                axis.text(0.02, at, f"{label} {row['status']}", va="center", fontsize=7)
                continue
            length, share = float(row["over_tilegen"]), float(row["attention_share"] or 0)
            axis.barh(at, length * share, height, color=colour)
            axis.barh(at, length * (1 - share), height, length * share, color=colour, alpha=0.4)
    axis.axvline(1.0, color="black", linewidth=0.6)
    labels = [f"{case}, threads: {threads}" for case, threads in cases]
    axis.set_yticks(range(len(cases)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("time of a training step over tilegen's; attention dark, the rest pale")
    named = [Patch(color=STYLES[name][0], label=STYLES[name][1]) for name in shown]
    axis.legend(handles=named, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(shown))
    drawn.tight_layout()
    return drawn


def main(
    folder: Annotated[Path, typer.Option(help="Folder of result files.")] = RESULTS / "cpu",
    write: Annotated[
        bool, typer.Option("--write", help="Write them into the page, and draw its figure.")
    ] = False,
) -> None:
    """Print the tables of a folder's result files.

    Example: python -m benchmarks.whole summary
    """
    print(*lines_of(folder), sep="\n")
    if write:
        PAGE.write_text(with_tables(PAGE.read_text("utf-8"), folder), encoding="utf-8")
        plots.require_matplotlib()
        plots.save(figure(read(folder / "train.csv")), folder / "train.svg")
