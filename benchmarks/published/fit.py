"""Fit of a few constants of the model to measured times: sweeps of one length are left out, and
judged with the constants that the other lengths gave."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.judge import SweepVerdict, judge_sweep, predictions
from benchmarks.published.records import Sweep
from tilegen.choose.ranker import best_of
from tilegen.kernels.config import TileConfig
from tilegen.model import rates

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
    """Have the model use some constants times their factors: those of `rates` and `instructions`
    wherever they are read, others by the module of the model and their name."""
    with ExitStack() as stack:
        stack.callback(best_of.cache_clear)
        for full, factor in factors.items():
            group, name = full.split(".")
            if group not in ("rates", "instructions"):
                module = importlib.import_module(f"tilegen.model.{group}")
                value = getattr(module, name) * factor
                stack.enter_context(mock.patch.object(module, name, value))
                continue
            read = "rates_of" if group == "rates" else group
            other = _scaled_record(getattr(rates, read), name, factor)
            for key, module in list(sys.modules.items()):
                if key.startswith("tilegen.") and hasattr(module, read):
                    stack.enter_context(mock.patch.object(module, read, other))
        best_of.cache_clear()
        yield


def _scaled_record(real: Callable[[Any], Any], name: str, factor: float) -> Callable[[Any], Any]:
    def other(of: Any) -> Any:
        record = real(of)
        value = getattr(record, name)
        if isinstance(value, dict):  # by kernel
            return replace(record, **{name: {k: v * factor for k, v in value.items()}})
        return replace(record, **{name: value * factor})

    return other


def predict_with(factors: Factors, sweep: Sweep) -> Mapping[TileConfig, float]:
    """Return the model's times with some constants scaled."""
    with scaled(factors):
        return predictions(sweep)


def errors(predicted: Mapping[TileConfig, float], sweep: Sweep, *, absolute: bool) -> list[float]:
    """Return the weighted relative errors of a sweep's tiles, less what noise excuses.

    Without `absolute` a common factor of all times is no error.
    """
    measured = np.array(list(sweep.seconds.values()))
    weights = (measured.min() / measured) ** HEAD
    weights /= weights.sum()
    logs = np.log([predicted[config] for config in sweep.seconds]) - np.log(measured)
    logs -= 0.0 if absolute else weights @ logs
    excused = np.copysign(np.maximum(0.0, np.abs(logs) - sweep.noise / 2), logs)
    return (np.sqrt(weights) * excused).tolist()


def fit(
    sweeps: Sequence[Sweep], names: Sequence[str], *, absolute: Callable[[Sweep], bool]
) -> Factors:
    """Return factors of constants that make the squared errors of the sweeps small: the method of
    Levenberg and Marquardt on their logarithms."""

    def residuals(logs: Array) -> Array:
        with scaled(dict(zip(names, np.exp(logs).tolist(), strict=True))):
            of_sweeps = [errors(predictions(one), one, absolute=absolute(one)) for one in sweeps]
        return np.concatenate([*of_sweeps, math.sqrt(PRIOR) * logs])

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
        others = [sweep for sweep in sweeps if sweep.length != length]
        factors = fit(others, names, absolute=absolute)
        for sweep in sweeps:
            if sweep.length == length:
                yield judge_sweep(sweep, predict_with(factors, sweep)), factors
