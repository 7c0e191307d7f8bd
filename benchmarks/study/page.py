"""The tables of benchmarks/io_study.md, filled in from the result files."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.rows import markdown, read
from benchmarks.study import closed, sweep
from benchmarks.study.tiles import LARGE_CACHE
from tilegen.gpus.spec import gpu
from tilegen.kernels.spec import Direction
from tilegen.theory.regimes import device_regimes

Row = dict[str, str]
PAGE_WIDTH = 100
"""Columns of a page's text; lines of tables may be longer."""
SIZES = {4: "fp32", 2: "bf16, fp16", 1: "fp8"}
"""Dtypes of the table of devices, by the bytes of an element."""
SHOWN_KB = ("8.0", "32.0", "128.0", "512.0")


def fill(text: str, folder: Path) -> str:
    """Return the page with every table between `<!-- table: NAME -->` and `<!-- end -->` anew.

    Sentences between tables are wrapped at PAGE_WIDTH columns.
    """

    def table(match: re.Match[str]) -> str:
        body = "\n".join(map(_wrapped, TABLES[match[1]](folder).splitlines()))
        return f"<!-- table: {match[1]} -->\n\n{body}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def _wrapped(line: str) -> str:
    is_text = line and not line.startswith(("|", "!"))
    return textwrap.fill(line, PAGE_WIDTH, break_on_hyphens=False) if is_text else line


def tables_of(text: str) -> list[str]:
    """Return the names of the tables that a page has a place for."""
    return re.findall(r"<!-- table: (\w+) -->", text)


def links_of(text: str) -> list[str]:
    """Return the files that a page shows or links."""
    return re.findall(r"\]\(([^)#:]+)\)", text)


def number(text: str, digits: int = 2) -> str:
    """Return a number of a result file with few digits, a dash for none."""
    return f"{float(text):.{digits}f}" if text else "-"


def totals(folder: Path) -> str:
    """Numbers of counted cases, and of those that are as predicted."""
    rows = read(folder / "counts.csv")
    words = sum(int(row["counted_words"]) + int(row["counted_words_twice"] or 0) for row in rows)
    equal = sum(row["equal"] == "True" for row in rows)
    masks = [row for row in read(folder / "masks.csv") if row["counted_words"]]
    right = sum(row["counted_words"] == row["predicted_words"] for row in masks)
    return markdown(
        ("what", "cases", "counted = predicted"),
        [
            (f"tile sets, {words / 1e9:.1f} billion words", str(len(rows)), str(equal)),
            ("masks at one length", str(len(masks)), str(right)),
        ],
    )


def slopes(folder: Path) -> str:
    """Slopes of counted staircases, beside those of the curves they follow."""
    counts = read(folder / "counts.csv")
    rows: list[tuple[str, ...]] = []
    for direction in sweep.DIRECTIONS:
        for family, side in ((LARGE_CACHE[direction], "above"), ("small_cache", "below")):
            for head_dim in sweep.HEAD_DIMS:
                where = {"direction": direction, "dtype": "fp32", "head_dim": str(head_dim)}
                square = head_dim**2
                steps = [
                    point
                    for point in sweep.points(counts, family, where)
                    if (point[0] >= square / 2 if side == "above" else point[0] <= square)
                ]
                if len(steps) < 4:
                    continue
                rows.append(_slope_row(direction, family, head_dim, steps))
    names = ("direction", "schedule", "d", "M / d²", "steps")
    return markdown((*names, "counted", "any size, same chunks", "ideal"), rows)


def _slope_row(
    direction: Direction, family: str, head_dim: int, steps: Sequence[sweep.Point]
) -> tuple[str, ...]:
    memories = [memory for memory, _ in steps]
    low, high = min(memories), max(memories)
    large = family != "small_cache"
    chunked = closed.chunked_large if large else closed.chunked_small
    ideal = closed.ideal_large if large else closed.ideal_small

    def between(curve: Callable[..., float | None]) -> str:
        first, last = (curve(direction, at, head_dim, 4) for at in (low, high))
        if first is None or last is None:
            return ""
        return f"{math.log(last / first) / math.log(high / low):.2f}"

    return (
        direction,
        family.replace("_", " "),
        str(head_dim),
        f"{low / head_dim**2:.2f} to {high / head_dim**2:.2f}",
        str(len(steps)),
        f"{sweep.slope(steps):.2f}",
        between(chunked),
        between(ideal),
    )


def masks(folder: Path) -> str:
    """Counted words over both formulas, at the shortest and longest sequence."""
    rows = [row for row in read(folder / "masks.csv") if row["counted_words"]]
    lines: list[tuple[str, ...]] = []
    for name in dict.fromkeys(row["mask"] for row in rows):
        at = {int(row["seqlen"]): row for row in rows if row["mask"] == name}
        ends = (min(at), max(at))
        ratios = [number(at[n][c], 2) for c in ("over_theorem", "over_bound") for n in ends]
        density = number(at[ends[1]]["density"], 3)
        lines.append((name, f"{ends[0]}, {ends[1]}", density, *ratios))
    theorem, pattern = "over Theorem 4.5", "over pattern-aware bound"
    names = ("mask", "shortest, longest N", "density", theorem, "longest", pattern, "longest")
    return markdown(names, lines)


def devices(_: Path) -> str:
    """Dividing head dims per GPU and dtype: forward / backward."""
    lines: dict[str, list[str]] = {}
    for regime in device_regimes(tuple(SIZES)):
        spec = gpu(regime.gpu)
        memories = (f"{spec.smem_per_block / 1024:.0f}", f"{spec.on_chip_bytes / 1024:.0f}")
        dims = (f"{regime.dividing_head_dims[way]:.0f}" for way in sweep.DIRECTIONS)
        lines.setdefault(spec.title, [spec.title, *memories]).append(" / ".join(dims))
    names = ("GPU", "shared memory, KB", "on chip, KB", *SIZES.values())
    return markdown(names, lines.values())


PLAIN: dict[str, tuple[str, dict[str, tuple[str, int | None]], Callable[[Row], bool]]] = {
    "sweep": (
        "sweep.csv",
        {
            "d": ("head_dim", None),
            "M, KB": ("memory_kb", 0),
            "M / d²": ("memory_over_d2", 2),
            "best emitted tiles": ("tiles", None),
            "words / N²": ("words", 2),
            "ideal": ("ideal", 2),
            "over bound": ("over_bound", 2),
        },
        lambda row: (
            (row["direction"], row["dtype"]) == ("forward", "fp32") and row["memory_kb"] in SHOWN_KB
        ),
    ),
    "crossovers": (
        "crossovers.csv",
        {
            **{name: (name, None) for name in ("direction", "dtype")},
            "d": ("head_dim", None),
            "ideal tiles": ("ideal", 3),
            "any size, same chunks": ("chunked", 3),
            **{name: (name, 3) for name in ("emitted", "counted")},
        },
        lambda row: True,
    ),
    "long_masks": (
        "masks.csv",
        {
            "mask": ("mask", None),
            "density": ("density", 4),
            "over Theorem 4.5": ("over_theorem", 2),
            "over pattern-aware bound": ("over_bound", 2),
        },
        lambda row: not row["counted_words"],
    ),
}
"""Tables that are columns of a file: its name, the column and the digits of each title, and which
rows are shown."""


def plain(folder: Path, name: str) -> str:
    """Return a table of PLAIN."""
    file, columns, is_shown = PLAIN[name]
    rows = [row for row in read(folder / file) if is_shown(row)]
    lines = (
        [
            (row[of] or "none fit") if digits is None else number(row[of], digits)
            for of, digits in columns.values()
        ]
        for row in rows
    )
    return markdown(columns, lines)


TABLES: dict[str, Callable[[Path], str]] = {
    "totals": totals,
    "slopes": slopes,
    "masks": masks,
    "devices": devices,
    **{name: partial(plain, name=name) for name in PLAIN},
}
