"""Split counts of a decoding kernel on an H100, beside the model of `fwd_split` with as many keys a
split.

The published kernel has tilegen's grid, a program for each key-value head and split, but computes
on CUDA cores and waits for each load. So its counts are judged twice. With the tiles that tilegen
would take at each count, whose loads run ahead: would tilegen's choice have been good there? And
with a tile that waits, the published kernel's registers, and a latency such that one split takes as
long as was measured: does the law of programs and waves tell the times of the other counts?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.published.fit import scaled
from benchmarks.published.judge import SweepVerdict, judge_sweep
from benchmarks.published.records import Built, Sweep, csv_rows
from tilegen.choose.ranker import estimate, propose, time_as_compiled
from tilegen.choose.search_space import all_configs
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.kernels.split_kv import FWD_SPLIT
from tilegen.masks.grouping import packed_heads
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

SOURCE = "tfan2437/flash-attention-lab@bc7fd945:bench/results/h100-80gb-hbm3"
GPU = "h100"
SHAPE = ("batch", "heads", "heads_kv", "context", "head_dim")
BUILT = {
    1: Built(registers=56, spill_bytes=0, shared_bytes=2592),
    4: Built(registers=135, spill_bytes=0, shared_bytes=10368),
}
"""The published kernel for sm_90, bf16 and head dim 128, by query heads of a program:
profiling/ptxas/cc64b18.txt of the same repository."""
LARGEST_FACTOR = 64.0
"""Largest factor of the model's latency among which that of a waiting tile is looked for."""


def times(path: Path) -> dict[AttentionProblem, dict[int, float]]:
    """Return the seconds of each problem by keys a split."""
    by_problem: dict[AttentionProblem, dict[int, float]] = {}
    for row in csv_rows(path, (*SHAPE, "num_splits", "median_ms")):
        batch, heads, heads_kv, context, head_dim = (int(row[name]) for name in SHAPE)
        problem = AttentionProblem.parse(
            f"b{batch} hq{heads} hkv{heads_kv} q1 kv{context} d{head_dim} bf16"
        )
        keys = -(-context // int(row["num_splits"]))
        by_problem.setdefault(problem, {})[keys] = float(row["median_ms"]) / 1e3
    return by_problem


def judge(path: Path) -> list[SweepVerdict]:
    """Return the verdict on each problem's split counts, with either kind of tile."""
    verdicts: list[SweepVerdict] = []
    for problem, seconds in times(path).items():
        join = propose(KernelTask.of("fwd_combine", problem, gpu(GPU)), top=1)[0].estimate.seconds
        for name, costs in (
            ("tilegen's tiles", with_own_tiles(problem, seconds)),
            ("waiting tile", with_waiting_tile(problem, seconds)),
        ):
            sweep = Sweep(
                source=SOURCE,
                name=f"{problem.key}, {name}",
                gpu=GPU,
                problem=problem,
                kernels=("fwd_split", "fwd_combine"),
                seconds={config: seconds[config.split_kv] for config in costs},
            )
            verdicts.append(judge_sweep(sweep, {one: cost + join for one, cost in costs.items()}))
    return verdicts


def with_own_tiles(
    problem: AttentionProblem, seconds: Mapping[int, float]
) -> dict[TileConfig, float]:
    """Return the model's best tile at each number of keys a split that tilegen would take, and its
    seconds."""
    by_config: dict[TileConfig, float] = {}
    task = KernelTask.of("fwd_split", problem, gpu(GPU))
    for keys in seconds.keys() & set(FWD_SPLIT.knobs.split_kv):
        same = {replace(one, split_kv=keys) for one in all_configs(task)}
        costs = {one: estimate(task.tiled(one)).cost for one in same}
        best = min(costs, key=lambda one: (costs[one], one))
        by_config[best] = costs[best]
    return by_config


def with_waiting_tile(
    problem: AttentionProblem, seconds: Mapping[int, float]
) -> dict[TileConfig, float]:
    """Return a tile of 4 keys a warp that loads nothing ahead at each number of keys a split, and
    its seconds, with the latency that the time of the largest number asks for."""
    heads = packed_heads(problem)

    def costs(factor: float, of: Mapping[int, float]) -> dict[TileConfig, float]:
        tiles = [
            TileConfig(block_m=16 // heads, block_n=16, num_stages=1, heads=heads, split_kv=keys)
            for keys in of
        ]
        with scaled({"rates.latency_seconds": factor}):
            return {
                one: time_as_compiled(
                    Tiled.of("fwd_split", problem, gpu(GPU), one), BUILT[problem.group_size]
                ).seconds
                for one in tiles
            }

    most = max(seconds)
    low, high = 1 / LARGEST_FACTOR, LARGEST_FACTOR
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        (cost,) = costs(middle, {most: seconds[most]}).values()
        low, high = (middle, high) if cost < seconds[most] else (low, middle)
    return costs(low, seconds)
