"""Result files without where and when they were made, to be held against what is made anew."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from benchmarks.environment import Environment
from benchmarks.rows import columns, read

SHARED = [field.name for field in fields(Environment)]


def own_columns(path: Path, row_type: type[Environment]) -> list[list[str]]:
    """Return the lines of a result file without its environment, the header first. Every row says
    with which versions, at which commit, when and by which command it was made."""
    rows = read(path)
    assert list(rows[0]) == columns(row_type)
    for row in rows:
        assert all(row[name] for name in SHARED if name not in ("driver", "cuda"))
    own = [name for name in columns(row_type) if name not in SHARED]
    return [own, *([row[name] for name in own] for row in rows)]
