"""Law of an H200 by published times of decoding a token: a fixed time, a bandwidth, what leaves L2
meanwhile; and the model's time of tilegen's pass beside each published one.

The published times are those of kernels alone, by the profiler, after 256 MiB of zeros were written
(`benchmark_single_attention.py` of NVIDIA/cudnn-frontend): no launch is in them, and L2 is full of
bytes that go to DRAM when others come. tilegen measures after the same zeros.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.arithmetic import compulsory_bytes
from benchmarks.published.judge import SweepVerdict, judge_sweep
from benchmarks.published.readers import SPLITS
from benchmarks.published.records import Point, Sweep
from tilegen.choose.ranker import estimate, propose
from tilegen.choose.search_space import all_configs
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import FORWARD
from tilegen.kernels.split_kv import FWD_SPLIT
from tilegen.model.splits import splits_of
from tilegen.model.time import launch_seconds
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

FITTED_HEAD_DIM = 128
"""Head dim whose times are the envelope: cuDNN's kernel for 256 takes a fifth longer throughout."""
SHORTEST = 5e-6
"""Time below which a kernel's time is mostly that of launching it [seconds]."""


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """Time of a pass [seconds]: fixed + (bytes + pushed_out * min(bytes, L2)) / bandwidth."""

    fixed: float
    bandwidth: float
    """Bandwidth of DRAM [bytes/s]."""
    pushed_out: float
    l2_bytes: int

    def seconds(self, moved: float) -> float:
        """Return the time of a pass that moves so many bytes."""
        leaving = self.pushed_out * min(moved, self.l2_bytes)
        return self.fixed + (moved + leaving) / self.bandwidth


def envelope(times: Sequence[tuple[float, float]], l2_bytes: int) -> Envelope:
    """Return the envelope of (bytes, seconds): least squares of relative errors."""
    moved, seconds = np.array(times, dtype=float).T
    terms = np.stack([np.ones_like(moved), moved, np.minimum(moved, l2_bytes)], axis=1)
    coefficients, *_ = np.linalg.lstsq(terms / seconds[:, None], np.ones_like(seconds))
    fixed, inverse, leaving = coefficients.tolist()
    return Envelope(
        fixed=fixed, bandwidth=1 / inverse, pushed_out=leaving / inverse, l2_bytes=l2_bytes
    )


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """A published time of decoding a token, beside the envelope's and the model's."""

    problem: str
    megabytes: float
    """Compulsory traffic [1e6 bytes]."""
    published_us: float
    envelope_us: float
    split_us: float
    """Time of `fwd_split` by the model, without the launch [us]."""
    combine_us: float
    """Time of `fwd_combine` by the model, without the launch [us]."""
    model_over_published: float
    splits: int
    chosen: str
    library: str
    source: str


def decoded(points: Sequence[Point]) -> list[Point]:
    """Return the times of decoding one token."""
    return [one for one in points if one.name == "decode" and one.problem.seqlen_q == 1]


def fitted(points: Sequence[Point]) -> Envelope:
    """Return the envelope of an H200 from the times with the head dim that shows it."""
    return envelope(
        [
            (float(compulsory_bytes(one.problem, "forward")), one.seconds)
            for one in decoded(points)
            if one.problem.head_dim_qk == FITTED_HEAD_DIM
        ],
        gpu("h200").l2_bytes,
    )


def judge(points: Sequence[Point]) -> list[Decoding]:
    """Return each published time of decoding a token beside what the model says of `split_kv`."""
    law, judged = fitted(points), list[Decoding]()
    for decoding in decoded(points):
        spec, moved = gpu(decoding.gpu), compulsory_bytes(decoding.problem, "forward")
        best = [
            propose(KernelTask.of(kernel, decoding.problem, spec), top=1)[0].estimate
            for kernel in FORWARD["split_kv"].names
        ]
        split, combine = (
            cost.seconds - launch_seconds(KernelTask.of(cost.kernel, decoding.problem, spec), 1)
            for cost in best
        )
        judged.append(
            Decoding(
                problem=decoding.problem.key,
                megabytes=moved / 1e6,
                published_us=decoding.seconds * 1e6,
                envelope_us=law.seconds(moved) * 1e6,
                split_us=split * 1e6,
                combine_us=combine * 1e6,
                model_over_published=(split + combine) / decoding.seconds,
                splits=splits_of(
                    Tiled.of(FWD_SPLIT.name, decoding.problem, spec, best[0].config)
                ).count,
                chosen=" ".join(cost.config.key for cost in best),
                library=decoding.library,
                source=decoding.source,
            )
        )
    return judged


def judge_splits(times: Mapping[AttentionProblem, Mapping[int, float]]) -> Iterator[SweepVerdict]:
    """Yield the verdict on the split counts of each problem on an H100, from seconds by keys a
    split: with the tiles that tilegen would take at each count, would its choice be good?"""
    spec = gpu("h100")
    for problem, seconds in times.items():
        task = KernelTask.of("fwd_split", problem, spec)
        join = propose(KernelTask.of("fwd_combine", problem, spec), top=1)[0].estimate.seconds
        costs: dict[TileConfig, float] = {}
        for keys in seconds.keys() & set(FWD_SPLIT.knobs.split_kv):
            same = {replace(one, split_kv=keys) for one in all_configs(task)}
            cost, best = min((estimate(task.tiled(one)).cost, one) for one in same)
            costs[best] = cost + join
        yield judge_sweep(
            Sweep(
                source=SPLITS,
                name=f"{problem.key}, tilegen's tiles",
                gpu="h100",
                problem=problem,
                kernels=("fwd_split", "fwd_combine"),
                seconds={config: seconds[config.split_kv] for config in costs},
            ),
            costs,
        )


def following_launch(points: Sequence[Point]) -> float:
    """Return the median seconds that the model lacks, but for launches, of the shortest kernels on
    an H100 that followed each other in a CUDA graph."""
    lacking: list[float] = []
    for point in points:
        if point.config and point.gpu == "h100" and point.seconds < SHORTEST:
            spec = gpu(point.gpu)
            programs = estimate(Tiled.of("fwd", point.problem, spec, point.config)).seconds
            lacking.append(
                point.seconds
                - programs
                + launch_seconds(KernelTask.of("fwd", point.problem, spec), 1)
            )
    return statistics.median(lacking) if lacking else 0.0


def lines(points: Sequence[Point], verdicts: Sequence[Decoding]) -> Iterator[str]:
    """Yield the envelope, and how far the published times and the model's are from each other."""
    law = fitted(points)
    yield (
        f"  decoding a token on an H200 is {law.fixed * 1e6:.1f} us + (bytes + "
        f"{law.pushed_out:.2f} * min(bytes, L2)) / {law.bandwidth / 1e12:.2f} TB/s"
    )
    for head_dim in sorted({one.problem.head_dim_qk for one in decoded(points)}):
        mine = [one for one in verdicts if f" d{head_dim} " in one.problem]
        off = [abs(one.envelope_us / one.published_us - 1) for one in mine]
        ratios = [one.model_over_published for one in mine]
        yield (
            f"  head dim {head_dim}, {len(mine)} problems: envelope off by "
            f"{statistics.median(off):.1%} in the median, {max(off):.1%} at most; model of "
            f"split_kv over published {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}..{max(ratios):.2f})"
        )
    yield f"  a launch that follows another: {following_launch(points) * 1e6:.2f} us"
