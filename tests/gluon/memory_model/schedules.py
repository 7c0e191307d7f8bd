"""Schedules, which say who goes on: drawn at random, and all there are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol


class Schedule(Protocol):
    """Order in which partitions and transfers go on."""

    anywhere: bool
    """True: a partition may be left at each synchronisation and each asynchronous issue. False:
    where it waits only. What it does in between concerns others through barriers alone, so that
    all that can come of a program comes of such schedules too."""

    def start(self, name: str) -> None:
        """Know a partition or a transfer that may go on from now on."""
        ...

    def choose(self, names: Sequence[str]) -> int:
        """Return which of these goes on; they are in a fixed order."""
        ...


class RandomSchedule:
    """Partitions and transfers each at a speed of its own, drawn log-uniformly over three powers of
    ten, so that somebody stalls. The same seed draws the same."""

    anywhere = True

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._times: dict[str, float] = {}
        self._speeds: dict[str, float] = {}
        self._now = 0.0

    def start(self, name: str) -> None:
        """Draw the speed of who may go on from now on."""
        self._speeds[name] = math.exp(self._random.uniform(0, math.log(1000)))
        self._times[name] = self._now + self._speeds[name] * self._random.random()

    def choose(self, names: Sequence[str]) -> int:
        """Return who is first, and have it take its time."""
        place = min(range(len(names)), key=lambda i: (max(self._times[names[i]], self._now), i))
        name = names[place]
        self._now = max(self._now, self._times[name])
        self._times[name] = self._now + self._speeds[name] * self._random.uniform(0.5, 1.5)
        return place


State = tuple[tuple[str, int], ...]
"""Number of times that each partition and transfer went on."""


class EverySchedule:
    """All schedules of one program, as far as they differ in what they lead to.

    A partition goes on the same way whatever the order of the others was, or a race is reported; so
    how often each has gone on tells the state, and from each state each choice is taken once.
    """

    def __init__(self) -> None:
        self._options: dict[State, tuple[str, ...]] = {}
        self._closed: set[State] = set()
        """States from which all there is has been taken."""

    def each(self, run: Callable[[Schedule], object]) -> int:
        """Call `run` with one schedule after the other until all choices were taken, and return
        the number of states. What `run` raises is passed on."""
        while () not in self._closed:
            path = _Path(self._options, self._closed)
            run(path)
            for state in reversed(path.states):
                options = self._options.get(state, ())
                if all(_after(state, one) in self._closed for one in options):
                    self._closed.add(state)
        return len(self._closed)


class _Path:
    """One of the schedules, which takes unexplored choices."""

    anywhere = False

    def __init__(self, options: dict[State, tuple[str, ...]], closed: set[State]) -> None:
        self._options, self._closed = options, closed
        self.states: list[State] = [()]

    def start(self, name: str) -> None:
        """Nothing: there are no speeds."""

    def choose(self, names: Sequence[str]) -> int:
        """Return the first choice that leads to an unexplored state."""
        state = self.states[-1]
        self._options[state] = tuple(names)
        after = [_after(state, name) for name in names]
        place = next((i for i, one in enumerate(after) if one not in self._closed), 0)
        self.states.append(after[place])
        return place


def _after(state: State, name: str) -> State:
    counts = dict(state)
    counts[name] = counts.get(name, 0) + 1
    return tuple(sorted(counts.items()))
