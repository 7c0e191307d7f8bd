"""Figures of whole runs, drawn from their result files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.plots import BLUE, GREEN, GREY, ORANGE, require_matplotlib, save
from benchmarks.rows import read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, str]
STYLES = {
    "tilegen": (BLUE, "tilegen"),
    "sdpa": (ORANGE, "SDPA"),
    "eager": (GREY, "eager attention"),
    "flex_attention": (GREEN, "FlexAttention"),
}
"""Colour and label of each attention."""


def draw_all(folder: Path) -> None:
    """Draw each figure of which a folder has the rows, beside them."""
    savers = {"train": save_training, "sparse_share": save_sparse}
    for name, save_rows in savers.items():
        path = folder / f"{name}.csv"
        if rows := read(path):
            save_rows(rows, path)


def save_training(rows: Sequence[Row], path: Path) -> None:
    """Draw the figure of training, and write it beside the rows."""
    require_matplotlib()
    save(training(rows), path.with_suffix(".svg"))


def save_sparse(rows: Sequence[Row], path: Path) -> None:
    """Draw the times of the longest sequences, a panel for each dtype and direction."""
    require_matplotlib()
    longest = max(int(row["seqlen"]) for row in rows)
    kinds = [(row["dtype"], row["direction"]) for row in rows if int(row["seqlen"]) == longest]
    panels = {
        f"{longest} tokens, {dtype}, {direction}": [
            row
            for row in rows
            if (row["seqlen"], row["dtype"], row["direction"]) == (str(longest), dtype, direction)
        ]
        for dtype, direction in dict.fromkeys(kinds)
    }
    labels = "share of blocks kept", "ms"
    drawn = curves(panels, x="share", y="ms", labels=labels, logarithmic=False)
    save(drawn, path.with_suffix(".svg"))


def training(rows: Sequence[Row]) -> Figure:
    """Draw the time of a step over tilegen's, with the part that attention takes."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    by_case: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row["status"] != "unsupported":
            by_case[f"{row['case']}, threads: {row['threads']}"][row["attention"]] = row
    shown = [name for name in STYLES if any(name in case for case in by_case.values())]
    drawn, axis = plt.subplots(figsize=(9.0, 1.2 + 0.62 * len(by_case)))
    height = 0.8 / len(shown)
    for place, case in enumerate(by_case.values()):
        for number, name in enumerate(shown):
            at = place + (number - (len(shown) - 1) / 2) * height
            row = case.get(name)
            if row is None:
                continue
            if row["status"] != "ok" or not row["over_tilegen"]:
                axis.text(0.02, at, f"{STYLES[name][1]} {row['status']}", va="center", fontsize=7)
                continue
            length = float(row["over_tilegen"])
            share = float(row["attention_share"] or 0)
            colour = STYLES[name][0]
            axis.barh(at, length * share, height, color=colour)
            axis.barh(at, length * (1 - share), height, length * share, color=colour, alpha=0.4)
    axis.axvline(1.0, color="black", linewidth=0.6)
    axis.set_yticks(range(len(by_case)), list(by_case), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("time of a training step over tilegen's; attention dark, the rest pale")
    named = [Patch(color=STYLES[name][0], label=STYLES[name][1]) for name in shown]
    axis.legend(handles=named, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(shown))
    drawn.tight_layout()
    return drawn


def curves(
    panels: Mapping[str, Sequence[Row]],
    *,
    x: str,
    y: str,
    labels: tuple[str, str],
    logarithmic: bool = True,
) -> Figure:
    """Draw the columns `y` of rows against their columns `x`, a panel for each title."""
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.8), squeeze=False)
    for axis, (title, rows) in zip(axes[0], panels.items(), strict=True):
        for name, (colour, text) in STYLES.items():
            of_name = [row for row in rows if row["attention"] == name and row[y]]
            points = sorted((float(row[x]), float(row[y])) for row in of_name)
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", ms=4, color=colour, label=text)
        if logarithmic:
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
        else:
            axis.set_xlim(left=0)
            axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(labels[0])
    axes[0][0].set_ylabel(labels[1])
    axes[0][0].legend()
    drawn.tight_layout()
    return drawn
