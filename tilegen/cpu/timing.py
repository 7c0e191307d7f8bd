"""Time functions on the CPU in turns, so that changes of the machine's load affect all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MIN_ROUNDS = 5
MAX_ROUNDS = 1000
MOST_RATIO = 5.0
"""A function that takes more than this many times as long as the first is called once. PyTorch's
products in bf16 take 50 to 80 times as long as ours on processors without bf16 instructions."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of one function [s]."""

    median: float
    least: float
    rounds: int
    ratio: float
    """Time of this function over the time of the first function, the median over rounds. Above 1
    the first function is faster."""


def timed_in_turns(
    functions: Mapping[str, Callable[[], object]], *, seconds: float = 1.0
) -> dict[str, Timing]:
    """Time functions by the wall clock, calling each once a round.

    The first round warms up and does not count. Each function gets about `seconds`, and at least
    MIN_ROUNDS rounds. A function that takes more than MOST_RATIO times as long as the first is
    called once, and its first call counts.
    """
    warming = {name: _seconds(function) for name, function in functions.items()}
    longest = MOST_RATIO * next(iter(warming.values()))
    times = {name: [took] if took > longest else [] for name, took in warming.items()}
    end = time.perf_counter() + seconds * len(functions)
    rounds = 0
    while rounds < MIN_ROUNDS or (time.perf_counter() < end and rounds < MAX_ROUNDS):
        for name, function in functions.items():
            if warming[name] <= longest:
                times[name].append(_seconds(function))
        rounds += 1
    first = next(iter(times.values()))
    return {
        name: Timing(
            median=statistics.median(taken),
            least=min(taken),
            rounds=len(taken),
            ratio=statistics.median(b / a for a, b in zip(first, taken, strict=False)),
        )
        for name, taken in times.items()
    }


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
