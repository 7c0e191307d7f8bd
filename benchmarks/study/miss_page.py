"""Tables and sentences of the page about counted misses, from their result file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.rows import markdown, read
from benchmarks.study.miss_plan import MASKS
from benchmarks.study.misses import SCHEDULES

FILE, TIMES = "misses.csv", "schedule_times.csv"
Row = dict[str, str]
SHOWN_DIM = "256"
"""Head dim whose dense rows the page shows; the figures show all."""
CASE = ("direction", "mask", "head_dim", "memory_kb")


def best(rows: list[Row]) -> dict[tuple[str, ...], dict[str, Row]]:
    """Return, by direction, mask, head dim and KB, the row of each schedule that missed least."""
    cases: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        mine = cases.setdefault(tuple(row[name] for name in CASE), {})
        before = mine.get(row["schedule"])
        if before is None or int(row["counted_bytes"]) < int(before["counted_bytes"]):
            mine[row["schedule"]] = row
    both = {case: mine for case, mine in cases.items() if len(mine) == len(SCHEDULES)}
    return dict(sorted(both.items(), key=lambda item: _order(item[0])))


def case_table(folder: Path) -> str:
    """Misses of both schedules, dense at one head dim, and masked."""
    lines: list[tuple[str, ...]] = []
    for (direction, mask, head_dim, memory), mine in best(read(folder / FILE)).items():
        if mask == "full" and head_dim != SHOWN_DIM:
            continue
        large, small = mine["large"], mine["small"]
        lines.append(
            (
                direction,
                _name(mask),
                head_dim,
                memory,
                f"{float(large['d2_over_m']):g}",
                *(f"{_tiles(row)}: {_mb(row, 'counted_bytes')}" for row in (large, small)),
                f"{_ratio(small, large):.2f}",
                _mb(large, "theorem_bytes"),
                _mb(large, "lower_bound_bytes"),
            )
        )
    return markdown(
        (
            *("pass", "mask", "d", "M, KB", "d² / M"),
            *("FlashAttention's, MB", "small-cache, MB", "ratio", "theorem, MB", "bound, MB"),
        ),
        lines,
    )


def agreement(folder: Path) -> str:
    """Counted over predicted misses, by schedule and mask, with the worst cases named."""
    rows = read(folder / FILE)
    lines: list[tuple[str, ...]] = []
    for direction in ("forward", "backward"):
        for mask in ("full", *MASKS.values()):
            for schedule, name in SCHEDULES.items():
                group = (direction, mask, schedule)
                mine = [
                    row for row in rows
                    if (row["direction"], row["mask"], row["schedule"]) == group
                ]  # fmt: skip
                if mine:
                    lines.append((direction, _name(mask), name, *_spread(mine)))
    fitting = [row for row in rows if row["fits"] == "True"]
    table = markdown(
        (
            *("pass", "mask", "schedule", "state fits M", "least", "median", "most"),
            *("does not fit", "most"),
        ),
        lines,
    )
    near = sum(abs(_off(row) - 1) <= 0.05 for row in fitting)
    most, least = max(fitting, key=_off), min(fitting, key=_off)
    return (
        f"{table}\n\n"
        f"Of {len(fitting)} points whose state fits, {near} are within 5 % of the formula. "
        f"The most above is {_off(most):.2f} ({_said(most)}), "
        f"the most below {_off(least):.2f} ({_said(least)}).\n"
        f"Of the {len(rows) - len(fitting)} points whose state does not fit, the worst is "
        f"{max(map(_off, rows)):.2f} ({_said(max(rows, key=_off))})."
    )


def times(folder: Path) -> str:
    """Speeds of both schedules on a processor, and what the faster one reads."""
    rows = read(folder / TIMES)
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row["dtype"], row["head_dim"]), {})[row["schedule"]] = row
    lines = [
        (
            *case,
            *(f"{float(mine[name]['gflops']):.0f}" for name in SCHEDULES),
            f"{float(mine['small']['gflops']) / float(mine['large']['gflops']):.2f}",
        )
        for case, mine in cases.items()
    ]
    table = markdown(
        ("dtype", "d", "FlashAttention's, Gflop/s", "small-cache, Gflop/s", "ratio"), lines
    )
    first = next(row for row in rows if (row["dtype"], row["schedule"]) == ("fp32", "large"))
    height = int(first["tiles"].split()[1].split("x")[0])
    reads = 2 * float(first["gflops"]) / height
    part = float(first["gflops"]) / float(first["peak_gflops"])
    return (
        f"{table}\n\n"
        f"In fp32 at d = {first['head_dim']} FlashAttention's schedule runs at {part:.2f} of the "
        f"measured peak. With tiles of {height} rows it reads 2 / {height} bytes of K and V for "
        f"each operation: {reads:.1f} GB/s."
    )


TABLES: dict[str, Callable[[Path], str]] = {
    "misses": case_table,
    "agreement": agreement,
    "times": times,
}


def _spread(rows: list[Row]) -> tuple[str, ...]:
    fits = [_off(row) for row in rows if row["fits"] == "True"]
    others = [_off(row) for row in rows if row["fits"] != "True"]
    spread = [f"{pick(fits):.2f}" for pick in (min, median, max)] if fits else ["-"] * 3
    return (str(len(fits)), *spread, str(len(others)), f"{max(others):.2f}" if others else "-")


def _off(row: Row) -> float:
    return float(row["counted_over_predicted"])


def _ratio(small: Row, large: Row) -> float:
    return int(small["counted_bytes"]) / int(large["counted_bytes"])


def _mb(row: Row, name: str) -> str:
    return f"{float(row[name]) / 1e6:.1f}"


def _said(row: Row) -> str:
    where = f"{row['direction']}, {_name(row['mask'])}, d = {row['head_dim']}"
    return f"{where}, {row['memory_kb']} KB, {_tiles(row)}"


def _tiles(row: Row) -> str:
    """Return the tiles without what all kernels of a pass share in their names."""
    return row["tiles"].replace("fwd_", "").replace("bwd_", "")


def _name(mask: str) -> str:
    return next((name for name, key in MASKS.items() if key == mask), "dense")


def _order(case: tuple[str, ...]) -> tuple[bool, bool, str, int, int]:
    direction, mask, head_dim, memory = case
    return direction != "forward", mask != "full", mask, int(head_dim), int(memory)
