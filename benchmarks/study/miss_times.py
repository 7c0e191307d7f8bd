"""Time both schedules on one core of this processor, where head dims are large."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.cpu_peak import peak_gflops
from benchmarks.environment import Environment, environment
from benchmarks.rows import with_environment
from benchmarks.study.counting import ONE_PANEL, run_pass
from benchmarks.study.misses import tiles_of
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem

CASES = (("fp32", 256), ("fp32", 512), ("bf16", 512), ("bf16", 1024))
SEQLEN = 1024
ROUNDS = 7
TILES = {
    "large": ("fwd 64x64", "fwd 128x64", "fwd 64x128"),
    "small": (
        "fwd_scores 64x64x64, fwd_values 64x64x128",
        "fwd_scores 128x128x64, fwd_values 128x64x128",
        "fwd_scores 128x128x64, fwd_values 128x64x256",
    ),
}


@dataclass(frozen=True, kw_only=True)
class TimeRow(Environment):
    """The fastest of some tiles of a schedule, forward, dense, one head, one thread."""

    dtype: str
    head_dim: int
    seqlen: int
    schedule: str
    tiles: str
    gflops: float
    """Operations of the two products over the thread's own time, the least of several rounds."""
    peak_gflops: float
    """Operations of independent FMAs in fp32, measured in the same process."""


def time_rows() -> Iterator[TimeRow]:
    """Yield a row for every case and schedule."""
    peak = peak_gflops(1)
    for dtype, head_dim in CASES:
        problem = AttentionProblem.parse(
            f"b1 hq1 hkv1 q{SEQLEN} kv{SEQLEN} d{head_dim} {dtype} full"
        )
        for schedule, options in TILES.items():
            speeds = {tiles: _gflops(problem, tiles_of(tiles)) for tiles in options}
            tiles = max(speeds, key=speeds.__getitem__)
            yield with_environment(
                TimeRow,
                environment(),
                dtype=dtype,
                head_dim=head_dim,
                seqlen=SEQLEN,
                schedule=schedule,
                tiles=tiles,
                gflops=speeds[tiles],
                peak_gflops=peak,
            )


def _gflops(problem: AttentionProblem, configs: Mapping[Kernel, TileConfig]) -> float:
    import torch

    from tilegen import cpu
    from tilegen.check.reference import make_inputs
    from tilegen.emit.render import render

    torch.set_num_threads(1)  # the clock is that of one thread
    inputs = make_inputs(problem, device="cpu")
    launch = {
        kernel: cpu.load(render(problem, config, kernel)).launch
        for kernel, config in configs.items()
    }
    least = float("inf")
    for _ in range(ROUNDS):
        started = time.thread_time()
        run_pass(launch, inputs, panel_rows=ONE_PANEL)
        least = min(least, time.thread_time() - started)
    return 4 * problem.seqlen_q * problem.seqlen_kv * problem.head_dim_qk / least / 1e9
