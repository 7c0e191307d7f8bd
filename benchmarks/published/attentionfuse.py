"""AttentionFuse on an RTX 3090: three sweeps over tiles, restricted to rows that measure tiles.

By a README of the data, the other rows timed a single kernel again and again: the patched table was
not the table in use.

How many programs share an SM depends on registers, and those on the kernel's text and compiler.
`attentionfuse_compiled.csv` holds the registers and spills that ptxas reports for the published
kernels, compiled for sm_86 by Triton 3.1.0, which the sweeps ran. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.environment import RESULTS
from benchmarks.published.records import Built, Sweep, csv_rows, tile
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem

COMMIT = "vkd14/AttentionFuse@bb5d1bd8"
GPU = "rtx3090"
COMPILED = RESULTS / "published" / "attentionfuse_compiled.csv"
KNOBS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
FORWARD_BESIDE = TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)
"""The tile of the causal forward that ran before each backward."""


def sweeps(folder: Path) -> list[Sweep]:
    """Return the sweeps of dense forwards, of causal passes and of grouped heads."""
    return [
        *_sweep(
            folder / "e2e_2026-05-22__config_sweep_expanded.csv",
            "dense forward d64",
            ("seqlen", "latency_ms"),
            "b4 hq12 q{} d64 fp16 full",
            ("fwd",),
            only={"variant": "dense"},
        ),
        *_sweep(
            folder / "e2e_2026-05-22__backward_config_sweep.csv",
            "causal forward+backward d64",
            ("N", "fwd_bwd_ms"),
            "b4 hq12 q{} d64 fp16 causal",
            ("bwd_preprocess", "bwd_dkdv", "bwd_dq"),
            beside=(("fwd", FORWARD_BESIDE),),
        ),
        *_sweep(
            folder / "e2e_2026-05-22__gqa_config_sweep.csv",
            "causal GQA forward d128",
            ("N", "latency_ms"),
            "b2 hq32 hkv8 q{} d128 fp16 causal",
            ("fwd",),
        ),
    ]


def _sweep(
    path: Path,
    name: str,
    columns: tuple[str, str],
    notation: str,
    kernels: tuple[Kernel, ...],
    *,
    beside: tuple[tuple[Kernel, TileConfig], ...] = (),
    only: dict[str, str] | None = None,
) -> Iterator[Sweep]:
    length, milliseconds = columns
    built = {
        (row["kernel"], TileConfig.parse(row["config"])): Built(
            registers=int(row["registers"]),
            spill_bytes=int(row["spill_bytes"]),
            shared_bytes=int(row["shared_bytes"]),
        )
        for row in csv_rows(COMPILED, ("sweep", "kernel", "config", "registers"))
        if row["sweep"] == name
    }
    only = only or {}
    times: dict[int, dict[TileConfig, float]] = {}
    for row in csv_rows(path, (*columns, *KNOBS, *only)):
        if all(row[key] == value for key, value in only.items()):
            config = tile(*(row[knob] for knob in KNOBS))
            assert config
            times.setdefault(int(row[length]), {})[config] = float(row[milliseconds]) / 1e3
    for rows, seconds in times.items():
        yield Sweep(
            source=f"{COMMIT}:results/{path.name.replace('__', '/')}",
            name=name,
            gpu=GPU,
            problem=AttentionProblem.parse(notation.format(rows)),
            kernels=kernels,
            beside=beside,
            seconds=seconds,
            built=built,
        )
