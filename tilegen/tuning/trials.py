"""The log of trials: a line of JSON for each, on disk as soon as its result is known."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Protocol

from tilegen.disk import cannot_write, log
from tilegen.environment import current
from tilegen.errors import InvalidRecord
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store.election import why_not_credible
from tilegen.store.fields import Fields
from tilegen.store.files import Locked, inside, locked, only_writer
from tilegen.store.places import Location, locations, read_trials
from tilegen.store.record import OtherSchema
from tilegen.store.trials import Conditions, Trial, parse_trial, trial_line, trials_path
from tilegen.tuning.measure import one_line


class Log(Protocol):
    """Where the trials of a kernel are kept."""

    def read(self) -> dict[TileConfig, Trial]:
        """Return the trials so far under the present conditions."""
        ...

    def append(self, trial: Trial) -> None:
        """Keep a trial."""
        ...


class TrialLog:
    """The trials of one problem bucket, kernel and GPU, at
    `<cache dir>/trials/<gpu>/<kernel>/<problem>.jsonl`, together with those of other locations.

    A line is appended in one write and fsynced. So a process that is killed at any moment leaves at
    most one cut line, which is skipped. The last line about a config counts, and lines of the local
    cache come after those of other locations.
    """

    def __init__(
        self,
        cache_dir: Path,
        gpu: str,
        kernel: Kernel,
        problem: AttentionProblem,
        conditions: Conditions,
        *,
        others: Sequence[Location] = (),
    ) -> None:
        self._path = trials_path(gpu, kernel, problem.bucket)
        self.file = cache_dir / self._path
        self._others = others
        self._own = Location(str(cache_dir), "own")
        self._of = gpu, kernel, problem.bucket, conditions
        self._conditions = conditions

    def read(self) -> dict[TileConfig, Trial]:
        """Read the trials under the present conditions; warn about invalid lines, once a file."""
        trials: dict[TileConfig, Trial] = {}
        for location in (*reversed(self._others), self._own):
            bad: list[str] = []
            for number, line in enumerate(read_trials(location, self._path).split(b"\n"), start=1):
                try:
                    if line and (trial := credible_trial(line, *self._of)) is not None:
                        trials[trial.config] = trial
                except OtherSchema:  # only the tilegen that wrote the line can read it
                    continue
                except InvalidRecord as error:
                    bad.append(f"line {number}: {one_line(error)}")
            if bad:
                file = location.address(self._path)
                log.warning("trials %r: skipped %d bad lines, first %s", file, len(bad), bad[0])
        return trials

    def append(self, trial: Trial) -> None:
        """Append a trial to the file of the local cache, and fsync. Raises Unsupported."""
        file = inside(Path(self._own.url), self._path)
        try:
            with only_writer(file.parent):  # another process may be joining trials into the file
                append_line(file, trial_line(trial, self._conditions))
        except OSError as error:
            raise cannot_write(file, error) from error


def credible_trial(
    line: bytes | Fields,
    gpu: str,
    kernel: Kernel,
    problem: AttentionProblem,
    conditions: Conditions,
) -> Trial | None:
    """Parse a trial that may come from elsewhere; None for a trial under other conditions. Raises
    InvalidRecord, also for a time that the GPU cannot reach."""
    if (parsed := parse_trial(line, kernel, conditions)) is None:
        return None
    if reason := why_not_credible(parsed[0].measurement, problem, gpu, kernel):
        raise InvalidRecord(reason)
    return parsed[0]


def trials_of(
    gpu: str, kernel: Kernel, problem: AttentionProblem, conditions: Conditions
) -> TrialLog:
    """Return the log of trials in the local cache, together with those of all other locations."""
    others = [location for location in locations() if location.origin != "own"]
    return TrialLog(current().cache_dir, gpu, kernel, problem, conditions, others=others)


@contextlib.contextmanager
def alone(
    gpu: str, kernel: Kernel, problem: AttentionProblem, seconds: float = math.inf
) -> Generator[None, None, None]:
    """Keep other processes from tuning the same kernel and problem during the block, so that each
    timing is taken once.

    A thread may nest such blocks. Raises Locked if another process tunes for longer than `seconds`,
    and Unsupported if the local cache cannot be written.
    """
    path, tuned = trials_path(gpu, kernel, problem), f"{kernel} for '{problem.bucket}'"
    lock = inside(current().cache_dir, path.with_name(f".{path.name}.lock"))
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(lock, 0, f"to tune {tuned}"))
        except Locked:
            if not seconds:
                raise
            log.info("another process tunes %s; waiting for what it finds", tuned)
            held.enter_context(locked(lock, seconds, f"to tune {tuned}"))
        yield


def append_line(path: Path, values: dict[str, Any]) -> None:
    """Append a line of JSON to a file, and fsync. Raises OSError."""
    line = json.dumps(values, allow_nan=False).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        if file.tell() and not _ends_a_line(file.fileno()):
            line = b"\n" + line  # end the line that a killed process left cut
        file.write(line)
        os.fsync(file.fileno())


def _ends_a_line(handle: int) -> bool:
    return os.pread(handle, 1, os.fstat(handle).st_size - 1) == b"\n"
