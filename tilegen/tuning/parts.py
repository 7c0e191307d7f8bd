"""Parts of jobs for many devices: which configs a free device measures next. Nothing runs here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilegen.device import Device
from tilegen.kernels.config import TileConfig
from tilegen.store.trials import Trial
from tilegen.store.versions import Versions
from tilegen.tuning.campaign import Standing
from tilegen.tuning.jobs import Job
from tilegen.units import seconds_text

LEAST_PART = 8
"""Least number of configs of a part: a process on a GPU takes seconds to start."""
PART_SECONDS = 300.0
"""Time after which a part ends [s]."""
MOST_LOSSES = 2
"""Number of workers that a config may end before it counts as failed."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Configs of a job for one device."""

    job: Job
    configs: tuple[TileConfig, ...]
    trials: tuple[Trial, ...]
    """Results so far of these configs."""
    seconds: float
    is_whole: bool
    """True for all configs of the job: the part also checks the winner, and makes the record."""


class Work:
    """A job, and its parts that devices measure now."""

    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        self.parts: list[Part] = []
        self.refusal = ""
        """Reason why the job cannot be done."""
        self._losses: Counter[TileConfig | None] = Counter()

    @property
    def is_over(self) -> bool:
        """True if nothing is left to do."""
        return bool(self.refusal) or self.standing.is_done

    @property
    def left(self) -> list[TileConfig]:
        """Configs that are neither measured nor in a part."""
        standing = self.standing
        taken = {config for part in self.parts for config in part.configs}
        configs = standing.configs[: standing.total]
        return [one for one in configs if one not in standing.trials and one not in taken]

    @property
    def unmeasured(self) -> int:
        """Number of configs that are not measured, in parts or not."""
        return self.standing.total - len(self.standing.trials)

    def next_part(self, most: int) -> Part | None:
        """Begin a part of at most so many configs; None if there is nothing to begin now."""
        standing = self.standing
        is_free = not self.parts
        if self.is_over or not (is_free or (self.left and standing.seconds is None)):
            return None
        chosen = self.left
        is_whole = is_free and (standing.seconds is not None or len(chosen) <= most)
        seconds = PART_SECONDS
        if is_whole:
            chosen = standing.configs[: standing.total]
            if standing.seconds is not None:
                seconds = min(seconds, max(standing.seconds - standing.spent, 1.0))
        else:
            chosen = chosen[:most]
        part = Part(
            job=standing.job,
            configs=tuple(chosen),
            trials=tuple(standing.trials[one] for one in chosen if one in standing.trials),
            seconds=seconds,
            is_whole=is_whole,
        )
        self.parts.append(part)
        return part

    def add(self, trial: Trial) -> None:
        """Add a result."""
        trials = {**self.standing.trials, trial.config: trial}
        self.standing = replace(self.standing, trials=trials)

    def end(self, part: Part) -> None:
        """End a part, however it ended; what it has not measured is left."""
        self.parts = [one for one in self.parts if one is not part]

    def is_to_blame(self, config: TileConfig | None) -> bool:
        """Count a worker that ended, at a config if it is known; True if it was the last one that
        the config may end."""
        self._losses[config] += 1
        return self._losses[config] >= MOST_LOSSES


@dataclass
class Node:
    """A node that measures."""

    id: str
    device: Device
    versions: Versions
    slots: int
    """Number of parts that it measures at once."""
    options: dict[str, Any]
    """Resources of one part."""
    busy: int = 0


@dataclass
class Task:
    """A part that a node measures."""

    node: Node
    work: Work
    part: Part
    begun: TileConfig | None = None
    """The config that runs, if one does."""


def next_part(works: Sequence[Work], devices: int) -> tuple[Work, Part] | None:
    """Begin the next part for one of so many devices; None if there is nothing to begin now.

    While there are more jobs than devices, a part is a whole job. The last jobs are divided.
    """
    waiting = sum(work.unmeasured for work in works if not work.is_over)
    share = math.ceil(waiting / max(1, devices))
    for work in works:
        if part := work.next_part(max(share, LEAST_PART)):
            return work, part
    return None


def progress(works: Sequence[Work], devices: int, running: int) -> str:
    """Format how far the jobs of a device are: the time left, and how much faster the best configs
    are than the model's first ones, in the mean."""
    standings = [work.standing for work in works if not work.refusal]
    left = sum(standing.seconds_left for standing in standings) / max(1, devices)
    gains = [gain for standing in standings if (gain := standing.gain)]
    mean = f", {sum(gains) / len(gains):.2f} times the speed of first choices" if gains else ""
    trials = sum(len(standing.trials) for standing in standings)
    done = sum(standing.is_done for standing in standings)
    return (
        f"{trials} of {sum(standing.total for standing in standings)} configs, {done} of "
        f"{len(works)} kernels done, {running} parts running, about {seconds_text(left)} left{mean}"
    )
