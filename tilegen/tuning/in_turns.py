"""Timing of a kernel on a processor: each config in turns with the config in hand.

One thread computes all programs of a launch, and its own clock is read: other programs on the
machine take no part in a time, though they share caches and memory. The ratio of two neighbouring
launches hardly depends on them, nor on the clock rate. A time is the median ratio times the first
median of the config in hand, so that the times of a run can be compared.

Nothing compiles beside a measurement. A compiling thread at least doubled the spread of medians on
two cores, and the wait for Python's lock made measuring longer. A config compiles in 0.1 to 0.3 s;
processes that compile would need a second to start, which their work would hardly win back.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import optuna
from optuna.trial import Trial, TrialState

from tilegen.errors import TilegenError, Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.private_files import NotPrivate, check_private
from tilegen.store.files import locked
from tilegen.tuning.measure import MAX_REPEATS, Measurement, failed, one_line, summarise
from tilegen.tuning.search import quiet_study
from tilegen.tuning.surroundings import OnCpu

TimedFunction = Callable[[], object]
Pairs = list[tuple[float, float]]
"""Times of two launches in turns [s]."""
PAIRS, MOST_PAIRS, SECONDS = 5, 200, 0.4
"""Pairs of launches that are timed at least, and at most; and seconds for them."""
LOSING, CLEAR = 3, 1.05
"""Pairs from which a config is pruned, if in each its time was more than CLEAR times that of the
best config so far."""
STEADY = 0.01
"""A trial ends after LOSING pairs whose ratios differ by at most this part."""
CONFIRMED, CONFIRMED_SECONDS = 9, 2.0
"""Pairs of the second run, in which the winner must beat the config in hand, at least; and seconds
for them."""
LEAST_GAIN = 0.01
"""Least part by which a winner must be faster in the second run, beyond the noise of a median."""
WAIT = 600.0
"""Longest wait for another process that measures [s]."""


def pairs_of(
    launch: TimedFunction,
    other: TimedFunction,
    *,
    least: int = PAIRS,
    seconds: float,
    stop: Callable[[Pairs], bool] | None = None,
) -> Pairs:
    """Time two launches in turns [s], starting with either in turn, after a launch of each that
    warms up. End early if `stop`, called after each pair, returns True."""
    launch()
    other()
    pairs: Pairs = []
    end = time.perf_counter() + seconds
    while len(pairs) < MOST_PAIRS and (len(pairs) < least or time.perf_counter() < end):
        if len(pairs) % 2:
            second = _seconds(other)
            pairs.append((_seconds(launch), second))
        else:
            first = _seconds(launch)
            pairs.append((first, _seconds(other)))
        if stop and stop(pairs):
            break
    return pairs


class InTurns:
    """Times the configs of a kernel in turns with the config in hand, the model's choice."""

    def __init__(
        self, in_hand: TileConfig, prepare: Callable[[], Callable[[TileConfig], TimedFunction]]
    ) -> None:
        """`prepare` makes inputs, and returns a function that returns the launches of a config."""
        self.in_hand, self._prepare = in_hand, prepare
        self._runs: dict[TileConfig, TimedFunction] = {}
        self._around = OnCpu()
        self._around.begin()
        self._base = 0.0
        self._run_of: Callable[[TileConfig], TimedFunction] | None = None
        # A trial of this study is one measurement, an intermediate value the least time of its
        # pairs over the time of the best config so far.
        pruner = optuna.pruners.ThresholdPruner(upper=CLEAR, n_warmup_steps=LOSING - 1)
        self._study = quiet_study(pruner=pruner)
        self._best = 1.0
        """Least time of a config so far, over that of the config in hand."""

    def measure(self, config: TileConfig) -> Measurement:
        """Measure a config; a config that clearly loses is pruned. The config in hand is measured
        in turns with itself, so that its spread is that of noise."""
        trial = self._study.ask()
        stop = None if config == self.in_hand else partial(self._is_decided, trial)
        try:
            base, run = self._run(self.in_hand), self._run(config)
            with alone_on_this_machine():
                self._around.begin()
                pairs = pairs_of(base, run, seconds=SECONDS, stop=stop)
                surroundings = self._around.seen()
        except TilegenError as error:
            self._study.tell(trial, state=TrialState.FAIL)
            return failed(error)
        ratio = statistics.median(b / a for a, b in pairs)
        self._study.tell(trial, ratio)
        self._best = min(self._best, ratio)
        if not self._base:
            self._base = statistics.median(first for first, _ in pairs)
        result = summarise([1e6 * self._base * b / a for a, b in pairs][:MAX_REPEATS])
        said = f"{len(pairs)} pairs, {ratio:.3f} times the time of {self.in_hand.key}"
        return replace(result, message=said, surroundings=surroundings)

    def resume(self, measurement: Measurement) -> None:
        """Scale times to the time of the config in hand in an earlier run."""
        if measurement.median_us:
            self._base = 1e-6 * measurement.median_us

    def confirm(self, config: TileConfig) -> bool:
        """Check in a second run whether a config beats the config in hand beyond noise."""
        if config == self.in_hand:
            return True
        base, run = self._run(self.in_hand), self._run(config)
        with alone_on_this_machine():
            pairs = pairs_of(base, run, least=CONFIRMED, seconds=CONFIRMED_SECONDS)
        ratios = sorted(b / a for a, b in pairs)
        return is_faster(ratios)

    def _is_decided(self, trial: Trial, pairs: Pairs) -> bool:
        """Report the pairs so far to Optuna, and return whether it prunes the trial, or more pairs
        would hardly change the result."""
        ratios = [b / a for a, b in pairs]
        trial.report(min(ratios) / self._best, len(pairs) - 1)
        is_steady = len(pairs) >= LOSING and max(ratios) <= (1 + STEADY) * min(ratios)
        return is_steady or trial.should_prune()

    def _run(self, config: TileConfig) -> TimedFunction:
        """Return the launches of a config on inputs that all configs share, compiled."""
        if config not in self._runs:
            if self._run_of is None:
                try:
                    self._run_of = self._prepare()
                except TilegenError:
                    raise
                except (RuntimeError, MemoryError) as error:
                    raise Unsupported(f"no inputs to measure on: {one_line(error)}") from error
            self._runs[config] = self._run_of(config)
        return self._runs[config]


def is_faster(ratios: Sequence[float]) -> bool:
    """Check whether times over those of another config are below 1, by LEAST_GAIN and by what the
    median of as many noisy ratios may be off."""
    ordered = sorted(ratios)
    count = len(ordered)
    # The order statistic above which the median lies in 1 of 40 samples: 1 + n/2 + sqrt(n).
    upper = ordered[min(count - 1, int(count / 2 + count**0.5) + 1)]
    return upper < 1.0 and statistics.median(ordered) < 1.0 - LEAST_GAIN


@contextlib.contextmanager
def alone_on_this_machine() -> Generator[None]:
    """Run on one thread, while no other process of this user measures. Raises Unsupported if that
    takes longer than WAIT."""
    import torch

    threads = torch.get_num_threads()
    with _lock():
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@contextlib.contextmanager
def _lock() -> Generator[None]:
    folder = Path(tempfile.gettempdir()) / f"tilegen-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        check_private(folder)
    except (OSError, NotPrivate):  # measure beside others rather than not at all
        yield
        return
    with locked(folder / "measuring.lock", WAIT, "to measure alone"):
        yield


def _seconds(launch: TimedFunction) -> float:
    """Return the time of a launch by this thread's clock [s]."""
    started = time.thread_time()
    launch()
    return time.thread_time() - started
