"""The model's times beside those of the tuner's trials on a GPU; needs no GPU.

    python -m benchmarks.trials benchmarks/results

For each kernel and problem: the config that the model predicts to be the fastest of the timed ones,
its regret (its time over the best time, less one), the rank correlation of predicted and measured
times, and predicted over measured time at the best config. With --compiled the model reads the
machine code that the installed Triton makes of each config, as a call does before it chooses.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.ranking import Ranking
from benchmarks.rows import table
from tilegen.choose.ranker import estimate, time_as_compiled
from tilegen.compiling.verdicts import verdict
from tilegen.devices import device_named
from tilegen.emit.identity import rows_are_aligned
from tilegen.errors import BuildFailed
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store.trials import of_trials, parse_trial
from tilegen.task import KernelTask, Tiled


@dataclass(frozen=True, kw_only=True)
class Judged(Ranking):
    """The timed configs of a kernel and problem, with measured and predicted times [us]."""

    task: KernelTask

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return self.task.kernel

    @property
    def problem(self) -> str:
        """Key of the problem."""
        return self.task.problem.key

    @property
    def timed(self) -> int:
        """Number of timed configs."""
        return len(self.measured)

    @property
    def correlation(self) -> float:
        """Spearman's rank correlation; NaN for fewer than three configs."""
        return super().correlation if len(self.measured) > 2 else float("nan")


def read(folder: Path) -> Iterator[tuple[KernelTask, dict[TileConfig, float]]]:
    """Yield each kernel and problem of `<folder>/trials/<gpu>/<kernel>/*.jsonl` with the times of
    its configs [us]. Raises InvalidRecord."""
    for path in sorted(folder.glob("trials/*/*/*.jsonl")):
        name, kernel = of_trials(str(path.relative_to(folder)))
        times: dict[AttentionProblem, dict[TileConfig, float]] = {}
        for line in path.read_bytes().splitlines():
            parsed = parse_trial(line, kernel)
            assert parsed  # no conditions were asked for
            trial, conditions = parsed
            if (median := trial.measurement.median_us) is not None:
                problem = AttentionProblem.parse(conditions.problem)
                times.setdefault(problem, {})[trial.config] = median
        for problem, measured in times.items():
            if len(measured) > 1:
                yield KernelTask.of(kernel, problem, device_named(name)), measured


def predicted_us(tiled: Tiled, *, compiled: bool) -> float:
    """Predict the time of a config [us]; infinite if it does not compile."""
    if not compiled:
        return 1e6 * estimate(tiled).seconds
    built = verdict(tiled, aligned=rows_are_aligned(tiled.problem))
    if isinstance(built, BuildFailed):
        return float("inf")
    return 1e6 * time_as_compiled(tiled, built).seconds


def judge(folder: Path, *, compiled: bool) -> list[Judged]:
    """Predict the time of every timed config below `folder`."""
    return [
        Judged(
            task=task,
            measured=times,
            predicted={
                config: predicted_us(task.tiled(config), compiled=compiled) for config in times
            },
        )
        for task, times in read(folder)
    ]


def main(
    folder: Annotated[Path, typer.Argument(help="Folder with trials/, as gpu_check writes it.")],
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Predict from machine code; compiles each config.")
    ] = False,
) -> None:
    """Judge the model by the times of the tuner's trials.

    Example: python -m benchmarks.trials benchmarks/results
    """
    judged = judge(folder, compiled=compiled)
    names = "kernel problem timed first regret best correlation ratio"
    print(table(judged, names.split()))
    regrets = [one.regret for one in judged]
    print(f"\nregret: median {statistics.median(regrets):.1%}, worst {max(regrets):.1%}")


if __name__ == "__main__":
    typer.run(main)
