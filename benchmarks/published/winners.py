"""Readers of winners of searches that others published, a function for each source."""

from __future__ import annotations

import gzip
import json
import sqlite3
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.published.records import (
    KNOBS,
    PARSE,
    Point,
    Row,
    UnreadableTable,
    Winners,
    csv_rows,
    tile,
    winners_of,
)
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS

# --------------------------------------------------------------------------------------------------
# AOTriton: one SQLite table of tuned kernels for each kernel and architecture

AOTRITON = "ROCm/aotriton@30ae9671"
AOTRITON_KERNELS: dict[str, Kernel] = {
    "attn_fwd": "fwd",
    "bwd_kernel_dk_dv": "bwd_dkdv",
    "bwd_kernel_dq": "bwd_dq",
}
AOTRITON_GPUS = {"gfx942": ("mi300x", 192), "gfx950": ("mi350x", 288)}
"""Architectures, the GPUs of the catalogue that stand for them, and their memory [GB]."""
DTYPES = {"torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32"}
SIZES = ((3, 5), (3, 3), (3, 2), (2, 2))
"""Batches and heads that the tuner of that repository runs, which the tables do not record: the
later ones where its estimate of the memory that a problem takes is above that of the GPU."""
GB_OF_PAIR = 0.22 / 2**30
"""Memory of a pair of a query and a key for each element of a head dim, by that estimate [GB]."""


def aotriton(folder: Path, stride: int) -> list[Winners]:
    """Return every `stride`-th row of each table that a family of tilegen computes, 16-bit and
    fp32 apart.

    Left out are rows with a bias matrix, whose loads the model would have to count, and the fused
    backward. PRE_LOAD_V, waves_per_eu and the persistent grid have no counterpart: winners that
    differ in them alone are one.
    """
    tables: list[Winners] = []
    for arch, (stands_for, memory) in AOTRITON_GPUS.items():
        for table, kernel in AOTRITON_KERNELS.items():
            rows = _sqlite_rows(folder / f"{arch}_{table}.sqlite3.tar.xz")
            for kind, exact in (("16 bit", False), ("fp32", True)):
                mine = [row for row in rows if (row["q_dtype"] == "torch.float32") == exact]
                tables.append(
                    winners_of(
                        (
                            (
                                _of_aotriton(row, memory),
                                tile(*(row[knob.lower()] for knob in KNOBS)),
                                "bias matrix" if row["bias_type"] != "0" else "",
                            )
                            for row in mine[::stride]
                        ),
                        source=f"{AOTRITON}:modules/flash/database/amd/{arch}/{table}",
                        name=f"{table} {kind}",
                        measured_on=arch,
                        gpu=stands_for,
                        kernel=kernel,
                        stride=stride,
                    )
                )
    return tables


def _sqlite_rows(path: Path) -> list[Row]:
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


def _of_aotriton(row: Row, memory_gb: int) -> str:
    names = ("max_seqlen_q", "max_seqlen_k", "block_dmodel")
    rows, columns, width = (int(row[name]) for name in names)
    dtype, drops = DTYPES[row["q_dtype"]], row["enable_dropout"] != "0"
    each = GB_OF_PAIR * rows * columns * width * (1.25 if drops else 1.0)
    each *= 2 if dtype == "fp32" else 1
    batch, heads = next((one for one in SIZES if each * one[0] * one[1] <= memory_gb), SIZES[-1])
    mask = "causal" if row["causal_type"] != "0" else "full"
    sizes = f"b{batch} hq{heads} q{rows} kv{columns} d{width}"
    return f"{sizes} {dtype} {mask}{' dropout' * drops}"


# --------------------------------------------------------------------------------------------------
# FFPA: winners for head dims of 320 to 1024, which its kernels take in slices

FFPA = "xlite-dev/ffpa-attn@92e1d3b5"
FFPA_GPUS = {
    "NVIDIA_L20": "rtx4090",
    "NVIDIA_GeForce_RTX_5090": "rtx5090",
    "NVIDIA_RTX_PRO_5000_72GB_Blackwell": "rtx5090",
}
"""L20 and RTX PRO 5000 are not in the catalogue; parts of the same architecture stand for them."""


def ffpa(folder: Path) -> list[Winners]:
    """Return the forwards of each file, without and with tensor descriptors.

    Its forward sums a whole row of the output while slices of Q and K pass, as `fwd_streamed` does.
    Its backward kernels sum slices of gradients in one program, as no kernel of tilegen does.
    """
    tables: list[Winners] = []
    for file, stands_for in FFPA_GPUS.items():
        path = folder / f"{file}.json.gz"
        try:
            with gzip.open(path, "rt", encoding="utf-8") as opened:
                entries = json.load(opened)["entries"]
        except (OSError, ValueError, KeyError) as error:
            raise UnreadableTable(
                f'expected compressed JSON with "entries" at {path}: {error}'
            ) from None
        forwards = ("fwd_generic", "fwd_sm90_generic")
        others = [
            ("", None, f"{entry['kernel']}: no such kernel in tilegen")
            for entry in entries
            if entry["kernel"] not in forwards
        ]
        for kernel in forwards:
            mine = [_of_ffpa(entry) for entry in entries if entry["kernel"] == kernel]
            if mine:
                tables.append(
                    winners_of(
                        [*mine, *others],
                        source=f"{FFPA}:src/ffpa_attn/triton/configs/{file}.json",
                        name=kernel,
                        measured_on=file,
                        gpu=stands_for,
                        kernel="fwd_streamed",
                    )
                )
            others = []
    return tables


def _of_ffpa(entry: Mapping[str, Any]) -> tuple[str, TileConfig | None, str]:
    of, knobs = entry["config"], KERNELS["fwd_streamed"].knobs
    config = tile(*(of[knob] for knob in KNOBS), of["BLOCK_HEADDIM_QK"])
    taken = config is not None and all(
        getattr(config, name) in getattr(knobs, name) for name in ("block_m", "block_n", "block_d")
    )
    reason = ""
    if entry.get("has_attn_bias"):
        reason = "bias matrix"
    elif not taken or of["BLOCK_HEADDIM_QK"] != of["BLOCK_HEADDIM_V"]:
        reason = "tile that fwd_streamed does not take"
    problem = (
        "b1 hq{nheads_q} hkv{nheads_kv} q{seqlen_q} kv{seqlen_k} d{headdim} {dtype} ".format(
            **entry
        )
        + ("causal" if entry["causal"] else "full")
        + (" dropout" if entry.get("has_dropout") else "")
    )
    return problem, config, reason


# --------------------------------------------------------------------------------------------------
# IBM's caches of vLLM kernels: winners of plain attention, and of attention over pages

IBM = (
    "foundation-model-stack/vllm-triton-backend@bfdaac27"
    ":ibm-triton-lib/ibm_triton_lib/kernels/dejavu_data"
)
IBM_GPUS = {
    "NVIDIA_A100-SXM4-80GB": "a100",
    "NVIDIA_H100_80GB_HBM3": "h100",
    "AMD_Instinct_MI300X": "mi300x",
    "AMD_Instinct_MI250X_MI250": "mi300x",
}
"""MI250X is not in the catalogue; the nearest known stands for it."""
PLAIN, PAGED = "attn_fwd", "kernel_unified_attention_2d"
REPEATS = {"6", "10"}
"""Files that repeat the entries of another under the hash of another text."""


def ibm(folder: Path) -> list[Winners]:
    """Return the winners of each kernel on each GPU."""
    rows = [row for row in _ibm_rows(folder) if row["file"] not in REPEATS]
    return [
        winners_of(
            ((_of_ibm(row), _ibm_tile(row), "") for row in mine),
            source=IBM,
            name=kernel,
            measured_on=gpu,
            gpu=stands_for,
            kernel="fwd",
        )
        for gpu, stands_for in IBM_GPUS.items()
        for kernel in (PLAIN, PAGED)
        if (mine := [row for row in rows if (row["gpu"], row["kernel"]) == (gpu, kernel)])
    ]


def ibm_times(folder: Path) -> list[Point]:
    """Return the times of the winners of plain attention, whose batch is known, on GPUs of the
    catalogue: under CUDA graphs, so that they show what one launch takes."""
    points: list[Point] = []
    for row in _ibm_rows(folder):
        config = _ibm_tile(row)
        if row["kernel"] == PLAIN and row["gpu"].startswith("NVIDIA") and config:
            short = int(row["MAX_SEQLENS_Q"]) <= 256
            name = f"winner fwd, {'short' if short else 'long'}"
            seconds = float(row["best_ms"]) / 1e3
            gpu = IBM_GPUS[row["gpu"]]
            problem = PARSE(_of_ibm(row))
            points.append(Point(IBM, name, "Triton", gpu, problem, seconds, config=config))
    return points


def _ibm_rows(folder: Path) -> list[Row]:
    needed = ("gpu", "kernel", *(f"best_{knob}" for knob in KNOBS))
    return csv_rows(folder / "attention_winners.csv", needed)


def _ibm_tile(row: Row) -> TileConfig | None:
    return tile(*(row[f"best_{knob}"] for knob in KNOBS))


def _of_ibm(row: Row) -> str:
    """Return a problem. The keys do not record the batch: with these two the model is right in the
    median, on both GPUs. The paged kernel puts the query heads of a group into the rows of one
    tile, which tilegen does not: its problem is one of key-value heads with as many times the
    rows."""
    if row["kernel"] == PLAIN:
        mask = "causal" if row["IS_CAUSAL"] == "True" else "full"
        sizes = "b1 hq{HQ} hkv{HK} q{MAX_SEQLENS_Q} kv{MAX_SEQLENS_K} d{BLOCK_DMODEL} fp16"
        return f"{sizes.format(**row)} {mask}"
    group = int(row["num_queries_per_kv"])
    heads, rows = int(row["num_query_heads"]) // group, int(row["AVG_SEQ_Q"]) * group
    return f"b8 hq{heads} q{rows} kv{row['AVG_SEQ_K']} d{row['HEAD_SIZE']} fp16 full"
