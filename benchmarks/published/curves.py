"""Times of libraries, one for each problem: what the device allows, beside what the model says of
tilegen's kernels. cuDNN on an H200 (training, decoding), FlashAttention-3 and Triton on H100s."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.published.records import Point, csv_rows
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem

CUDNN = "NVIDIA/cudnn-frontend"
TRAINING = f"{CUDNN}@3929da2e:benchmark/sdpa_benchmark_training/results"
DECODING = f"{CUDNN}@b1214d5c:benchmark/attention_inference/results/decode_sweep/h200"
DECODE_SWEEP = "transcribed_decode_sweep_h200_20260928.csv"
DIRECTIONS: dict[str, Direction] = {"fwd": "forward", "bwd": "backward"}


def points(folder: Path) -> list[Point]:
    """Return all times that a problem of tilegen stands for."""
    cudnn = folder / "cudnn-frontend"
    times = [*hopper(folder / "published-tables" / "hopper.csv"), *decoding(cudnn / DECODE_SWEEP)]
    for path in sorted(cudnn.glob("h200_919_only_cudnn__*.csv")):
        times += training(path)
    return times


def training(path: Path) -> Iterator[Point]:
    """Yield cuDNN's passes on an H200 that succeeded, in bf16."""
    needed = [
        "success",
        "data_type",
        "attn_mask",
        "fwd_time_ms",
        "bwd_time_ms",
        "sliding_window_size",
    ]
    masks = {"no_mask": "full", "top_left": "causal", "bottom_right": "causal(bottom_right)"}
    for row in csv_rows(path, needed):
        if row["success"] != "True" or row["data_type"] != "bfloat16":
            continue
        mask = masks[row["attn_mask"]]
        if window := row.get("sliding_window_size"):
            mask = f"window({int(float(window)) - 1},0)"
        problem = AttentionProblem.parse(
            f"b{row['batch_size']} hq{row['num_q_heads']} hkv{row['num_kv_heads']} "
            f"q{row['q_seqlen']} kv{row['kv_seqlen']} "
            f"d{row['head_dim_qk']}/{row['head_dim_vo']} bf16 {mask}"
        )
        exact = row.get("deterministic_bwd") == "True"
        for name, direction in DIRECTIONS.items():
            if exact and name == "fwd":
                continue  # the same kernel again
            yield Point(
                source=f"{TRAINING} ({path.name})",
                name=f"training {name}{' deterministic' * exact}",
                library="cuDNN",
                gpu="h200",
                problem=problem,
                direction=direction,
                seconds=float(row[f"{name}_time_ms"]) / 1e3,
            )


def decoding(path: Path) -> Iterator[Point]:
    """Yield cuDNN's passes of few queries; those that failed have no time. The table's page size is
    that of other libraries of the sweep: cuDNN got whole sequences."""
    needed = [
        "batch",
        "q_tokens",
        "kv_len",
        "heads_q",
        "heads_kv",
        "head_dim",
        "library",
        "time_ms",
    ]
    for row in csv_rows(path, needed):
        if not row["time_ms"]:
            continue
        problem = AttentionProblem.parse(
            f"b{row['batch']} hq{row['heads_q']} hkv{row['heads_kv']} q{row['q_tokens']} "
            f"kv{row['kv_len']} d{row['head_dim']} bf16 causal(bottom_right)"
        )
        yield Point(
            source=DECODING,
            name="decode",
            library=row["library"],
            gpu="h200",
            problem=problem,
            direction="forward",
            seconds=float(row["time_ms"]) / 1e3,
        )


def hopper(path: Path) -> Iterator[Point]:
    """Yield times on H100s, as microseconds or as TFLOP/s of the usual count."""
    for row in csv_rows(path, ["source", "gpu", "library", "case", "seqlen", "value", "unit"]):
        case = re.fullmatch(r"(fwd|bwd) (full|causal) (?:bf16 )?B(\d+) H(\d+) d(\d+)", row["case"])
        if not case:
            continue
        direction, mask, batch, heads, width = case.groups()
        rows = int(row["seqlen"])
        problem = AttentionProblem.parse(f"b{batch} hq{heads} q{rows} d{width} bf16 {mask}")
        flops = 4 * int(batch) * int(heads) * rows**2 * int(width)
        flops *= (1 if direction == "fwd" else 2.5) / (1 if mask == "full" else 2)
        value = float(row["value"])
        yield Point(
            source=row["source"],
            name=f"training {direction}",
            library=row["library"],
            gpu="h100",
            problem=problem,
            direction=DIRECTIONS[direction],
            seconds=value / 1e6 if row["unit"] == "us" else flops / (value * 1e12),
        )
