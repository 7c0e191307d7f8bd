"""Split counts of a decoding kernel on an H100: how many keys a split has where it is fastest.

tilegen splits no keys yet, so there is nothing to judge: the optimum is recorded for the day it
does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.published.records import csv_rows

SOURCE = "tfan2437/flash-attention-lab@bc7fd945:bench/results/h100-80gb-hbm3"
SMS = 132


@dataclass(frozen=True, kw_only=True)
class BestSplit:
    """The fastest split count of one problem, and the smallest that is as fast within 2 %."""

    problem: str
    best_splits: int
    smallest_good: int
    keys_per_split: int
    """At the smallest good count."""
    programs_per_sm: float
    """The same."""
    best_us: float
    gain_over_one: float
    """Time of one split over the best."""
    source: str = SOURCE


def best_splits(path: Path) -> list[BestSplit]:
    """Return the optimum of each problem of the table."""
    shape = ("batch", "heads", "heads_kv", "context", "head_dim")
    times: dict[tuple[int, ...], dict[int, float]] = {}
    for row in csv_rows(path, (*shape, "num_splits", "median_ms")):
        of = times.setdefault(tuple(int(row[name]) for name in shape), {})
        of[int(row["num_splits"])] = float(row["median_ms"]) * 1e3
    found: list[BestSplit] = []
    for (batch, heads, heads_kv, context, head_dim), of in times.items():
        best = min(of, key=lambda splits: of[splits])
        good = min(splits for splits, us in of.items() if us <= 1.02 * of[best])
        found.append(
            BestSplit(
                problem=f"b{batch} hq{heads} hkv{heads_kv} q1 kv{context} d{head_dim} bf16",
                best_splits=best,
                smallest_good=good,
                keys_per_split=context // good,
                programs_per_sm=round(batch * heads * good / SMS, 1),
                best_us=of[best],
                gain_over_one=of[1] / of[best],
            )
        )
    return found
