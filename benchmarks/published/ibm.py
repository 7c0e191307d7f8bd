"""IBM's caches of vLLM kernels: winners of plain attention, and of attention over pages.

The paged kernel puts the query heads of a group into the rows of one tile, which tilegen does not:
its problem is written as one of key-value heads alone, with as many times the rows. Pages are not
modelled, and the keys do not record the batch.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks.published.records import Point, Winners, csv_rows, tile
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem

COMMIT = "foundation-model-stack/vllm-triton-backend@bfdaac27"
SOURCE = f"{COMMIT}:ibm-triton-lib/ibm_triton_lib/kernels/dejavu_data"
GPUS = {
    "NVIDIA_A100-SXM4-80GB": "a100",
    "NVIDIA_H100_80GB_HBM3": "h100",
    "AMD_Instinct_MI300X": "mi300x",
    "AMD_Instinct_MI250X_MI250": "mi300x",
}
"""MI250X is not in the catalogue; the nearest known stands for it."""
PLAIN, PAGED = "attn_fwd", "kernel_unified_attention_2d"
BATCH = {PLAIN: 1, PAGED: 8}
"""Batches that the times speak for: with them the model is right in the median, on both GPUs."""
NEEDED = ["gpu", "kernel", "best_BLOCK_M", "best_BLOCK_N", "best_num_warps", "best_num_stages"]
KNOBS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
REPEATS = {"6", "10"}
"""Files that repeat the entries of another under the hash of another text."""


def winners(folder: Path) -> list[Winners]:
    """Return the winners of each kernel on each GPU."""
    rows = [
        row
        for row in csv_rows(folder / "attention_winners.csv", NEEDED)
        if row["file"] not in REPEATS
    ]
    tables: list[Winners] = []
    for gpu, stands_for in GPUS.items():
        for kernel in (PLAIN, PAGED):
            mine = [row for row in rows if (row["gpu"], row["kernel"]) == (gpu, kernel)]
            kept: list[tuple[AttentionProblem, TileConfig]] = []
            left_out: Counter[str] = Counter()
            for row in mine:
                config = tile(*(row[f"best_{knob}"] for knob in KNOBS))
                if config is None:
                    left_out["tile that tilegen does not write"] += 1
                else:
                    kept.append((_problem(row), config))
            if mine:
                tables.append(
                    Winners(
                        source=SOURCE,
                        name=kernel,
                        measured_on=gpu,
                        gpu=stands_for,
                        kernel="fwd",
                        rows=tuple(kept),
                        left_out=left_out,
                    )
                )
    return tables


def timed(folder: Path) -> list[Point]:
    """Return the times of the winners of plain attention, whose batch is known, on GPUs of the
    catalogue: under CUDA graphs, so that they show what one launch takes."""
    points: list[Point] = []
    for row in csv_rows(folder / "attention_winners.csv", NEEDED):
        config = tile(*(row[f"best_{knob}"] for knob in KNOBS))
        if row["kernel"] == PLAIN and row["gpu"].startswith("NVIDIA") and config:
            problem = _problem(row)
            points.append(
                Point(
                    source=SOURCE,
                    name=f"winner fwd, {'short' if problem.seqlen_q <= 256 else 'long'}",
                    library="Triton",
                    gpu=GPUS[row["gpu"]],
                    problem=problem,
                    direction="forward",
                    seconds=float(row["best_ms"]) / 1e3,
                    config=config,
                )
            )
    return points


def _problem(row: dict[str, str]) -> AttentionProblem:
    batch = BATCH[row["kernel"]]
    if row["kernel"] == PLAIN:
        mask = "causal" if row["IS_CAUSAL"] == "True" else "full"
        return AttentionProblem.parse(
            f"b{batch} hq{row['HQ']} hkv{row['HK']} q{row['MAX_SEQLENS_Q']} "
            f"kv{row['MAX_SEQLENS_K']} d{row['BLOCK_DMODEL']} fp16 {mask}"
        )
    group = int(row["num_queries_per_kv"])
    heads, rows = int(row["num_query_heads"]) // group, int(row["AVG_SEQ_Q"]) * group
    return AttentionProblem.parse(
        f"b{batch} hq{heads} q{rows} kv{row['AVG_SEQ_K']} d{row['HEAD_SIZE']} fp16 full"
    )
