"""Records that the readers of published tables make: sweeps, winners, times of libraries."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilegen.errors import TilegenError, Unsupported
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem

Row = dict[str, str]
PARSE = AttentionProblem.parse
KNOBS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")


class UnreadableTable(TilegenError):
    """A published table is missing, or is not what its reader expects."""


@dataclass(frozen=True)
class Built:
    """Registers and memory that a compiled kernel uses."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    step_code: None = None
    """Instructions of a step, which no publisher tells."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Times of one problem under several tiles."""

    source: str
    """Repository, commit and file of the table."""
    name: str
    gpu: str
    """Name of the GPU in the catalogue."""
    problem: AttentionProblem
    kernels: tuple[Kernel, ...]
    """Kernels that ran with the tile; a time is that of all of them together."""
    beside: tuple[tuple[Kernel, TileConfig], ...] = ()
    """Kernels that ran as well, always with the same tile."""
    seconds: dict[TileConfig, float] = field(compare=False)
    built: dict[tuple[Kernel, TileConfig], Built] = field(
        default_factory=dict[tuple[Kernel, TileConfig], Built], compare=False
    )
    """What the publisher's compiler makes of the publisher's kernels; the model's own prediction
    stands in for those that are not there."""

    @property
    def length(self) -> int:
        """Rows of queries, by which sweeps are left out of a fit."""
        return self.problem.seqlen_q

    @property
    def noise(self) -> float:
        """Relative difference that two runs of one kernel may show: 6 % at 512 rows and 1 % from
        2 048 on, as published repeats on an H100 differ; 3 % between is our choice. Kernels that
        decode a token repeat within 1 %, too."""
        if self.length == 1:
            return 0.01
        return 0.06 if self.length <= 512 else 0.01 if self.length >= 2048 else 0.03


@dataclass(frozen=True, kw_only=True)
class Winners:
    """The best tile of each problem, as a search of others found it."""

    source: str
    name: str
    measured_on: str
    """The GPU as the table names it."""
    gpu: str
    """The GPU of the catalogue that stands for it."""
    kernel: Kernel
    rows: tuple[tuple[AttentionProblem, TileConfig], ...]
    """Problems and their winners, as far as tilegen can write them."""
    left_out: Counter[str] = field(default_factory=Counter[str])
    """Numbers of the rows of the table that are not among `rows`, by the reason."""
    stride: int = 1
    """Every which row of the table is judged."""

    @property
    def grid(self) -> list[TileConfig]:
        """The product of all knob values that win somewhere in the table: what is known of the
        space that was searched."""
        configs = {config for _, config in self.rows}
        return sorted(
            TileConfig(block_m=m, block_n=n, block_d=d, num_warps=warps, num_stages=stages)
            for m in {one.block_m for one in configs}
            for n in {one.block_n for one in configs}
            for d in {one.block_d for one in configs}
            for warps in {one.num_warps for one in configs}
            for stages in {one.num_stages for one in configs}
        )


@dataclass(frozen=True)
class Point:
    """One time of a library, of one problem."""

    source: str
    name: str
    library: str
    gpu: str
    problem: AttentionProblem
    seconds: float
    direction: Direction = "forward"
    config: TileConfig | None = None
    """The tile of a Triton kernel that is known: the model is asked for its time."""


def winners_of(rows: Iterable[tuple[str, TileConfig | None, str]], **names: Any) -> Winners:
    """Return winners of rows of problem, tile, and the reason to leave the row out, if any. A tile
    that tilegen does not write is None, and left out too."""
    kept: list[tuple[AttentionProblem, TileConfig]] = []
    left_out: Counter[str] = Counter()
    for notation, config, reason in rows:
        if reason or config is None:
            left_out[reason or "tile that tilegen does not write"] += 1
            continue
        try:
            kept.append((AttentionProblem.parse(notation), config))
        except TilegenError:
            left_out["problem that tilegen does not take"] += 1
    return Winners(rows=tuple(kept), left_out=left_out, **names)


def csv_rows(path: Path, needed: Iterable[str]) -> list[Row]:
    """Return the rows of a table. Raises UnreadableTable if it is missing, or columns are."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), reader.fieldnames or ()
    except OSError as error:
        raise UnreadableTable(f"expected a table at {path}: {error.strerror}") from None
    if missing := [name for name in needed if name not in columns]:
        raise UnreadableTable(
            f"expected the columns {', '.join(missing)} in {path}, found {', '.join(columns)}"
        )
    return rows


def tile(m: object, n: object, warps: object, stages: object, d: object = 0) -> TileConfig | None:
    """Return the config of numbers from a table; None if tilegen does not write such tiles."""
    names = "block_m", "block_n", "num_warps", "num_stages", "block_d"
    values = (int(str(value)) for value in (m, n, warps, stages, d))
    try:
        return TileConfig(**dict(zip(names, values, strict=True)))
    except Unsupported:
        return None
