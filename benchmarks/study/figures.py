"""Figures of the study, drawn from its result files and the closed forms."""

# matplotlib is typed only in part:
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.plots import BLACK, BLUE, GREEN, GREY, ORANGE, RED, require_matplotlib, save
from benchmarks.rows import read
from benchmarks.study import closed, sweep
from benchmarks.study.tiles import LARGE_CACHE
from tilegen.kernels.spec import Direction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAMILY_STYLE = {
    "q_stationary": ("FlashAttention's schedule", BLUE, "o"),
    "two_pass": ("FlashAttention's schedule, two passes", BLUE, "o"),
    "small_cache": ("small-cache kernels", ORANGE, "s"),
    "q_streamed": ("Q streamed too", GREEN, "^"),
}
DIM_COLOURS = {64: "#9ecae1", 128: "#5aa0d0", 256: "#2166ac", 512: "#0b2f5b"}
SMALL_COLOURS = {64: "#fdc086", 128: "#f58f3c", 256: "#d9541e", 512: "#7f2704"}

Rows = list[dict[str, str]]


def draw_all(folder: Path) -> None:
    """Draw every figure of which `folder` has the rows."""
    require_matplotlib()
    counts = read(folder / "counts.csv")
    save(sweep_figure(counts, "forward"), folder / "sweep_forward.svg")
    save(sweep_figure(counts, "backward"), folder / "sweep_backward.svg")
    save(crossover_figure(counts), folder / "crossover.svg")
    save(mask_figure(read(folder / "masks.csv")), folder / "masks.svg")


# --------------------------------------------------------------------------------------------------
# The sweep over M


def sweep_figure(counts: Rows, direction: Direction) -> Figure:
    """Words / N^2 against M, a panel for each head dim, every element one word."""
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(2, 2, figsize=(11, 8.6), sharex=True, layout="constrained")
    for axes, head_dim in zip(grid.flat, sweep.HEAD_DIMS, strict=True):
        _sweep_panel(axes, counts, direction, head_dim)
    for axes in grid[-1]:
        axes.set_xlabel("fast memory M in KB (4-byte words)")
    for axes in grid[:, 0]:
        axes.set_ylabel("words moved / N²")
    handles, labels = grid.flat[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.suptitle(
        f"{direction.capitalize()}: words moved against fast memory, one head; "
        "points are counted, lines are formulas"
    )
    return figure


def _sweep_panel(axes: Axes, counts: Rows, direction: Direction, head_dim: int) -> None:
    memory = np.geomspace(2, 512, 241)

    def curve(function: Callable[..., float | None]) -> list[float]:
        values = [function(direction, kb * 256, head_dim, 4) for kb in memory]
        return [np.nan if value is None else value for value in values]

    ideal = curve(closed.ideal)
    axes.plot(memory, ideal, color=GREY, lw=5, alpha=0.35, label="best known schedule, ideal tiles")
    for function, colour in ((closed.chunked_large, BLUE), (closed.chunked_small, ORANGE)):
        axes.plot(memory, curve(function), color=colour, lw=1.1, ls="--")
    axes.plot([], [], color=GREY, lw=1.1, ls="--", label="tiles of any size, chunks as emitted")
    where = {"direction": direction, "dtype": "fp32", "head_dim": str(head_dim)}
    for family, (label, colour, marker) in FAMILY_STYLE.items():
        steps = sweep.points(counts, family, where, counted=False)
        dots = sweep.points(counts, family, where)
        if not steps:
            continue
        x, y = np.array(steps).T
        axes.step([*(x / 256), 4096], [*y, y[-1]], where="post", color=colour, lw=1.3, alpha=0.7)
        x, y = np.array(dots).T
        axes.plot(x / 256, y, marker, color=colour, ms=5, ls="", label=f"{label}, emitted")
    bounds = [closed.lower_bounds(direction, sweep.LONG, head_dim, kb * 256, 4) for kb in memory]
    for name, style, text in (
        ("lb1", "-", "lower bound LB1"),
        ("lb2", "-.", "lower bound LB2"),
        ("floor", ":", "floor: inputs and outputs once, at N = 65536"),
    ):
        values = [bound[name] if bound[name] > 0 else np.nan for bound in bounds]
        axes.plot(memory, values, color=BLACK, lw=1.2, ls=style, label=text)
    at = head_dim**2 / 256
    top = 6 * max(ideal)
    bottom = 0.004 if direction == "forward" else 0.008
    if at <= 512:
        axes.axvline(at, color=GREY, lw=0.8, ls=":")
        axes.text(at * 1.05, bottom * 1.35, "M = d²", color="#555555")
    axes.set(xscale="log", yscale="log", xlim=(2, 512), ylim=(bottom, top))
    axes.set_xticks([2, 8, 32, 128, 512], ["2", "8", "32", "128", "512"])
    axes.minorticks_off()
    axes.set_title(f"d = {head_dim}", loc="left", fontweight="bold")
    _slopes(axes, direction, head_dim, at)


def _slopes(axes: Axes, direction: Direction, head_dim: int, square: float) -> None:
    """Draw a line of slope -1 above M = d^2, and one of -1/2 below, over the curves."""
    lift = 3.5
    for power, low, high in (
        (-1.0, max(2 * square, 2), min(16 * square, 400)),
        (-0.5, max(2.2, square / 64), min(square / 3, 300)),
    ):
        if high < 2 * low:
            continue
        start = closed.ideal(direction, low * 256, head_dim, 4)
        x = np.array([low, high])
        axes.plot(x, lift * start * (x / low) ** power, color=RED, lw=1.8)
        axes.annotate(
            "slope -1" if power == -1 else "slope -1/2",
            (low * (high / low) ** 0.25, lift * start * (high / low) ** (0.25 * power)),
            xytext=(6, 5),
            textcoords="offset points",
            color=RED,
            fontweight="bold",
        )


# --------------------------------------------------------------------------------------------------
# Where the regimes meet


def crossover_figure(counts: Rows) -> Figure:
    """Words / N^2 against M / d^2: all head dims fall on two curves, which cross."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 6.2), layout="constrained")
    directions: tuple[Direction, ...] = ("forward", "backward")
    for axes, direction in zip(panels, directions, strict=True):
        _crossover_panel(axes, counts, direction)
    entries: list[Any] = []
    for axes in panels:  # the two formulas have names of their own
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[:2], labels[:2], loc="upper right")
        entries = [handles[2:], labels[2:]]
    figure.legend(*entries, loc="outside lower center", ncols=4)
    figure.suptitle("Where the regimes meet, every element one word; points are counted")
    return figure


def _crossover_panel(axes: Axes, counts: Rows, direction: Direction) -> None:
    ratio = np.geomspace(0.01, 16, 200)
    for formula, colour, text in (
        (closed.ideal_large, BLUE, "4 x²" if direction == "forward" else "14 x²"),
        (closed.ideal_small, ORANGE, "1 + 4 x" if direction == "forward" else "3 + 10 x"),
    ):
        values = [formula(direction, at * 2**20, 1024, 4) for at in ratio]
        axes.plot(ratio, values, color=colour, lw=4, alpha=0.35, label=f"ideal tiles: {text}")
    for head_dim in sweep.HEAD_DIMS:
        where = {"direction": direction, "dtype": "fp32", "head_dim": str(head_dim)}
        for family, colours, marker in (
            (LARGE_CACHE[direction], DIM_COLOURS, "o"),
            ("small_cache", SMALL_COLOURS, "s"),
        ):
            steps = sweep.points(counts, family, where)
            if not steps:
                continue
            x, y = np.array(steps).T
            name = "FlashAttention" if marker == "o" else "small cache"
            axes.plot(
                x / head_dim**2, y, marker, color=colours[head_dim], ms=5.5, ls="",
                label=f"{name}, d = {head_dim}",
            )  # fmt: skip
    at = sweep.crossing(
        lambda m: (
            closed.ideal_large(direction, m, 1024, 4) - closed.ideal_small(direction, m, 1024, 4)
        ),
        2**12,
        2**26,
    )
    axes.axvline(at / 2**20, color=GREY, lw=1, ls=":")
    axes.text(at / 2**20 * 1.06, 0.3, f"M = {at / 2**20:.3f} d²", color="#555555")
    axes.set(xscale="log", yscale="log", xlim=(0.01, 16), ylim=(0.2, 400))
    axes.set(xlabel="M / d²", ylabel="words moved / N²")
    axes.set_title(direction, loc="left", fontweight="bold")


# --------------------------------------------------------------------------------------------------
# Masks


MASK_STYLE = (
    ("dense", BLACK, "o"),
    ("causal", GREY, "v"),
    ("window 64", "#5aa0d0", "s"),
    ("window 256", BLUE, "s"),
    ("block_diagonal 64", "#f58f3c", "D"),
    ("block_diagonal 256", ORANGE, "D"),
)


def mask_figure(rows: Rows) -> Figure:
    """Counted words over Theorem 4.5's formula, and over the pattern-aware bound, against N."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    counted = [row for row in rows if row["counted_words"]]
    for axes, column, title in (
        (panels[0], "over_theorem", "counted words / Theorem 4.5's formula"),
        (panels[1], "over_bound", "counted words / pattern-aware bound"),
    ):
        for name, colour, marker in MASK_STYLE:
            mine = [row for row in counted if row["mask"] == name]
            x = [float(row["seqlen"]) for row in mine]
            y = [float(row[column]) for row in mine]
            label = name.replace("_", "-")
            axes.plot(x, y, marker, color=colour, ls="-", lw=1.2, ms=5.5, label=label)
        axes.axhline(1, color=RED, lw=1.5)
        axes.set(xscale="log", yscale="log", xlabel="N")
        lengths = sorted({int(row["seqlen"]) for row in counted})
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.minorticks_off()
        axes.set_title(title, loc="left", fontweight="bold")
    ends = np.array([1024.0, 16384.0])
    panels[0].plot(ends, 0.8 * (ends / 1024) ** -0.5, color=RED, lw=1.5, ls="--")
    panels[0].text(1200, 0.45, "N^(-1/2)", color=RED)
    panels[0].set_yticks([0.2, 0.5, 1, 2, 4], ["0.2", "0.5", "1", "2", "4"])
    panels[1].set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    panels[1].legend(fontsize=8)
    figure.suptitle(
        "Masks: below 1 a formula is no lower bound (forward, d = 64, tiles of 64 x 64)"
    )
    return figure
