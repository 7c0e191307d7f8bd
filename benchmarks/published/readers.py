"""Readers of published tables, a function for each source. Problems are notations that a row of the
table fills in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.environment import RESULTS
from benchmarks.published.records import (
    KNOBS,
    PARSE,
    Built,
    Point,
    Sweep,
    csv_rows,
    tile,
)
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem

DIRECTIONS: dict[str, Direction] = {"fwd": "forward", "bwd": "backward"}

# --------------------------------------------------------------------------------------------------
# AttentionFuse on an RTX 3090: three sweeps over tiles

FUSE = "vkd14/AttentionFuse@bb5d1bd8"
COMPILED = RESULTS / "published" / "attentionfuse_compiled.csv"
"""Registers and spills that ptxas reports for the published kernels, compiled for sm_86 by Triton
3.1.0, which the sweeps ran: how many programs share an SM depends on them."""
BACKWARD: tuple[Kernel, ...] = ("bwd_preprocess", "bwd_dkdv", "bwd_dq")
FORWARD_BESIDE = TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)
"""The tile of the causal forward that ran before each backward."""
SWEEPS: dict[str, tuple[str, str, str, tuple[Kernel, ...]]] = {
    "config_sweep_expanded": (
        *("dense forward d64", "latency_ms", "b4 hq12 q{seqlen} d64 fp16 full"),
        ("fwd",),
    ),
    "backward_config_sweep": (
        *("causal forward+backward d64", "fwd_bwd_ms", "b4 hq12 q{N} d64 fp16 causal"),
        BACKWARD,
    ),
    "gqa_config_sweep": (
        *("causal GQA forward d128", "latency_ms", "b2 hq32 hkv8 q{N} d128 fp16 causal"),
        ("fwd",),
    ),
}
"""Names, columns of times, problems and kernels of the sweeps, by file."""


def attentionfuse(folder: Path) -> list[Sweep]:
    """Return the sweeps of dense forwards, of causal passes and of grouped heads.

    Only rows that measure tiles: by a README of the data, the others timed a single kernel again
    and again, since the patched table was not the table in use.
    """
    sweeps: list[Sweep] = []
    compiled = csv_rows(COMPILED, ("sweep", "kernel", "config", "registers"))
    for file, (name, milliseconds, notation, kernels) in SWEEPS.items():
        built = {
            (row["kernel"], TileConfig.parse(row["config"])): Built(
                *(int(row[key]) for key in ("registers", "spill_bytes", "shared_bytes"))
            )
            for row in compiled
            if row["sweep"] == name
        }
        path = folder / f"e2e_2026-05-22__{file}.csv"
        times: dict[str, dict[TileConfig, float]] = {}
        for row in csv_rows(path, (milliseconds, *KNOBS)):
            config = tile(*(row[knob] for knob in KNOBS))
            if config and row.get("variant", "dense") == "dense":
                of_problem = times.setdefault(notation.format(**row), {})
                of_problem[config] = float(row[milliseconds]) / 1e3
        sweeps += [
            Sweep(
                source=f"{FUSE}:results/e2e_2026-05-22/{file}.csv",
                name=name,
                gpu="rtx3090",
                problem=PARSE(problem),
                kernels=kernels,
                beside=(("fwd", FORWARD_BESIDE),) if kernels == BACKWARD else (),
                seconds=seconds,
                built=built,
            )
            for problem, seconds in times.items()
        ]
    return sweeps


# --------------------------------------------------------------------------------------------------
# Times of libraries: cuDNN on an H200, FlashAttention-3 and Triton on H100s

CUDNN = "NVIDIA/cudnn-frontend"
DECODE_SWEEP = "transcribed_decode_sweep_h200_20260928.csv"


def library_times(folder: Path) -> list[Point]:
    """Return all times that a problem of tilegen stands for."""
    cudnn = folder / "cudnn-frontend"
    return [
        *_hopper(folder / "published-tables" / "hopper.csv"),
        *_decoding(cudnn / DECODE_SWEEP),
        *(
            point
            for path in sorted(cudnn.glob("h200_919_only_cudnn__*.csv"))
            for point in _training(path)
        ),
    ]


def _training(path: Path) -> Iterator[Point]:
    """Yield cuDNN's passes on an H200 that succeeded, in bf16."""
    needed = ("success", "data_type", "attn_mask", "fwd_time_ms", "bwd_time_ms")
    masks = {"no_mask": "full", "top_left": "causal", "bottom_right": "causal(bottom_right)"}
    sizes = (
        "b{batch_size} hq{num_q_heads} hkv{num_kv_heads} q{q_seqlen} kv{kv_seqlen} "
        "d{head_dim_qk}/{head_dim_vo} bf16"
    )
    source = f"{CUDNN}@3929da2e:benchmark/sdpa_benchmark_training/results ({path.name})"
    for row in csv_rows(path, (*needed, "sliding_window_size")):
        if row["success"] != "True" or row["data_type"] != "bfloat16":
            continue
        window = row["sliding_window_size"]
        mask = f"window({int(float(window)) - 1},0)" if window else masks[row["attn_mask"]]
        exact = row.get("deterministic_bwd") == "True"
        for name, direction in DIRECTIONS.items():
            if exact and name == "fwd":
                continue  # the same kernel again
            kind, seconds = f"training {name}{' deterministic' * exact}", row[f"{name}_time_ms"]
            problem = PARSE(f"{sizes.format(**row)} {mask}")
            yield Point(source, kind, "cuDNN", "h200", problem, float(seconds) / 1e3, direction)


def _decoding(path: Path) -> Iterator[Point]:
    """Yield cuDNN's passes of few queries; those that failed have no time. The table's page size is
    that of other libraries of the sweep: cuDNN got whole sequences."""
    needed = ("batch", "q_tokens", "kv_len", "heads_q", "heads_kv", "head_dim", "library")
    notation = "b{batch} hq{heads_q} hkv{heads_kv} q{q_tokens} kv{kv_len} d{head_dim} bf16"
    source = f"{CUDNN}@b1214d5c:benchmark/attention_inference/results/decode_sweep/h200"
    for row in csv_rows(path, (*needed, "time_ms")):
        if row["time_ms"]:
            problem = PARSE(f"{notation.format(**row)} causal(bottom_right)")
            seconds = float(row["time_ms"]) / 1e3
            yield Point(source, "decode", row["library"], "h200", problem, seconds)


def _hopper(path: Path) -> Iterator[Point]:
    """Yield times on H100s, as microseconds or as TFLOP/s of the usual count."""
    for row in csv_rows(path, ("source", "gpu", "library", "case", "seqlen", "value", "unit")):
        case = re.fullmatch(r"(fwd|bwd) (full|causal) (?:bf16 )?B(\d+) H(\d+) d(\d+)", row["case"])
        if not case:
            continue
        way, mask, batch, heads, width = case.groups()
        problem = PARSE(f"b{batch} hq{heads} q{row['seqlen']} d{width} bf16 {mask}")
        flops = 4 * int(batch) * int(heads) * int(row["seqlen"]) ** 2 * int(width)
        flops *= (1 if way == "fwd" else 2.5) / (1 if mask == "full" else 2)
        value = float(row["value"])
        seconds = value / 1e6 if row["unit"] == "us" else flops / (value * 1e12)
        names = row["source"], f"training {way}", row["library"], "h100"
        yield Point(*names, problem, seconds, DIRECTIONS[way])


# --------------------------------------------------------------------------------------------------
# Split counts of a decoding kernel on an H100

SPLITS = "tfan2437/flash-attention-lab@bc7fd945:bench/results/h100-80gb-hbm3"


def split_times(folder: Path) -> dict[AttentionProblem, dict[int, float]]:
    """Return the seconds of each problem by keys a split."""
    shape = ("batch", "heads", "heads_kv", "context", "head_dim")
    by_problem: dict[AttentionProblem, dict[int, float]] = {}
    for row in csv_rows(folder / "decode_splits_h100.csv", (*shape, "num_splits", "median_ms")):
        notation = "b{batch} hq{heads} hkv{heads_kv} q1 kv{context} d{head_dim} bf16"
        problem = PARSE(notation.format(**row))
        keys = -(-int(row["context"]) // int(row["num_splits"]))
        by_problem.setdefault(problem, {})[keys] = float(row["median_ms"]) / 1e3
    return by_problem
