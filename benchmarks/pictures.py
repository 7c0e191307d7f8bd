"""Draw the pictures of pages: a line of masks, and comparisons.

    tilegen compare PROBLEM --backward --json > benchmarks/results/cpu/compare.json
    python -m benchmarks.pictures

A comparison in a folder of results becomes a picture beside it. All can be read on white and on
black.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

import torch
import typer

import tilegen
from benchmarks.environment import RESULTS
from tilegen.comparing import report
from tilegen.comparing.compare import Cell, Row
from tilegen.masks import parse_mask

GALLERY = RESULTS / "masks.svg"
COMPARISONS = "*/compare.json"
"""The comparisons among the results."""
SIDE, TILE = 32, 4
"""Rows of a drawn mask, and of its tiles."""
IDS = torch.repeat_interleave(torch.arange(3), torch.tensor([9, 15, 8]))
MASKS: Mapping[str, tilegen.Mask] = {
    "causal": tilegen.causal(),
    "window": tilegen.sliding_window(9, 0),
    "documents": tilegen.causal() & tilegen.documents(IDS),
    "streaming": tilegen.streaming(4, 9),
    "prefix": tilegen.prefix_lm(10),
    "dilated": parse_mask("causal&dilated(4)"),
}
FILLS = {"#": ("#1f9e89", 1.0), "+": ("#1f9e89", 0.6), ".": (report.GREY, 0.35)}
"""Colour and opacity of pairs, by their marks in a drawing of `Mask.show`."""


def gallery() -> str:
    """Return the masks side by side as SVG, as `Mask.show` draws them."""
    wide = SIDE + 4
    size = f'viewBox="0 0 {wide * len(MASKS) - 2} {SIDE + 8}" width="{5 * wide * len(MASKS)}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>']
    for place, (name, mask) in enumerate(MASKS.items()):
        drawn = mask.show(SIDE, block_m=TILE, block_n=TILE).splitlines()
        rows = [line[1:-1].replace("|", "") for line in drawn if line.startswith("|")]
        parts.append(f'<g transform="translate({1 + place * wide} 6)">')
        parts.append(
            f'<text y="-1.5" font-family="sans-serif" font-size="3.4" fill="{report.GREY}">'
            f"{name}</text>"
        )
        for mark, (colour, opacity) in FILLS.items():
            if path := "".join(_runs(rows, mark)):
                parts.append(f'<path fill="{colour}" fill-opacity="{opacity}" d="{path}"/>')
        parts.append(
            f'<rect width="{SIDE}" height="{SIDE}" fill="none" stroke="{report.GREY}" '
            'stroke-width="0.3"/></g>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _runs(rows: list[str], mark: str) -> Iterator[str]:
    """Yield a rectangle for each run of a mark in a row."""
    for y, row in enumerate(rows):
        x = 0
        for value, run in groupby(row):
            width = len(list(run))
            if value == mark:
                yield f"M{x} {y}h{width}v1h-{width}z"
            x += width


def comparison(file: Path) -> list[Row]:
    """Read what `tilegen compare --json` wrote."""
    values = json.loads(file.read_text(encoding="utf-8"))
    return [Row(**{**row, "cells": tuple(Cell(**x) for x in row["cells"])}) for row in values]


def main() -> None:
    """Draw all pictures anew."""
    GALLERY.write_text(gallery(), encoding="utf-8")
    for file in sorted(RESULTS.glob(COMPARISONS)):
        report.draw(comparison(file), file.with_suffix(".svg"))


if __name__ == "__main__":
    typer.run(main)
