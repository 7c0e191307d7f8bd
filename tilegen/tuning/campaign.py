"""Tuning of the jobs of a catalogue on one device, beside other processes of this machine.

Which job is free, and what is done, is read from the local cache: the lock of a job's trials, the
trials, and the record. So a run may end at any moment, and the same command goes on.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from tilegen.choose.ranker import ranked_space
from tilegen.device import ONE_THREAD
from tilegen.disk import log
from tilegen.errors import TilegenError, Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.model.estimate import Candidate
from tilegen.store import TuningRecord, record_path
from tilegen.store.election import conditions, own_findings
from tilegen.store.files import Locked
from tilegen.store.trials import Trial
from tilegen.tuning.jobs import Job
from tilegen.tuning.machine import Machine
from tilegen.tuning.measure import DeviceLost, one_line
from tilegen.tuning.trials import alone, trials_of
from tilegen.tuning.tuner import CPU_SECONDS, tune

SPENT = 0.9
"""Part of a budget of seconds whose trials make a job finished: checks take time, too."""
TRIAL_SECONDS = 1.0
"""Duration of a trial, where none is known [s]."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Budget of each job over all runs; without one the whole space is tried."""

    trials: int | None = None
    seconds: float | None = None
    until: float = math.inf
    """End of this run, by `time.monotonic` [s]."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A job with its trials, its record and its budget so far."""

    job: Job
    configs: list[TileConfig]
    """The configs to try, in the model's order."""
    candidates: list[Candidate]
    trials: dict[TileConfig, Trial]
    """Results that need not be taken again."""
    record: TuningRecord | None
    """The record of these trials, if there is one."""
    budget: Budget

    @classmethod
    def of(cls, job: Job, space: Sequence[TileConfig], budget: Budget) -> Standing:
        """Read the trials and the record of a job."""
        configs, candidates = ranked_space(job.task, space)
        known = trials_of(job.gpu.name, job.kernel, job.problem, job.conditions).read()
        legal = set(configs)
        trials = {c: one for c, one in known.items() if one.is_final and c in legal}
        return cls(
            job=job,
            configs=configs,
            candidates=candidates,
            trials=trials,
            record=_record_of(job, trials),
            budget=budget,
        )

    @property
    def seconds(self) -> float | None:
        """Budget of the job over all runs [s]."""
        budget = self.budget.seconds
        is_default = budget is None and self.budget.trials is None
        return CPU_SECONDS if is_default and self.job.gpu.policy == ONE_THREAD else budget

    @property
    def total(self) -> int:
        """Number of configs to try."""
        return min(len(self.configs), self.budget.trials or len(self.configs))

    @property
    def spent(self) -> float:
        """Time of the trials so far [s]."""
        return sum(trial.seconds for trial in self.trials.values())

    @property
    def is_measured(self) -> bool:
        """True if no trial is left to take."""
        enough = self.seconds is not None and self.trials and self.spent >= SPENT * self.seconds
        return len(self.trials) >= self.total or bool(enough)

    @property
    def is_done(self) -> bool:
        """True if nothing is left to do."""
        return self.is_measured and self.record is not None

    @property
    def gain(self) -> float | None:
        """Time of the model's first config over that of the best so far; None if unknown."""
        first = self.trials.get(self.configs[0]) if self.configs else None
        times = [time for one in self.trials.values() if (time := one.measurement.median_us)]
        us = first.measurement.median_us if first else None
        return us / min(times) if us else None

    @property
    def seconds_left(self) -> float:
        """Time that the rest of the job takes, by the trials so far [s]."""
        if self.is_measured:
            return 0.0
        each = self.spent / len(self.trials) if self.trials else TRIAL_SECONDS
        left = each * (self.total - len(self.trials))
        return left if self.seconds is None else min(left, self.seconds - self.spent)


@dataclass(kw_only=True)
class Outcome:
    """The results of a run: records, and the jobs that are left or were skipped."""

    measured: int = 0
    """Number of configs measured in this run."""
    records: list[TuningRecord] = field(default_factory=list[TuningRecord])
    """Records of the jobs that are done, now or before."""
    left: list[str] = field(default_factory=list[str])
    """Jobs that are not done."""
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """Jobs that cannot be done on this device, with the reasons."""
    missing: list[str] = field(default_factory=list[str])
    """Devices to tune for that no machine has."""

    @property
    def values(self) -> dict[str, Any]:
        """The outcome as JSON."""
        records = [json.loads(record.to_json()) for record in self.records]
        return {**vars(self), "records": records}

    def add(self, values: Mapping[str, Any]) -> None:
        """Add the outcome, as JSON, of a process that tuned the same jobs beside this one."""
        known = {record.key for record in self.records}
        given = [TuningRecord.from_json(json.dumps(one)) for one in values["records"]]
        self.measured += values["measured"]
        self.records += [record for record in given if record.key not in known]
        self.skipped |= values["skipped"]
        self.left += [job for job in values["left"] if job not in self.left]

    def __str__(self) -> str:
        winners = "1 winner" if len(self.records) == 1 else f"{len(self.records)} winners"
        configs = "1 config" if self.measured == 1 else f"{self.measured} configs"
        said = f"{configs} measured, {winners}"
        said += f"; {len(self.skipped)} kernels skipped" if self.skipped else ""
        goes_on = "kernels are left: the same command goes on"
        return said + (f"; {len(self.left)} {goes_on}" if self.left else "")


def tune_all(jobs: Sequence[Job], machine: Machine, budget: Budget) -> Outcome:
    """Tune jobs one after the other; jobs that another process tunes come last.

    A TilegenError ends only its job, unless the system cannot write. Raises DeviceLost.
    """
    outcome = Outcome()
    left = deque(jobs)
    busy = 0
    """Jobs in a row that other processes tune; if all are, this process waits for one."""
    while left and time.monotonic() < budget.until:
        job = left.popleft()
        wait = budget.until - time.monotonic() if busy > len(left) else 0.0
        try:
            with alone(job.gpu.name, job.kernel, job.problem, seconds=wait):
                _tune(job, machine, budget, outcome)
        except Locked:
            left.append(job)
            busy += 1
            continue
        except DeviceLost:
            raise
        except TilegenError as error:
            if isinstance(error.__cause__, OSError):  # a full disk is full for all jobs
                raise
            log.warning("%s skipped: %s", job, one_line(error))
            outcome.skipped[str(job)] = one_line(error)
        busy = 0
    outcome.left += map(str, left)
    return outcome


def _tune(job: Job, machine: Machine, budget: Budget, outcome: Outcome) -> None:
    space = machine.space(job)
    before = Standing.of(job, space, budget)
    if before.is_done and before.record is not None:
        outcome.records.append(before.record)
        return
    seconds = None if before.seconds is None else before.seconds - before.spent
    if budget.until < math.inf:
        until = budget.until - time.monotonic()
        seconds = until if seconds is None else min(seconds, until)
    record = tune(
        job.task,
        bench=machine.bench(job),
        trials=budget.trials,
        seconds=None if seconds is None else max(seconds, 1e-3),
        candidates=before.candidates,
        space=before.configs,
    )
    after = Standing.of(job, space, budget)
    outcome.measured += len(after.trials) - len(before.trials)
    outcome.records.append(record)
    if not after.is_measured:
        outcome.left.append(str(job))


def _record_of(job: Job, trials: Mapping[TileConfig, Trial]) -> TuningRecord | None:
    """Return the finding of the local cache about these trials."""
    path = record_path(job.gpu.name, job.kernel, job.problem, job.gpu.policy)
    for finding in own_findings(path):
        same = all(getattr(job.conditions, k) == v for k, v in conditions(finding).items())
        if same and finding.is_measured and finding.trials >= len(trials) > 0:
            return finding
    return None


def until(text: str, now: Callable[[], datetime] = datetime.now) -> float:
    """Return the next time of day `06:00` by `time.monotonic` [s]. Raises Unsupported."""
    given = re.fullmatch(r"([01][0-9]|2[0-3]):([0-5][0-9])", text)
    if given is None:
        raise Unsupported(f"--until must be a time of day such as 06:00, got {text!r}")
    here = now().astimezone()
    end = here.replace(hour=int(given[1]), minute=int(given[2]), second=0, microsecond=0)
    if end <= here:
        end += timedelta(days=1)
    return time.monotonic() + (end - here).total_seconds()
