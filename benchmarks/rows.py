"""Result files: a row is a dataclass, its field order is the column order."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from benchmarks.environment import Environment
from tilegen.errors import Unsupported

Status = Literal[
    "ok",
    "wrong",
    "unsupported",
    "out_of_memory",
    "build_failed",
    "out_of_resources",
    "declined",
    "launch_failed",
    "unmeasured",
]
"""Outcomes. ok: checked and timed. wrong: timed, but not right. Others: why there is no time."""


R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Row(Environment):
    """One workload, computed by one provider in one direction."""

    workload: str
    problem: str
    provider: str
    direction: str
    status: Status
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    repeats: int = 0
    digest: str = ""
    """Digests of the binaries that were timed, with spaces between; empty if they are not known, as
    a library's are not."""
    tflops: float | None = None
    """Flops of the kept pairs over the median [1e12/s]; benchmarks/arithmetic.py counts them."""
    gbytes_per_s: float | None = None
    """Compulsory traffic over the median [1e9 bytes/s]."""
    roofline_fraction: float | None = None
    """Ideal time over the median."""
    max_error: float | None = None
    """Largest error of the tensor that came closest to its limit."""
    allowed_error: float | None = None
    detail: str = ""
    """Kernels that ran, or the reason why none did."""


@dataclass(frozen=True, kw_only=True)
class CpuRow(Environment):
    """One number that needs no GPU."""

    benchmark: str
    value: float
    unit: str
    baseline: str
    """What the ratio compares with; empty: nothing."""
    ratio: float | None
    """Value over baseline."""


def columns(row_type: type[Any]) -> list[str]:
    """Return the header of a result file: a row's own columns, then those of its environment."""
    shared = [field.name for field in fields(Environment)]
    own = [field.name for field in fields(row_type) if field.name not in shared]
    return own + shared


def with_environment(row_type: type[R], environment: Environment, **values: Any) -> R:
    """Return a row of `row_type` from its own values and those of the environment."""
    return row_type(**values, **asdict(environment))


def append(path: Path, row: Any) -> None:
    """Add one row to a result file and flush it to disk; a new file starts with the header. Raises
    Unsupported for a file with other columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else b""
    head, header = before.partition(b"\n")[0].decode(errors="replace"), ",".join(columns(type(row)))
    if before and head != header:
        raise Unsupported(
            f"expected the columns {header} in {path}, found {head}; name another file"
        )
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns(type(row)), lineterminator="\n")
        if not before:
            writer.writeheader()
        elif not before.endswith(b"\n"):
            file.write("\n")  # a killed run left half a row
        writer.writerow(_line(row))
        file.flush()
        os.fsync(file.fileno())


def write(path: Path, rows: Sequence[Any]) -> None:
    """Write a result file anew, from rows of one kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns(type(rows[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(_line, rows))


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a result file as text; none if there is no such file.

    Rows that a killed run left incomplete are dropped.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def same_values(rows: Iterable[dict[str, str]], names: Iterable[str]) -> set[tuple[str, ...]]:
    """Return the values that rows have in the columns `names`."""
    wanted = tuple(names)
    return {tuple(row[name] for name in wanted) for row in rows}


def markdown(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown."""
    lines = [[text.replace("|", "\\|") for text in row] for row in (names, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _line(row: Any) -> dict[str, object]:
    return {name: _text(value) for name, value in asdict(row).items()}


def _text(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value
