"""The model beside what was measured: rank correlation, regret, trials, hits of winners."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.arithmetic import ideal_seconds
from benchmarks.published.records import Point, Sweep, Winners
from benchmarks.ranking import Ranking
from tilegen.choose.families import kernels_of
from tilegen.choose.ranker import estimate, propose, time_as_compiled
from tilegen.choose.search_space import all_configs
from tilegen.errors import Unsupported
from tilegen.gpus.spec import GpuSpec, gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.footprint import footprint
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

GOOD = 0.02
"""Regret at which a search has found what it looked for."""
FIRST = (1, 4, 8, 16)
"""Lengths of the head of a ranking that a winner should be in."""


@dataclass(frozen=True, kw_only=True)
class SweepVerdict:
    """Ranking of the tiles of one sweep by the model."""

    source: str
    sweep: str
    length: int
    configs: int
    spread: float
    """The slowest time over the fastest."""
    spearman: float
    regret: float
    """Time of the model's first choice over the best time, less 1."""
    trials: int
    """Tiles to try in the model's order until one is within 2 % of the best, or within noise."""
    noise: float
    ratio: float
    """Predicted time over measured, at the best tile."""
    chosen: str
    best: str


def judge_sweep(sweep: Sweep, predicted: Mapping[TileConfig, float]) -> SweepVerdict:
    """Return the verdict on predicted times of a sweep's tiles."""
    times = sweep.seconds
    ranking = Ranking(measured=dict(sorted(times.items())), predicted=predicted)
    order, best = ranking.order, ranking.best
    good = (1 + max(GOOD, sweep.noise)) * times[best]
    return SweepVerdict(
        source=sweep.source,
        sweep=sweep.name,
        length=sweep.length,
        configs=len(times),
        spread=max(times.values()) / times[best],
        spearman=ranking.correlation,
        regret=ranking.regret,
        trials=next(i for i, one in enumerate(order, 1) if times[one] <= good),
        noise=sweep.noise,
        ratio=ranking.ratio,
        chosen=order[0].key,
        best=best.key,
    )


def predictions(sweep: Sweep, *, compiled: bool = True) -> dict[TileConfig, float]:
    """Return the model's time of each tile of a sweep, all its kernels together: with what their
    compiler reports, or with what the model predicts that they use."""
    spec, problem = gpu(sweep.gpu), sweep.problem

    def seconds(kernel: Kernel, config: TileConfig) -> float:
        if compiled and (built := sweep.built.get((kernel, config))):
            return time_as_compiled(Tiled.of(kernel, problem, spec, config), built).seconds
        return estimate(Tiled.of(kernel, problem, spec, config)).seconds

    beside = sum(seconds(kernel, config) for kernel, config in sweep.beside)
    return {
        config: beside + sum(seconds(kernel, config) for kernel in sweep.kernels)
        for config in sweep.seconds
    }


@dataclass(frozen=True, kw_only=True)
class WinnersVerdict:
    """Shares of the published winners that the model has among its first configs."""

    stride: int
    """Every which row of the table is judged."""
    source: str
    table: str
    measured_on: str
    judged_as: str
    kernel: str
    judged: int
    left_out: str
    grid: int
    """Number of configs that are ranked: all products of knob values that win somewhere."""
    median_rank: float
    first_1: float
    first_4: float
    first_8: float
    first_16: float
    in_own: float
    """Part of the winners that tilegen's own search space has at all."""
    own_first_8: float
    """Part of the winners that are among the model's first 8 of that space."""


def rank(times: Iterable[float], winner: float) -> int:
    """Return the rank of a winner among predicted times, including its own; ties precede it."""
    return max(1, sum(one <= winner for one in times))


def judge_winners(table: Winners) -> WinnersVerdict | None:
    """Return how the model ranks the winners of a table; None if none can be judged."""
    spec, grid = gpu(table.gpu), table.grid
    ranks: list[int] = []
    own: list[int] = []
    there, left_out = 0, table.left_out.copy()
    for problem, winner in table.rows:
        if not fits(problem, spec, winner, table.kernel):
            left_out["tile that does not fit tilegen's kernel"] += 1
            continue
        times = {config: hoped(problem, spec, config, table.kernel) for config in grid}
        ranks.append(rank(times.values(), times[winner]))
        known, place = own_rank(problem, spec, table.kernel, winner)
        there += known
        if place:
            own.append(place)
    if not ranks:
        return None
    count = len(ranks)
    return WinnersVerdict(
        stride=table.stride,
        source=table.source,
        table=table.name,
        measured_on=table.measured_on,
        judged_as=table.gpu,
        kernel=table.kernel,
        judged=count,
        left_out="; ".join(f"{number} {why}" for why, number in left_out.most_common()),
        grid=len(grid),
        median_rank=statistics.median(ranks),
        **{f"first_{k}": sum(one <= k for one in ranks) / count for k in FIRST},
        in_own=there / count,
        own_first_8=sum(one <= 8 for one in own) / count,
    )


def hoped(problem: AttentionProblem, spec: GpuSpec, config: TileConfig, kernel: Kernel) -> float:
    """Return the model's time of a config; one that is predicted not to fit comes last."""
    seconds = estimate(Tiled.of(kernel, problem, spec, config)).seconds
    return seconds if fits(problem, spec, config, kernel) else 1e6 + seconds


def fits(problem: AttentionProblem, spec: GpuSpec, config: TileConfig, kernel: Kernel) -> bool:
    """True for a config whose program of tilegen's kernel is predicted to fit an SM."""
    return footprint(Tiled.of(kernel, problem, spec, config)).fits(spec)


def own_rank(
    problem: AttentionProblem, spec: GpuSpec, kernel: Kernel, winner: TileConfig
) -> tuple[bool, int]:
    """Return whether tilegen's space has a config, and its rank there; 0 if it is not proposed."""
    task = KernelTask.of(kernel, problem, spec)
    if winner not in all_configs(task):
        return False, 0
    try:
        ranked = propose(task, top=2**16)
    except Unsupported:
        return True, 0
    times = {one.config: one.estimate.seconds for one in ranked}
    return True, rank(times.values(), times[winner]) if winner in times else 0


@dataclass(frozen=True, kw_only=True)
class PointVerdict:
    """The model's time of tilegen's kernels beside a library's time of the same problem."""

    source: str
    name: str
    library: str
    gpu: str
    problem: str
    published_us: float
    model_us: float
    """Time by the model of its first choices, or of the tile that was timed [us]."""
    ratio: float
    """Time by the model over the published time."""
    bound_us: float
    """Time that no kernel falls below [us]: products of kept pairs, or compulsory bytes, at peak
    rates."""
    published_over_bound: float
    model_over_bound: float
    chosen: str


def judge_point(point: Point) -> PointVerdict:
    """Return the model's time beside a library's. Raises Unsupported."""
    spec = gpu(point.gpu)
    if point.config:
        chosen = [estimate(Tiled.of("fwd", point.problem, spec, point.config))]
    else:
        chosen = [
            propose(KernelTask.of(kernel, point.problem, spec), top=1)[0].estimate
            for kernel in kernels_of(point.problem, spec, point.direction)
        ]
    seconds = sum(one.seconds for one in chosen)
    bound = ideal_seconds(point.problem, point.direction, spec)
    return PointVerdict(
        source=point.source,
        name=point.name,
        library=point.library,
        gpu=point.gpu,
        problem=point.problem.key,
        published_us=point.seconds * 1e6,
        model_us=seconds * 1e6,
        ratio=seconds / point.seconds,
        bound_us=bound * 1e6,
        published_over_bound=point.seconds / bound,
        model_over_bound=seconds / bound,
        chosen=" ".join(one.config.key for one in chosen),
    )
