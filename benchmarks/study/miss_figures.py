"""Figures of counted misses: against the size of the cache, and where the schedules cross."""

# matplotlib is typed only in part:
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.rows import read
from benchmarks.study import closed, figures
from benchmarks.study.figures import BLACK, BLUE, GREY, ORANGE, RED
from benchmarks.study.miss_page import FILE, Row, best
from benchmarks.study.misses import SCHEDULES, WORD
from tilegen.kernels.spec import Direction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = {"large": (BLUE, "o"), "small": (ORANGE, "s")}
CLOSED = {"large": closed.ideal_large, "small": closed.ideal_small}
DIM_MARKERS = {64: "^", 128: "o", 256: "s", 512: "D"}
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def draw_all(folder: Path) -> None:
    """Draw both figures from the result file."""
    figures.require_matplotlib()
    rows = [row for row in read(folder / FILE) if row["mask"] == "full"]
    figures.save(memory_figure(rows), folder / "misses")
    figures.save(crossing_figure(rows), folder / "misses_crossing")


def memory_figure(rows: list[Row]) -> Figure:
    """Counted misses against M, a panel for each pass and head dim."""
    import matplotlib.pyplot as plt

    cases = sorted(
        {(row["direction"], int(row["head_dim"]), int(row["seqlen"])) for row in rows},
        key=lambda case: (case[0] != "forward", case[1]),
    )
    figure, grid = plt.subplots(2, 3, figsize=(11, 7), layout="constrained")
    for axes, (direction, head_dim, seqlen) in zip(grid.flat, cases, strict=False):
        mine = [
            row for row in rows
            if row["direction"] == direction and int(row["head_dim"]) == head_dim
        ]  # fmt: skip
        _memory_panel(axes, mine, "forward" if direction == "forward" else "backward")
        axes.set_title(f"{direction}, d = {head_dim}, N = {seqlen}", loc="left", fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("simulated cache M in KB")
    for axes in grid[:, 0]:
        axes.set_ylabel("last-level misses in MB")
    for axes in grid.flat[len(cases) :]:
        axes.set_visible(False)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.suptitle("Misses of emitted kernels, dense, fp32: counted, and by formula")
    return figure


def _memory_panel(axes: Axes, rows: list[Row], direction: Direction) -> None:
    head_dim, seqlen = int(rows[0]["head_dim"]), int(rows[0]["seqlen"])
    memory = np.geomspace(24, 680, 60)
    for schedule, (colour, marker) in STYLE.items():
        name = SCHEDULES[schedule]
        curve = [
            WORD * seqlen**2 * CLOSED[schedule](direction, 256 * kb, head_dim, WORD) / 1e6
            for kb in memory
        ]
        axes.plot(memory, curve, color=colour, lw=4, alpha=0.25, label=f"{name}, ideal tiles")
        mine = [row for row in rows if row["schedule"] == schedule]
        fitting = {int(row["memory_kb"]): row for row in mine if row["fits"] == "True"}
        axes.plot(
            sorted(fitting), [int(fitting[kb]["predicted_bytes"]) / 1e6 for kb in sorted(fitting)],
            "_", color=colour, ls="--", lw=1, ms=15, mew=1.8,
            label=f"{name}, formula of the tiles that fit",
        )  # fmt: skip
        for fits, face, text in (("True", colour, "counted"), ("False", "white", "does not fit M")):
            some = [row for row in mine if row["fits"] == fits]
            axes.plot(
                [int(row["memory_kb"]) for row in some],
                [int(row["counted_bytes"]) / 1e6 for row in some],
                marker, color=colour, mfc=face, ls="", ms=6, label=f"{name}, {text}",
            )  # fmt: skip
    bounds = sorted({(int(row["memory_kb"]), int(row["lower_bound_bytes"])) for row in rows})
    x, y = np.array(bounds).T
    axes.plot(x, y / 1e6, color=BLACK, lw=1.2, label="best lower bound")
    square = head_dim**2 / 256
    if 24 < square < 680:
        axes.axvline(square, color=GREY, lw=0.8, ls=":")
        place = axes.get_xaxis_transform()
        axes.text(square * 1.05, 0.93, "M = d²", color="#555555", transform=place)
    axes.set(xscale="log", yscale="log", xlim=(24, 680))
    axes.set_ylim(0.8 * y.min() / 1e6, 1.3 * max(int(row["counted_bytes"]) for row in rows) / 1e6)
    axes.set_xticks([32, 64, 128, 256, 512], ["32", "64", "128", "256", "512"])
    marks = [1, 2, 5, 10, 20, 50, 100, 200]
    marks = [mark for mark in marks if axes.get_ylim()[0] <= mark <= axes.get_ylim()[1]]
    axes.set_yticks(marks, [str(mark) for mark in marks])
    axes.minorticks_off()


def crossing_figure(rows: list[Row]) -> Figure:
    """Misses of the small-cache kernels over FlashAttention's, against d^2 / M."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.8), sharey=True, layout="constrained")
    pairs = best(rows)
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        square = np.geomspace(0.1, 20, 100)
        ratios = [
            CLOSED["small"](direction, 2**20 / at, 1024, WORD)
            / CLOSED["large"](direction, 2**20 / at, 1024, WORD)
            for at in square
        ]
        axes.plot(square, ratios, color=GREY, lw=4, alpha=0.4, label="ideal tiles, by formula")
        for head_dim, marker in DIM_MARKERS.items():
            mine = [
                pair for (way, _, dim, _), pair in pairs.items()
                if way == direction and int(dim) == head_dim
            ]  # fmt: skip
            if not mine:
                continue
            x = [float(pair["large"]["d2_over_m"]) for pair in mine]
            y = [
                int(pair["small"]["counted_bytes"]) / int(pair["large"]["counted_bytes"])
                for pair in mine
            ]
            colour = figures.DIM_COLOURS[head_dim]
            axes.plot(x, y, marker, color=colour, ls="-", lw=1, ms=7, label=f"d = {head_dim}")
        axes.axhline(1, color=RED, lw=1.5)
        axes.axvline(1, color=GREY, lw=0.8, ls=":")
        axes.set(xscale="log", yscale="log", xlabel="d² / M", xlim=(0.1, 20))
        axes.set_xticks([0.125, 0.25, 0.5, 1, 2, 4, 8, 16])
        axes.set_xticklabels(["1/8", "1/4", "1/2", "1", "2", "4", "8", "16"])
        axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1", "2", "5"])
        axes.minorticks_off()
        axes.set_title(direction, loc="left", fontweight="bold")
        axes.legend(fontsize=8)
    panels[0].set_ylabel("misses: small-cache / FlashAttention's")
    figure.suptitle("Where the schedules cross, counted: below the red line small-cache wins")
    return figure
