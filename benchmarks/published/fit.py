"""Fit of a few constants of the model to measured times: sweeps of one length are left out, and
judged with the constants that the other lengths gave."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import constants
from benchmarks.published.judge import SweepVerdict, judge_sweep, predictions
from benchmarks.published.records import Sweep
from tilegen.kernels.config import TileConfig

Factors = dict[str, float]
"""Factors of constants, by names such as `rates.exposed`."""
Array = NDArray[Any]

LIMIT = math.log(30)
"""Largest logarithm of a factor."""
STEP = 0.05
"""Step in the logarithm of a factor by which derivatives are taken."""
PRIOR = 1e-4
"""Weight of the old value of a constant, which decides where the times say nothing."""
ROUNDS = 12
HEAD = 2.0
"""Power of the best time over a tile's time that the tile counts by: slow tiles count little."""


@contextmanager
def scaled(factors: Factors) -> Generator[None]:
    """Have the model use some constants times their factors."""
    with ExitStack() as stack:
        for name, factor in factors.items():
            group, constant = name.split(".")
            stack.enter_context(constants.scaled(group, constant, factor))
        yield


def predict_with(factors: Factors, sweep: Sweep) -> Mapping[TileConfig, float]:
    """Return the model's times with some constants scaled."""
    with scaled(factors):
        return predictions(sweep)


def errors(predicted: Mapping[TileConfig, float], sweep: Sweep, *, absolute: bool) -> list[float]:
    """Return the weighted relative errors of a sweep's tiles, less what noise excuses.

    Without `absolute` a common factor of all times is no error.
    """
    best = min(sweep.seconds.values())
    weights = {config: (best / seconds) ** HEAD for config, seconds in sweep.seconds.items()}
    of = {config: math.log(predicted[config] / s) for config, s in sweep.seconds.items()}
    total = sum(weights.values())
    mean = 0.0 if absolute else sum(weights[c] * of[c] for c in of) / total
    beside = {c: e - mean for c, e in of.items()}
    excused = {c: math.copysign(max(0.0, abs(e) - sweep.noise / 2), e) for c, e in beside.items()}
    return [math.sqrt(weights[c] / total) * error for c, error in excused.items()]


def fit(
    sweeps: Sequence[Sweep], names: Sequence[str], *, absolute: Callable[[Sweep], bool]
) -> Factors:
    """Return factors of constants that make the squared errors of the sweeps small: the method of
    Levenberg and Marquardt on their logarithms."""

    def residuals(logs: Array) -> Array:
        with scaled(dict(zip(names, np.exp(logs).tolist(), strict=True))):
            weighted = [
                error
                for one in sweeps
                for error in errors(predictions(one), one, absolute=absolute(one))
            ]
        return np.array([*weighted, *(math.sqrt(PRIOR) * logs)])

    at, damping = np.zeros(len(names)), 1e-2
    now = residuals(at)
    for _ in range(ROUNDS):
        slopes = np.array([residuals(at + STEP * e) - now for e in np.eye(len(names))]).T / STEP
        square = slopes.T @ slopes
        for _ in range(6):
            move = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slopes.T @ now)
            there = np.clip(at + np.clip(move, -1, 1), -LIMIT, LIMIT)
            then = residuals(there)
            if then @ then < now @ now:
                break
            damping *= 4
        else:
            break
        done = now @ now - then @ then < 1e-4 * (now @ now)
        at, now, damping = there, then, damping / 4
        if done:
            break
    return dict(zip(names, np.exp(at).tolist(), strict=True))


def leave_one_length_out(
    sweeps: Sequence[Sweep], names: Sequence[str], *, absolute: Callable[[Sweep], bool]
) -> Iterator[tuple[SweepVerdict, Factors]]:
    """Yield the verdict on each sweep with constants that sweeps of other lengths gave."""
    for length in sorted({sweep.length for sweep in sweeps}):
        factors = fit(
            [sweep for sweep in sweeps if sweep.length != length], names, absolute=absolute
        )
        for sweep in sweeps:
            if sweep.length == length:
                yield judge_sweep(sweep, predict_with(factors, sweep)), factors
