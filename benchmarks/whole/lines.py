"""Growth of time with the share of blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Line:
    """A straight line through times, `overhead + slope * share`."""

    overhead: float
    slope: float
    apart: float
    """Largest distance of a time from the line, of the time of all blocks."""


def fitted(points: Sequence[tuple[float, float]]) -> Line:
    """Return the line through (share, time) with the least squares of relative errors."""
    x, y = np.array(points).T
    slope, overhead = np.polyfit(x, y, 1, w=1 / y)
    apart = np.abs(overhead + slope * x - y).max() / (overhead + slope)
    return Line(overhead=float(overhead), slope=float(slope), apart=float(apart))


def fitted_lines(rows: Sequence[Mapping[str, str]]) -> dict[tuple[str, str, str], Line]:
    """Return the lines of tilegen's times, by length, dtype and direction."""
    points: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["attention"] == "tilegen":
            key = row["seqlen"], row["dtype"], row["direction"]
            points[key].append((float(row["share"]), float(row["ms"])))
    return {key: fitted(of_key) for key, of_key in points.items() if len(of_key) > 2}
