"""Quality of the model's ranking and of the search, by recorded timings; needs no GPU.

    python -m benchmarks.tuner_quality --seeds 3

Regret is the time of the config chosen over that of the best one recorded, less one. Strategies:

- `model`     the ranking from the top, no search; regret after 1 and 5 trials is top-1 and top-5
- `prior`     `tune` as it is: the model's proposals first, then Optuna
- `no prior`  `tune` without proposals, over a shuffled space
- `random`    configs in random order

Recordings come from `python -m benchmarks.exhaustive` and `python -m benchmarks.cpu_regret sweep`.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args
from unittest import mock

import typer

import tilegen
from benchmarks.environment import Environment
from benchmarks.ranking import spearman
from benchmarks.recordings import Recording, Replayed, committed, read
from benchmarks.rows import write
from tilegen.choose.ranker import propose
from tilegen.devices import device_named
from tilegen.errors import NoRecord, TilegenError
from tilegen.kernels.config import TileConfig
from tilegen.model.estimate import Candidate
from tilegen.store.trials import Trial, one_binary_line
from tilegen.task import KernelTask
from tilegen.tuning import tuner as tune_module
from tilegen.tuning.measure import Measurement
from tilegen.tuning.tuner import pick, tune

Strategy = Literal["model", "prior", "no prior", "random"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
BUDGETS = (1, 3, 5, 10, 20, 40)
"""Numbers of trials after which regret is looked at."""
DRAWS = 100
"""Number of orders that random search is averaged over; they cost nothing."""


@dataclass(frozen=True, kw_only=True)
class QualityRow(Environment):
    """Regret of one strategy on one recording after a number of trials, over all seeds."""

    source: str
    """`measured`, or how the times were made up."""
    recorded_on: str
    kernel: str
    problem: str
    space: int
    """Number of configs there are."""
    timed: int
    """Number of configs recorded with a time; the others failed or were not reached."""
    spearman: float
    """Rank correlation of predicted and recorded times."""
    strategy: Strategy
    seeds: int
    trials: int
    median: float
    p20: float
    p80: float


def ranking(recording: Recording) -> list[Candidate]:
    """Return the model's proposals among the recorded configs, best first. Raises TilegenError."""
    session = recording.session
    proposals = propose(
        KernelTask.of(session.kernel, session.problem, device_named(session.gpu)), top=2**16
    )
    return [candidate for candidate in proposals if candidate.config in recording.trials]


def order(
    recording: Recording, candidates: Sequence[Candidate], strategy: Strategy, seed: int
) -> list[TileConfig]:
    """Return the configs that a strategy measures, in order: as many as the largest budget."""
    space = sorted(recording.trials)
    random.Random(seed).shuffle(space)
    if strategy == "random":
        return space[: BUDGETS[-1]]
    if strategy == "model":
        ranked = [candidate.config for candidate in candidates]
        return list(dict.fromkeys([*ranked, *space]))[: BUDGETS[-1]]
    replay = Replayed(recording.as_tuned())
    session = recording.session
    with (
        tempfile.TemporaryDirectory() as empty,
        tilegen.settings(cache_dir=empty),
        mock.patch.object(tune_module, "SAMPLER_SEED", seed),
        contextlib.suppress(NoRecord),  # nothing it tried ran, which is a result too
    ):
        tune(
            KernelTask.of(session.kernel, session.problem, device_named(session.gpu)),
            trials=BUDGETS[-1],
            measure=replay,
            candidates=candidates if strategy == "prior" else [],
            space=space,
            progress=False,
        )
    return replay.measured


def regrets(timings: dict[TileConfig, Measurement], tried: Sequence[TileConfig]) -> list[float]:
    """Return the regret of the tuner's pick after each budget; infinite before anything has run."""
    times = {config: one.median_us for config, one in timings.items() if one.median_us is not None}
    best = min(times.values())
    trials = {config: Trial(config=config, measurement=timings[config]) for config in tried}
    values: list[float] = []
    for budget in BUDGETS:
        picked = pick({config: trials[config] for config in tried[:budget]})
        values.append(float("inf") if picked is None else times[picked] / best - 1)
    return values


def judge(recording: Recording, seeds: int) -> list[QualityRow]:
    """Return a row for each strategy and number of trials. Raises TilegenError if the model
    proposes nothing."""
    session = recording.session
    candidates, timings = ranking(recording), recording.as_tuned()
    times = recording.times()
    predicted = {candidate.config: candidate.estimate.seconds for candidate in candidates}
    both = [config for config in times if config in predicted]
    correlation = spearman([predicted[c] for c in both], [times[c] for c in both])
    rows: list[QualityRow] = []
    for strategy in STRATEGIES:
        draws = {"model": 1, "random": DRAWS}.get(strategy, seeds)
        tried = [order(recording, candidates, strategy, seed) for seed in range(draws)]
        by_budget = zip(*(regrets(timings, one) for one in tried), strict=True)
        rows += [
            QualityRow(
                source=session.source,
                recorded_on=session.gpu,
                kernel=session.kernel,
                problem=session.problem.key,
                space=session.space,
                timed=len(times),
                spearman=correlation,
                strategy=strategy,
                seeds=draws,
                trials=budget,
                median=quantile(values, 0.5),
                p20=quantile(values, 0.2),
                p80=quantile(values, 0.8),
            )
            for budget, values in zip(BUDGETS, by_budget, strict=True)
        ]
    return rows


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that `share` of them do not exceed; infinities are allowed."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(1000 * share) * len(ordered) // 1000) - 1)]


def table(rows: Sequence[QualityRow]) -> Iterator[str]:
    """Yield the lines for the terminal: medians over the recordings of each device."""
    heads = "".join(f"{f'{budget} trials':>18}" for budget in BUDGETS)
    for device in dict.fromkeys((row.source, row.recorded_on) for row in rows):
        mine = [row for row in rows if (row.source, row.recorded_on) == device]
        kernels = {(row.kernel, row.problem): row.spearman for row in mine}
        correlation = statistics.median(kernels.values())
        yield f"{' on '.join(device)}: {len(kernels)} recordings, median Spearman {correlation:.2f}"
        yield f"  {'regret in %':12}{heads}"
        for strategy in STRATEGIES:
            these = [row for row in mine if row.strategy == strategy]
            cells = (_cell([row for row in these if row.trials == budget]) for budget in BUDGETS)
            yield f"  {strategy:12}" + "".join(f"{cell:>18}" for cell in cells)


def _cell(rows: Sequence[QualityRow]) -> str:
    """Return `median` or `median (p20..p80)` of the regret, in per cent."""
    median, low, high = (
        f"{100 * statistics.median(getattr(row, name) for row in rows):.0f}"
        for name in ("median", "p20", "p80")
    )
    return median if low == high else f"{median} ({low}..{high})"


def load(paths: Sequence[Path]) -> Iterator[Recording]:
    """Yield the recordings that can be judged, each binary once; say which cannot, and which
    configs were one binary."""
    for path in paths:
        try:
            loaded = read(path)
            for configs in loaded.one_binary():
                print(f"{path}: {one_binary_line(configs)}", flush=True)
            recording = loaded.distinct()
            ranking(recording)
        except TilegenError as error:
            print(f"{path}: {error}", flush=True)
            continue
        if not recording.times():
            print(f"{path}: nothing was timed", flush=True)
            continue
        yield recording


def main(
    recordings: Annotated[
        list[Path] | None, typer.Argument(help="Recordings. Default: all that are committed.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each search on each recording.")] = 6,
    out: Annotated[Path | None, typer.Option(help="File for the rows; replaced.")] = None,
) -> None:
    """Report rank correlation and regret of the model and the search, from recorded timings.

    Example: python -m benchmarks.tuner_quality --seeds 3
    """
    todo = list(load(recordings if recordings else committed()))
    if not todo:
        print("no recording to judge by")
        raise typer.Exit(1)
    Environment()  # before the processes fork: git and the driver are asked once
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as processes:
        rows = [row for rows in processes.map(judge, todo, [seeds] * len(todo)) for row in rows]
    print(*table(rows), sep="\n")
    print("median (p20..p80) over seeds, then the median over recordings")
    if out:
        write(out, rows)


if __name__ == "__main__":
    typer.run(main)
