"""Verdicts as result files, and as the few lines that a terminal shows."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.published.judge import PointVerdict, SweepVerdict, WinnersVerdict


def write(path: Path, rows: Sequence[Any], **more: object) -> None:
    """Write dataclasses of one kind as CSV, their fields as columns, and the same text in all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, [*more, *(one.name for one in fields(rows[0]))], lineterminator="\n"
        )
        writer.writeheader()
        for row in rows:
            values = {**more, **asdict(row)}
            writer.writerow({name: _text(value) for name, value in values.items()})


def _text(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


def sweep_lines(verdicts: Sequence[SweepVerdict]) -> Iterator[str]:
    """Yield a line for each sweep, then the median and the worst regret."""
    for row in verdicts:
        yield (
            f"  {row.sweep:28} {row.length:5} rows {row.configs:2} tiles  rho {row.spearman:5.2f}  "
            f"regret {row.regret:6.1%}  {row.trials} trials  model/measured {row.ratio:.2f}  "
            f"{row.chosen}, best {row.best}"
        )
    regrets = [row.regret for row in verdicts]
    yield (
        f"  regret: median {statistics.median(regrets):.1%}, worst {max(regrets):.1%}; "
        f"rank correlation: median {statistics.median(row.spearman for row in verdicts):.2f}"
    )


def winner_lines(verdicts: Sequence[WinnersVerdict]) -> Iterator[str]:
    """Yield a line for each table of winners."""
    for row in verdicts:
        yield (
            f"  {row.measured_on:36} {row.table:28} {row.judged:4} judged of {row.grid:3} configs  "
            f"first 1/4/8/16: {row.first_1:.0%} {row.first_4:.0%} {row.first_8:.0%} "
            f"{row.first_16:.0%}  own space has {row.in_own:.0%}, first 8 {row.own_first_8:.0%}"
        )


def point_lines(verdicts: Sequence[PointVerdict]) -> Iterator[str]:
    """Yield a line for each kind of curve: median and range of model over published."""
    for kind in dict.fromkeys((one.gpu, one.name, one.library) for one in verdicts):
        mine = [one for one in verdicts if (one.gpu, one.name, one.library) == kind]
        ratios = [one.ratio for one in mine]
        bounds = [one.model_over_bound for one in mine]
        yield (
            f"  {' '.join(kind):48} {len(mine):3} problems  model/published "
            f"{statistics.median(ratios):5.2f} ({min(ratios):.2f}..{max(ratios):.2f})  "
            f"model/bound at least {min(bounds):.2f}"
        )
