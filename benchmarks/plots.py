"""Colours of the figures of all benchmarks, and files that are equal byte for byte each time."""

# matplotlib is typed only in part:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY, BLACK = "#1f5fa8", "#d9641e", "#3a8f4d", "#8a8a8a", "#111111"
RED = "#b3122a"


def require_matplotlib() -> None:
    """End with one line if there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("the figures need matplotlib; install it with: pip install 'tilegen[plot]'")
        raise typer.Exit(1) from None
    matplotlib.use("agg")
    matplotlib.rcParams.update(
        {
            "svg.hashsalt": "tilegen",
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#e6e6e6",
            "grid.linewidth": 0.6,
            "legend.frameon": False,
        }
    )


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG. The same rows give the same bytes: no dates, fixed ids."""
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
