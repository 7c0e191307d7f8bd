"""Kernels for Hopper in the memory model, in full: sizes, rings and tiles under many schedules, all
schedules of small ones, and each deliberate break.

    python -m tests.gluon.proof

The summary goes to benchmarks/results/gluon_proof.csv.
"""

from __future__ import annotations

import csv
import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
import typer

from tests.gluon.breaks import BACKWARD, BREAKS, HARMLESS
from tests.gluon.memory_model.schedules import EverySchedule, Schedule
from tests.gluon.runs import DKDV, DQ, FORWARD, Case, case_of, is_right, results, verdict

OUT = Path(__file__).parents[2] / "benchmarks/results/gluon_proof.csv"
SEEDS = 32
SIZES = [(1, 1), (64, 64), (65, 63), (128, 400), (200, 129), (300, 230)]
TILES = {
    FORWARD: ("m128n64w8s2t", "m128n64w8s3tp132", "m128n128w8s2tu", "m192n64w12s2tp132"),
    DQ: ("m128n64w8s2t", "m128n64w8s3t", "m128n128w8s2t", "m192n64w12s2t"),
    DKDV: ("m64n128w8s2t", "m64n128w8s3t"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Some runs of one kind."""

    what: str
    kernels: int
    """Texts that were run."""
    schedules: int
    """Schedules of all of them together."""
    as_expected: int
    """Schedules that gave what they should: right results, or the fault of a break."""
    seconds: float
    triton: str = triton.__version__


def cases(kernel: str) -> Iterator[Case]:
    """Yield the cases of sizes, rings and tiles of a kernel."""
    options = itertools.product((64, 128), ("bf16", "fp16"), (1, 4), ("causal", "full"))
    for i, (head_dim, dtype, group, mask) in enumerate(options):
        for j, (rows, keys) in enumerate(SIZES):
            tile = TILES[kernel][(i + j) % len(TILES[kernel])]
            heads = f"b{1 + i % 2} hq{group} hkv1 q{rows} kv{keys}"
            programs = 2 if "p132" in tile else 0
            yield case_of(f"{heads} d{head_dim} {dtype} {mask}", tile, programs, kernel)


def right(kernel: str) -> Row:
    """Return the row of a kernel's results under random schedules."""
    every = list(cases(kernel))
    started, good = time.perf_counter(), 0
    for i, case in enumerate(every):
        for seed in range(4):
            checks, _ = results(case, seed=100 * i + seed)
            good += is_right(case, checks)
    what = "results of sizes, rings and tiles" + f" of {kernel}" * (kernel != FORWARD)
    return _row(what, len(every), 4 * len(every), good, started)


def every() -> Iterator[Row]:
    """Yield the rows of all schedules of small problems."""
    for text, tile in (
        ("b1 hq1 hkv1 q128 kv128 d64 bf16 causal", "m128n64w8s2t"),
        ("b1 hq1 hkv1 q128 kv192 d64 bf16 full", "m128n64w8s2t"),
        ("b1 hq1 hkv1 q128 kv192 d64 bf16 full", "m128n64w8s3t"),
    ):
        case = case_of(text, tile)
        runs: list[bool] = []

        def run(schedule: Schedule, case: Case = case, runs: list[bool] = runs) -> None:
            checks, _ = results(case, schedule=lambda program: schedule)
            runs.append(is_right(case, checks))

        started = time.perf_counter()
        states = EverySchedule().each(run)
        yield _row(f"every schedule of {case}, {states} states", 1, len(runs), sum(runs), started)


def breaks() -> Iterator[Row]:
    """Yield the rows of deliberate breaks, and of harmless changes."""
    case = case_of("b1 hq2 hkv1 q300 kv230 d64 bf16 causal", "m128n64w8s2tp132", 2)
    source = case.source
    for what, changes in (("deliberate breaks", BREAKS), ("harmless changes", HARMLESS)):
        started, good = time.perf_counter(), 0
        for item, seed in itertools.product(changes, range(SEEDS)):
            good += bool(re.search(item.says, verdict(case, item.of(source), seed)))
        yield _row(what, len(changes), SEEDS * len(changes), good, started)


def breaks_of(kernel: str) -> Row:
    """Return the row of deliberate breaks of a kernel of the backward."""
    text = "b1 hq2 hkv1 q300 kv230 d64 bf16 causal"
    case = case_of(text, TILES[kernel][0], kernel=kernel)
    changes = [one for one in BACKWARD if one.kernel == kernel]
    started, good = time.perf_counter(), 0
    for item, seed in itertools.product(changes, range(SEEDS)):
        good += bool(re.search(item.says, verdict(case, item.of(case.source), seed)))
    count = SEEDS * len(changes)
    return _row(f"deliberate breaks of {kernel}", len(changes), count, good, started)


def _row(what: str, kernels: int, schedules: int, good: int, started: float) -> Row:
    seconds = round(time.perf_counter() - started, 1)
    return Row(what=what, kernels=kernels, schedules=schedules, as_expected=good, seconds=seconds)


def main() -> None:
    """Run all, and write the summary. Exits with 1 where anything is not as expected."""
    rows = [*map(right, TILES), *every(), *breaks(), *map(breaks_of, (DQ, DKDV))]
    with OUT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(map(asdict, rows))
    for row in rows:
        typer.echo(f"{row.what}: {row.as_expected} of {row.schedules} schedules, {row.seconds} s")
    if any(row.as_expected != row.schedules for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
