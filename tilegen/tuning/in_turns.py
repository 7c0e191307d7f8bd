"""Timing of a kernel on a processor: each config in turns with the config in hand.

One thread computes all programs of a launch, and its own clock is read: other programs on the
machine take no part in a time, though they share caches and memory. The ratio of two neighbouring
launches hardly depends on them, nor on the clock rate. A time is the median ratio times the first
median of the config in hand, so that the times of a run can be compared.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

from tilegen.errors import TilegenError, Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.private_files import NotPrivate, check_private
from tilegen.store.files import locked
from tilegen.tuning.measure import MAX_REPEATS, Measurement, failed, one_line, summarise

Launch = Callable[[], object]
PAIRS, MOST_PAIRS, SECONDS = 5, 200, 0.4
"""Pairs of launches that are timed at least, and at most; and seconds for them."""
LOSING, CLEAR = 3, 1.1
"""Pairs from which a config is given up, if each took more than CLEAR times as long as the config
in hand."""
CONFIRMED, CONFIRMED_SECONDS = 21, 2.0
"""Pairs of the second run, in which the winner must beat the config in hand, at least; and seconds
for them."""
LEAST_GAIN = 0.01
"""Least part by which a winner must be faster in the second run, beyond the noise of a median."""
WAIT = 600.0
"""Longest wait for another process that measures [s]."""


def pairs_of(
    one: Launch, other: Launch, *, least: int = PAIRS, seconds: float = SECONDS, give_up: bool
) -> list[tuple[float, float]]:
    """Time two launches in turns [s], starting with either in turn, after a launch of each that
    warms up. With `give_up` stop as soon as the other clearly loses."""
    one()
    other()
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < MOST_PAIRS and (len(pairs) < least or time.perf_counter() < end):
        if len(pairs) % 2:
            second = _seconds(other)
            pairs.append((_seconds(one), second))
        else:
            first = _seconds(one)
            pairs.append((first, _seconds(other)))
        if give_up and len(pairs) >= LOSING and all(b > CLEAR * a for a, b in pairs):
            break
    return pairs


class InTurns:
    """Times the configs of a kernel in turns with the config in hand, the model's choice."""

    def __init__(
        self, in_hand: TileConfig, prepare: Callable[[], Callable[[TileConfig], Launch]]
    ) -> None:
        """`prepare` makes inputs, and returns a function that returns the launches of a config."""
        self.in_hand, self._prepare = in_hand, prepare
        self._runs: dict[TileConfig, Launch] = {}
        self._base = 0.0
        self._run_of: Callable[[TileConfig], Launch] | None = None

    def measure(self, config: TileConfig) -> Measurement:
        """Measure a config. The config in hand is measured in turns with itself, so that its spread
        is that of noise."""
        try:
            base, run = self._run(self.in_hand), self._run(config)
            with alone_on_this_machine():
                pairs = pairs_of(base, run, give_up=config != self.in_hand)
        except TilegenError as error:
            return failed(error)
        if not self._base:
            self._base = statistics.median(first for first, _ in pairs)
        result = summarise([1e6 * self._base * b / a for a, b in pairs][:MAX_REPEATS])
        worst = f"{len(pairs)} pairs, {statistics.median(b / a for a, b in pairs):.3f} times"
        return replace(result, message=f"{worst} the time of {self.in_hand.key}")

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
            pairs = pairs_of(base, run, least=CONFIRMED, seconds=CONFIRMED_SECONDS, give_up=False)
        ratios = sorted(b / a for a, b in pairs)
        return is_faster(ratios)

    def _run(self, config: TileConfig) -> Launch:
        """Return the launches of a config on inputs that all configs share, compiled."""
        if config not in self._runs:
            if self._run_of is None:
                try:
                    self._run_of = self._prepare()
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


def _seconds(launch: Launch) -> float:
    """Return the time of a launch by this thread's clock [s]."""
    started = time.thread_time()
    launch()
    return time.thread_time() - started
