"""The tuner's report: a line for each trial, and a progress bar on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tilegen.disk import log
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.store.trials import Trial
from tilegen.tuning.surroundings import UNKNOWN
from tilegen.units import seconds_text, us_text

if TYPE_CHECKING:
    from tilegen.model.estimate import CostEstimate
    from tilegen.store import TuningRecord


class Report:
    """Lines above a progress bar, or without a bar in the log (level info)."""

    def __init__(self, kernel: Kernel, total: int, *, enabled: bool | None = None) -> None:
        """Draw the bar if `enabled`; if None, draw it if stderr is a terminal."""
        self._kernel, self._total = kernel, total
        self._started = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty() if enabled is None else enabled:
            self._bar = Progress(
                TextColumn("tuning {task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[best]}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(kernel, total=total, best="")

    def __enter__(self) -> Report:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line without markup."""
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            log.info("%s", line)

    def resumed(self, trials: Sequence[Trial]) -> None:
        """Report the trials of earlier runs."""
        medians = (trial.measurement.median_us for trial in trials)
        times = [median for median in medians if median is not None]
        if trials:
            best = f", best {us_text(min(times))}" if times else ""
            self.say(f"{len(trials)} trials of earlier runs, {len(times)} timed{best}")
        if self._bar:
            self._bar.update(self._task, completed=len(trials))

    def trial(
        self,
        trials: Mapping[TileConfig, Trial],
        config: TileConfig,
        estimate: CostEstimate | None,
        winner: TileConfig | None,
    ) -> None:
        """Report the result of a trial and the best time so far."""
        measurement = trials[config].measurement
        head = (
            f"[{time.monotonic() - self._started:5.1f}s] {len(trials)}/{self._total} "
            f"{self._kernel} {config!r}"
        )
        best = "" if winner is None else f"best {us_text(trials[winner].measurement.median_us)}"
        if measurement.median_us is None:
            self.say(f"{head} {measurement.failure}")
        else:
            predicted = "" if estimate is None else f"  predicted {seconds_text(estimate.seconds)}"
            self.say(f"{head}  {us_text(measurement.median_us)}{predicted}  {best}")
        if self._bar:
            self._bar.update(self._task, completed=len(trials), best=best)


def describe(record: TuningRecord) -> str:
    """Describe what a record's config is for: `412 us, fwd, h200, b4 hq32 ...`."""
    time, surroundings = us_text(record.measurement.median_us), record.measurement.surroundings
    measured = "" if surroundings == UNKNOWN else f", measured {surroundings}"
    return f"{time}, {record.kernel}, {record.gpu}, {record.problem}{measured}"
