"""Few queries on many keys: predicted for an H200, beside published times and goals, and measured.

    python -m benchmarks.decode --minutes 10

The table goes to benchmarks/results/decode_predicted.csv, and needs no GPU; it also says what the
choice is once its kernels are compiled, which takes half a minute the first time. With
TILEGEN_BATCH_INVARIANT=1, tilegen's calls are measured as batch-invariant ones. A predicted time is
that of a measurement here: launches count, and L2 is cold. On a GPU tilegen and its peers are then
timed side by side. Published times are those of kernels
alone (benchmarks/results/published/README.md).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.arithmetic import compulsory_bytes
from benchmarks.environment import RESULTS, Csv, Environment, Minutes, Seconds, has_gpu
from benchmarks.providers import providers
from benchmarks.rows import table, write
from benchmarks.run import cases, run_all
from benchmarks.workloads import SERVED, Workload
from tilegen import cpu
from tilegen.choose.families import family
from tilegen.choose.ranker import (
    best_of,
    estimate,
    invariant_config,
    time_as_compiled,
)
from tilegen.compiling.verdicts import verdict
from tilegen.errors import BuildFailed
from tilegen.gpus.spec import gpu
from tilegen.kernels.registry import FORWARD, KERNELS
from tilegen.model.splits import splits_of
from tilegen.model.time import launch_seconds
from tilegen.pipeline import choose_by_model
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

GPU = "h200"
PREDICTED = RESULTS / "decode_predicted.csv"
BANDWIDTH = 4.3e12
"""Bandwidth of DRAM that a good kernel reaches on an H200 [bytes/s]."""
DECODE_SWEEP = "NVIDIA/cudnn-frontend@b1214d5c, decode_sweep_20260928_131747.csv: cuDNN 9.27.0"
PREFILL_SWEEP = "NVIDIA/cudnn-frontend, prefill_sweep_20260928_142443.csv: cuDNN"
PEERS = ("tilegen", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flashinfer", "flex")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A problem of few queries, the best published time of it on an H200, and a goal."""

    workload: Workload
    published_us: float
    goal_us: float


def _target(
    name: str, problem: str, published_us: float, goal_us: float, source: str = DECODE_SWEEP
) -> Target:
    return Target(
        workload=Workload(
            name=name,
            problem=AttentionProblem.parse(problem),
            source=source,
            directions=SERVED,
        ),
        published_us=published_us,
        goal_us=goal_us,
    )


def _at_bandwidth(problem: str) -> float:
    """Return the microseconds of all compulsory bytes at BANDWIDTH."""
    return 1e6 * compulsory_bytes(AttentionProblem.parse(problem), "forward") / BANDWIDTH


_BATCH_8, _BATCH_32 = (f"b{batch} hq64 hkv8 q1 kv8192 d128 bf16" for batch in (8, 32))
_LAST = "bf16 causal(bottom_right)"
TARGETS = (
    _target("decode-8k-64h", "b1 hq64 hkv8 q1 kv8192 d128 bf16", 14.56, 10),
    _target("decode-8k-16h", "b1 hq16 hkv2 q1 kv8192 d128 bf16", 6.208, 4),
    _target("verify-q8-128k-16h", f"b1 hq16 hkv2 q8 kv131072 d128 {_LAST}", 1496.1, 50),
    _target("verify-q8-128k-64h", f"b1 hq64 hkv8 q8 kv131072 d128 {_LAST}", 1506.1, 150),
    _target("verify-q8-128k-d256", f"b1 hq8 hkv1 q8 kv131072 d256 {_LAST}", 2805.8, 60),
    _target(
        "prefill-q256-128k-8h", f"b1 hq8 hkv1 q256 kv131072 d128 {_LAST}", 1715, 300, PREFILL_SWEEP
    ),
    _target("prompt-2k-8h", "b1 hq8 hkv1 q2048 d128 bf16 causal", 30, 20, PREFILL_SWEEP),
    _target("mla-decode-128k", f"b1 hq64 hkv1 q1 kv131072 d512 {_LAST} latent", 402, 100),
    _target("mla-verify-q2-128k", f"b1 hq64 hkv1 q2 kv131072 d512 {_LAST} latent", 10850, 130),
    _target("mla-decode-128k-576", f"b1 hq64 hkv1 q1 kv131072 d576/512 {_LAST} latent", 402, 100),
    # 4.4 TFLOP, at 350 TFLOP/s.
    _target(
        "mla-prefill-8k", "b1 hq64 hkv1 q8192 d512 bf16 causal latent", 43600, 12566, PREFILL_SWEEP
    ),
    _target("decode-8k-64h-b8", _BATCH_8, 72.0, _at_bandwidth(_BATCH_8)),
    _target("decode-8k-64h-b32", _BATCH_32, 251.52, _at_bandwidth(_BATCH_32)),
)


@dataclass(frozen=True, kw_only=True)
class Predicted(Environment):
    """The model's choice for a target, and its time beside others."""

    name: str
    problem: str
    family: str
    configs: str
    splits: int
    """Number of parts that the keys are split into; 1 where they are not split."""
    predicted_us: float
    invariant_us: float
    """Predicted time of the problem in batch-invariant mode [us]."""
    launches_us: float
    """Part of `predicted_us` that is launches [us]."""
    bytes_us: float
    """Time of the compulsory bytes at 4.3 TB/s [us]."""
    published_us: float
    goal_us: float
    predicted_over_goal: float
    published_by: str
    compiled: str = ""
    """Configs that a call settles on once the compiler was asked, each with its registers and the
    bytes that a thread spills, `m1n32w4s1:48:0`."""
    compiled_us: float | None = None
    """Predicted time of these with what the compiler says that they use [us]."""


def predict(target: Target) -> Predicted:
    """Return the row of a target."""
    problem, spec = target.workload.problem, gpu(GPU)
    name = family(problem, spec, "forward")
    best = [
        best_of(KernelTask.of(kernel, problem, spec)).estimate for kernel in FORWARD[name].names
    ]
    seconds = sum(cost.seconds for cost in best)
    launches = sum(launch_seconds(KernelTask.of(cost.kernel, problem, spec), 1) for cost in best)
    split = [one for one in best if KERNELS[one.kernel].splits]
    counts = [splits_of(Tiled.of(one.kernel, problem, spec, one.config)).count for one in split]
    return Predicted(
        name=target.workload.name,
        problem=problem.key,
        family=name,
        configs=" ".join(cost.config.key for cost in best),
        splits=max(counts, default=1),
        predicted_us=1e6 * seconds,
        invariant_us=1e6 * _invariant_seconds(problem),
        launches_us=1e6 * launches,
        bytes_us=_at_bandwidth(problem.key),
        published_us=target.published_us,
        goal_us=target.goal_us,
        predicted_over_goal=1e6 * seconds / target.goal_us,
        published_by=target.workload.source,
    )


def as_compiled(row: Predicted) -> Predicted:
    """Return a row with what compiling its kernels tells, which takes seconds."""
    problem, spec = AttentionProblem.parse(row.problem), gpu(GPU)
    told, seconds = [], 0.0
    for name in FORWARD[row.family].names:
        choice = choose_by_model(KernelTask.of(name, problem, spec))
        config, built = choice.config, verdict(choice.tiled, aligned=True)
        if isinstance(built, BuildFailed):
            raise built
        told.append(f"{config.key}:{built.registers}:{built.spill_bytes}")
        seconds += time_as_compiled(choice.tiled, built).seconds
    return replace(row, compiled=" ".join(told), compiled_us=1e6 * seconds)


def _invariant_seconds(problem: AttentionProblem) -> float:
    spec, alike = gpu(GPU), replace(problem, invariant=True)
    kernels = FORWARD[family(alike, spec, "forward")].names
    tasks = [KernelTask.of(name, alike, spec) for name in kernels]
    return sum(estimate(task.tiled(invariant_config(task))).seconds for task in tasks)


def main(
    minutes: Minutes = 10.0,
    seconds: Seconds = 0.3,
    predicted: Annotated[
        Path, typer.Option(help="File for the table of predictions; replaced.")
    ] = PREDICTED,
    csv: Csv = None,
) -> None:
    """Print what is predicted for few queries, and measure it where there is a GPU.

    Example: python -m benchmarks.decode --minutes 10
    """
    started = time.monotonic()
    rows = [predict(target) for target in TARGETS]
    if not cpu.is_interpreting():  # which compiles nothing
        rows = list(map(as_compiled, rows))
    write(predicted, rows)
    names = "name predicted_us compiled_us invariant_us bytes_us published_us goal_us family splits"
    print(table(rows, [*names.split(), "configs"]))
    if not has_gpu():
        print("no GPU that PyTorch can use: nothing is measured")
        return
    todo = cases(
        [target.workload for target in TARGETS],
        [provider for provider in providers() if provider.name in PEERS],
    )
    left = minutes - (time.monotonic() - started) / 60
    run_all(list(todo), csv, minutes=left, seconds=seconds)


if __name__ == "__main__":
    typer.run(main)
