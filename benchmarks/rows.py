"""Result files: a row is a dataclass, its field order is the column order."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import typer

from benchmarks.environment import Environment
from tilegen.disk import write_whole
from tilegen.errors import Unsupported
from tilegen.kernels.config import TileConfig

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


def columns(row_type: type[Any]) -> list[str]:
    """Return the header of a result file: a row's own columns, then those of its environment, if it
    has one."""
    shared = [field.name for field in fields(Environment)]
    names = [field.name for field in fields(row_type)]
    return sorted(names, key=lambda name: issubclass(row_type, Environment) and name in shared)


def append(path: Path, row: Any) -> None:
    """Add one row to a result file and flush it to disk; a new file starts with the header. Raises
    Unsupported for a file with other columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else b""
    header = before.partition(b"\n")[0].decode(errors="replace").split(",")
    names = columns(type(row))
    if before and sorted(header) != sorted(names):
        raise Unsupported(
            f"expected the columns {','.join(names)} in {path}, found {','.join(header)}; "
            "name another file"
        )
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, header if before else names, lineterminator="\n")
        if not before:
            writer.writeheader()
        elif not before.endswith(b"\n"):
            file.write("\n")  # a killed run left half a row
        writer.writerow(_line(row))
        file.flush()
        os.fsync(file.fileno())


def write(path: Path, rows: Sequence[Any]) -> None:
    """Write a result file anew and whole, from rows of one kind; without rows no file is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not rows:
        path.unlink(missing_ok=True)
        return
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns(type(rows[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_line, rows))
    write_whole(path, text.getvalue().encode())


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a result file as text; none if there is no such file.

    Rows that a killed run left incomplete are dropped.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def shown(path: Path) -> list[dict[str, str]]:
    """Return the rows of a result file, after printing on which machines they were measured.
    Without rows, say so and exit with 1."""
    if not (rows := read(path)):
        print(f"no rows in {path}: measure first")
        raise typer.Exit(1)
    print(*dict.fromkeys(f"{row['gpu']}, {row['date']}" for row in rows), sep="\n", end="\n\n")
    return rows


def same_values(rows: Iterable[Mapping[str, str]], names: Iterable[str]) -> set[tuple[str, ...]]:
    """Return the values that rows have in the columns `names`."""
    wanted = tuple(names)
    return {tuple(row[name] for name in wanted) for row in rows}


def grouped(
    rows: Iterable[Mapping[str, str]], names: Sequence[str], by: str
) -> dict[tuple[str, ...], dict[str, Mapping[str, str]]]:
    """Return rows by their values in the columns `names`, and by that in the column `by`."""
    groups: dict[tuple[str, ...], dict[str, Mapping[str, str]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), {})[row[by]] = row
    return groups


def in_time(cases: Sequence[R], minutes: float) -> Iterator[R]:
    """Yield the cases that a run still has to measure until its time is up, then print how many
    are left."""
    end = time.monotonic() + 60 * minutes
    for number, case in enumerate(cases):
        if time.monotonic() > end:
            print(f"time is up: {len(cases) - number} cases left; type the same command again")
            return
        yield case


def keep(path: Path, rows: Iterable[R], line: Callable[[R], str]) -> None:
    """Append rows to a result file as they come, and print each."""
    for row in rows:
        append(path, row)
        print(line(row), flush=True)


def markdown(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown."""
    lines = [[text.replace("|", "\\|") for text in row] for row in (names, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(rows: Iterable[object], names: Sequence[str]) -> str:
    """Return the named fields of rows, aligned as a terminal shows them."""
    lines = [[_short(getattr(row, name)) for name in names] for row in rows]
    cells = [[name.replace("_", " ") for name in names], *lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _short(value: object) -> str:
    if isinstance(value, TileConfig):
        return value.key
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _line(row: Any) -> dict[str, object]:
    return {name: _text(value) for name, value in asdict(row).items()}


def _text(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value
