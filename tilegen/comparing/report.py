"""Text and picture of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegen.plots import check_file, save
from tilegen.units import memory_text, ratio_text, seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tilegen.comparing.compare import Cell, Row

FORMATS = (".png", ".svg")
GREY = "#808080"
"""Colour of axes and text, which can be read on white and on black."""
COLOURS = {
    "tilegen": "#1f9e89",
    "sdpa flash": "#e6803c",
    "sdpa efficient": "#b565c9",
    "sdpa cudnn": "#5b8ff9",
    "sdpa math": "#c8a415",
    "flex": "#d6477a",
    "standard": GREY,
}
LENGTH, COLUMN = 10, 14
"""Least widths of the columns of a table [characters]."""


def title(row: Row) -> str:
    """Return the line above the rows of a comparison."""
    parts = row.problem.split()
    problem = " ".join(part for part in parts if not part.startswith(("q", "kv")))
    threads = f", {row.threads} thread{'s' * (row.threads != 1)}" if row.threads else ""
    kind = "predicted" if any(cell.predicted for cell in row.cells) else "measured"
    return f"{problem}, {kind}, on {row.device}{threads}"


def header(row: Row, width: int = 0) -> str:
    """Return the heads of the columns; see `lines`."""
    line = _line("length", row, [cell.attention for cell in row.cells])
    return _tall("length", "attention", "time", "memory") if 0 < width < len(line) else line


def lines(row: Row, width: int = 0) -> Iterator[str]:
    """Yield the line of times, with their ratios to tilegen's, and the line of memory. Where a
    terminal's `width` is too small for all attentions, each has a line of its own."""
    head = f"{row.length} {'fwd' if row.direction == 'forward' else 'bwd'}"
    if header(row, width) != header(row):
        for cell in row.cells:
            yield _tall(head, cell.attention, _time(cell), _memory(cell))
            head = ""
        return
    yield _line(head, row, [_time(cell) for cell in row.cells])
    yield _line("", row, [_memory(cell) for cell in row.cells])


def _line(first: str, row: Row, texts: Sequence[str]) -> str:
    names = [cell.attention for cell in row.cells]
    columns = zip(names, texts, strict=True)
    cells = (f"{text:>{max(COLUMN, len(name) + 2)}}" for name, text in columns)
    return f"{first:<{LENGTH}}{''.join(cells)}".rstrip()


def _tall(first: str, attention: str, time: str, memory: str) -> str:
    return f"{first:<{LENGTH}}{attention:<{COLUMN}}{time:>{COLUMN}}{memory:>{COLUMN}}"


def _time(cell: Cell) -> str:
    if cell.seconds is None:
        return "-"
    ratio = f" {ratio_text(cell.ratio)}x" if cell.ratio and cell.attention != "tilegen" else ""
    return f"{seconds_text(cell.seconds)}{ratio}"


def _memory(cell: Cell) -> str:
    if cell.peak_bytes is None:
        return f"({memory_text(cell.counted_bytes)})"
    return memory_text(cell.peak_bytes)


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the legend of the rows, and the reason for each missing time once."""
    if any(cell.predicted for row in rows for cell in row.cells):
        yield (
            "times are the model's; on an H200 they were within 25 % of measured times for kernels "
            "with a loop, and nobody has timed these kernels on other GPUs; below them memory"
        )
    else:
        yield (
            "median times, and times over tilegen's (above 1: tilegen is faster); below them the "
            "peak of memory of a process that computes the pass"
        )
    yield "memory is with q, k and v; in brackets by formula, a lower bound"
    names: dict[str, dict[str, list[str]]] = {}  # by reason: the cases of each attention
    for row in rows:
        for cell in row.cells:
            if cell.reason:
                at = f"{row.length} {row.direction}"
                names.setdefault(cell.reason, {}).setdefault(cell.attention, []).append(at)
    for reason, of_reason in names.items():
        whole = all(len(cases) == len(rows) for cases in of_reason.values())
        where = (f"{name} at {', '.join(cases)}" for name, cases in of_reason.items())
        yield f"{', '.join(of_reason) if whole else '; '.join(where)}: {reason}"


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw time and memory against the length, a row of panels for each pass. Raises
    Unsupported."""
    check_file(file, FORMATS)
    from matplotlib.figure import Figure

    directions = list(dict.fromkeys(row.direction for row in rows))
    figure = Figure(figsize=(9.0, 0.9 + 3.0 * len(directions)), layout="constrained")
    figure.patch.set_alpha(0.0)
    panels = figure.subplots(len(directions), 2, squeeze=False)
    for (times, peaks), direction in zip(panels, directions, strict=True):
        of_pass = [row for row in rows if row.direction == direction]
        _draw_panel(times, of_pass, "seconds", 1e3, f"{direction}: time, ms")
        _draw_panel(peaks, of_pass, "peak_bytes", 2.0**-20, f"{direction}: peak of memory, MiB")
    figure.suptitle(title(rows[0]), color=GREY, fontsize=10)
    drawn = {line.get_label(): line for axes in panels.flat for line in axes.lines}
    named = [drawn[name] for name in COLOURS if name in drawn]
    below: Any = "outside lower center"  # matplotlib's types lack it
    figure.legend(handles=named, ncols=len(named), loc=below, labelcolor=GREY, framealpha=0.0)
    undated = {"Date": None} if file.suffix == ".svg" else {}  # one picture for one comparison
    save(figure, file, dpi=150, metadata=undated)


def _draw_panel(axes: Axes, rows: Sequence[Row], field: str, factor: float, label: str) -> None:
    for name, colour in COLOURS.items():
        points = [
            (row.length, factor * value)
            for row in rows
            for cell in row.cells
            if cell.attention == name and (value := getattr(cell, field)) is not None
        ]
        if points:
            axes.loglog(*zip(*points, strict=True), "o-", ms=4, color=colour, label=name)
    from matplotlib.ticker import LogLocator

    lengths = [row.length for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths], minor=False)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel("tokens", color=GREY)
    axes.set_title(label, color=GREY, fontsize=10, loc="left")
    axes.patch.set_alpha(0.0)
    axes.tick_params(colors=GREY, which="both")
    axes.grid(color=GREY, alpha=0.25)
    for spine in axes.spines.values():
        spine.set_color(GREY)
