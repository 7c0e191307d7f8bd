"""Time of the store of records: look-ups among very many records, saving, merging.

    python -m benchmarks.store

Cold means: no process has looked for that record before, and the kernel has dropped its file's
pages. Hot means: this process has looked for it before.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cpu import Number, seconds_of, write
from benchmarks.environment import RESULTS
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store import Location, TuningRecord, Versions, look_up, save
from tilegen.store.election import join
from tilegen.store.record import MAX_RIVALS
from tilegen.store.transfer import merge
from tilegen.task import KernelTask
from tilegen.tuning.measure import Measurement

RECORDS = 100_000
LOOKED_UP = 2000
MERGED = 500
KINDS = 100
"""Number of kinds of calls in one job, of which a hot look-up is one."""
REPEATS = 20


def problems(count: int) -> list[AttentionProblem]:
    """Return that many buckets, all of one GPU and kernel: the largest folder there can be."""
    problem = AttentionProblem.parse("hq8 hkv8 q64 d128 bf16 causal")
    sizes = itertools.product(range(1, 26), range(10), range(20), range(20))
    return [
        replace(problem, num_heads_q=8 * h, batch=1 << b, seqlen_q=1 << q, seqlen_kv=1 << kv)
        for h, b, q, kv in itertools.islice(sizes, count)
    ]


def record(problem: AttentionProblem, us: float = 400.0, source: str = "aa") -> TuningRecord:
    """Return a record such as a tuner writes."""
    return TuningRecord(
        gpu="h200",
        arch="sm_90",
        kernel="fwd",
        problem=problem,
        config=TileConfig.parse("m128n64w8s3"),
        measurement=Measurement(status="ok", median_us=us, p20_us=us, p80_us=us, repeats=100),
        versions=Versions(tilegen="0.1.0", torch="2.13.0", triton="3.7.1", driver="580.65.06"),
        template_digest="87ebae389eec",
        trials=64,
        seconds_spent=57.5,
        source=source,
        date="2026-11-21T09:30:00Z",
        command=f"tilegen tune '{problem}' --kernel fwd",
    )


def numbers(folder: Path, count: int = RECORDS) -> Iterator[Number]:
    """Yield every number; writes `count` records into `folder`."""
    many = problems(count)
    for problem in many:  # as `save` lays them out, without its locks and synchronising
        file = folder / "many" / record(problem).path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(record(problem).to_json(), encoding="utf-8")
    os.sync()
    yield from _looking_up(Location(str(folder / "many"), "own"), many)
    yield from _with_rivals(Location(str(folder / "rich"), "own"), many[:MERGED])
    yield from _writing(folder, many[:MERGED])


def _looking_up(where: Location, many: list[AttentionProblem]) -> Iterator[Number]:
    spec, among = gpu("h200"), f"among {len(many)}"
    look_up(KernelTask.of("fwd", many[0], spec), where=[where])  # loads the model of what is legal
    chosen = random.Random(0).sample(many[1:], min(LOOKED_UP, len(many) - 1))
    assert where.folder is not None
    files = [where.folder / record(problem).path for problem in chosen]
    for file in files:
        _drop(file)
    cold = [seconds_of(lambda p=p: _found(p, where)) for p in chosen]
    for file in files:
        _drop(file)
    plain = [seconds_of(lambda f=file: json.loads(f.read_bytes())) for file in files]
    baseline = 1e3 * statistics.median(plain)
    for name, value in (("median", statistics.median(cold)), ("p99", _p99(cold))):
        yield Number(
            benchmark=f"look-up, cold, {among} records, {name}",
            value=1e3 * value,
            unit="ms",
            baseline="reading and parsing the file",
            baseline_value=baseline,
        )
    job = chosen[:KINDS]
    hot = [seconds_of(lambda p=p: _found(p, where)) for _ in range(REPEATS) for p in job]
    yield Number(
        benchmark=f"look-up, hot, {among} records", value=1e6 * statistics.median(hot), unit="us"
    )
    absent = [replace(p, num_heads_q=8 * 1001) for p in chosen]
    misses = [
        seconds_of(lambda p=p: look_up(KernelTask.of("fwd", p, spec), where=[where]))
        for p in absent
    ]
    yield Number(
        benchmark=f"look-up of what is not there, {among} records, with GPUs to borrow from",
        value=1e3 * statistics.median(misses),
        unit="ms",
    )


def _with_rivals(where: Location, some: list[AttentionProblem]) -> Iterator[Number]:
    """Look up records that hold as many findings as there can be."""
    assert where.folder is not None
    files: list[Path] = []
    for problem in some:
        full = join(record(problem, 400.0 + n, f"{n:012x}") for n in range(MAX_RIVALS + 1))
        files.append(where.folder / full.path)
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        files[-1].write_text(full.to_json(), encoding="utf-8")
    os.sync()
    for file in files:
        _drop(file)
    cold = [seconds_of(lambda p=p: _found(p, where)) for p in some]
    yield Number(
        benchmark=f"look-up, cold, of records with {MAX_RIVALS} rivals, median",
        value=1e3 * statistics.median(cold),
        unit="ms",
    )


def _writing(folder: Path, some: list[AttentionProblem]) -> Iterator[Number]:
    a, b, c = (Location(str(folder / name), "own") for name in "abc")
    times = [seconds_of(lambda p=p: save(record(p), location=a)) for p in some]
    yield Number(benchmark="save", value=1e3 * statistics.median(times), unit="ms")
    for problem in some:
        save(record(problem, 390.0, "bb"), location=b)
    spent = seconds_of(lambda: list(merge([a, b], c)))
    yield Number(
        benchmark="merge of two stores with the same keys",
        value=2 * len(some) / spent,
        unit="records/s",
    )


def _found(problem: AttentionProblem, where: Location) -> None:
    assert look_up(KernelTask.of("fwd", problem, gpu("h200")), where=[where]) is not None


def _drop(file: Path) -> None:
    """Have the kernel forget a file's pages."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


def main(
    csv: Annotated[
        Path | None, typer.Option(help="Result file. Default: benchmarks/results/cpu/store.csv.")
    ] = None,
    records: Annotated[int, typer.Option(help="How many lie there.")] = RECORDS,
) -> None:
    """Measure look-ups cold and hot among very many records, saving and merging.

    Example: python -m benchmarks.store
    """
    path = csv or RESULTS / "cpu" / "store.csv"
    with tempfile.TemporaryDirectory() as folder:
        write(numbers(Path(folder), records), path)


if __name__ == "__main__":
    typer.run(main)
