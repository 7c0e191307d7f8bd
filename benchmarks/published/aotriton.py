"""AOTriton's tables of tuned kernels: one SQLite table for each kernel and architecture.

Left out are rows with a bias matrix, whose loads the model would have to count, and the fused
backward, which no family of tilegen is. The knobs PRE_LOAD_V, waves_per_eu and the persistent grid
have no counterpart: winners that differ in them alone are one.
"""

from __future__ import annotations

import sqlite3
import tarfile
from collections import Counter
from pathlib import Path

from benchmarks.published.records import UnreadableTable, Winners, tile
from tilegen.errors import TilegenError
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem

COMMIT = "ROCm/aotriton@30ae9671"
KERNELS: dict[str, Kernel] = {
    "attn_fwd": "fwd",
    "bwd_kernel_dk_dv": "bwd_dkdv",
    "bwd_kernel_dq": "bwd_dq",
}
GPUS = {"gfx942": "mi300x", "gfx950": "mi350x"}
DTYPES = {"torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32"}
BATCH, HEADS = 3, 5
"""Batch and heads that the tuner of that repository runs; the tables do not record them."""
MEMORY_GB = {"gfx942": 192, "gfx950": 288}
FEWER = ((3, 3), (3, 2), (2, 2))
"""Batches and heads that the tuner falls back to, one after the other, where its estimate of the
memory that a problem takes with its reference is above that of the GPU."""
GB_OF_PAIR = 0.22 / 2**30
"""Memory of a pair of a query and a key for each element of a head dim, by that estimate [GB]."""


def winners(folder: Path, stride: int) -> list[Winners]:
    """Return every `stride`-th row of each table that a family of tilegen computes, 16-bit and
    fp32 apart."""
    tables: list[Winners] = []
    for arch, stands_for in GPUS.items():
        for table, kernel in KERNELS.items():
            rows = read(folder / f"{arch}_{table}.sqlite3.tar.xz")
            for kind, exact in (("16 bit", False), ("fp32", True)):
                mine = [row for row in rows if (row["q_dtype"] == "torch.float32") == exact]
                kept, left_out = _judged(mine[::stride], MEMORY_GB[arch])
                tables.append(
                    Winners(
                        source=f"{COMMIT}:modules/flash/database/amd/{arch}/{table}",
                        name=f"{table} {kind}",
                        measured_on=arch,
                        gpu=stands_for,
                        kernel=kernel,
                        rows=tuple(kept),
                        left_out=left_out,
                    )
                )
    return tables


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of the one table in an archive, ordered by what they are for; column names
    without their prefix."""
    try:
        with tarfile.open(path) as archive:
            member = next(one for one in archive.getmembers() if one.isfile())
            file = archive.extractfile(member)
            assert file
            content = file.read()
    except (OSError, tarfile.TarError, StopIteration) as error:
        raise UnreadableTable(f"expected an archive with one table at {path}: {error}") from None
    with sqlite3.connect(":memory:") as base:
        base.deserialize(content)
        (name,) = base.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchone()
        cursor = base.execute(f'SELECT * FROM "{name}"')
        columns = [column[0] for column in cursor.description]
        keys = [i for i, column in enumerate(columns) if column.startswith("inputs$")]
        rows = sorted(cursor.fetchall(), key=lambda row: [str(row[i]) for i in keys])
    short = [column.split("$")[-1].lower() for column in columns]
    return [dict(zip(short, map(str, row), strict=True)) for row in rows]


def _judged(
    rows: list[dict[str, str]], memory_gb: int
) -> tuple[list[tuple[AttentionProblem, TileConfig]], Counter[str]]:
    kept: list[tuple[AttentionProblem, TileConfig]] = []
    left_out: Counter[str] = Counter()
    for row in rows:
        config = tile(row["block_m"], row["block_n"], row["num_warps"], row["num_stages"])
        if row["bias_type"] != "0":
            left_out["bias matrix"] += 1
        elif config is None:
            left_out["tile that tilegen does not write"] += 1
        else:
            try:
                kept.append((_problem(row, memory_gb), config))
            except TilegenError:
                left_out["problem that tilegen does not take"] += 1
    return kept, left_out


def _problem(row: dict[str, str], memory_gb: int) -> AttentionProblem:
    rows, columns, width = (
        int(row[name]) for name in ("max_seqlen_q", "max_seqlen_k", "block_dmodel")
    )
    dtype, drops = DTYPES[row["q_dtype"]], row["enable_dropout"] != "0"
    each = GB_OF_PAIR * rows * columns * width * (1.25 if drops else 1.0)
    each *= 2 if dtype == "fp32" else 1
    sizes = ((BATCH, HEADS), *FEWER)
    batch, heads = next((one for one in sizes if each * one[0] * one[1] <= memory_gb), sizes[-1])
    return AttentionProblem.parse(
        f"b{batch} hq{heads} q{rows} kv{columns} d{width} {dtype} "
        + ("causal" if row["causal_type"] != "0" else "full")
        + (" dropout" if drops else "")
    )
