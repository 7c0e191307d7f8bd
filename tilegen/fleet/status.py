"""The progress of a fleet: one line per study."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import optuna
from optuna.trial import TrialState

from tilegen.disk import printable
from tilegen.fleet.jobs import ATTRIBUTES, Job
from tilegen.fleet.queue import CONFIG, PUBLISHED, counting

if TYPE_CHECKING:
    from optuna.storages import BaseStorage


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of one study: how many of its configs wait, run and are finished."""

    gpu: str
    kernel: str
    problem: str
    policy: str
    waiting: int
    running: int
    finished: int
    abandoned: int
    """Number of claims that were put back."""
    best_us: float | None
    """Shortest time so far [us]."""
    winner: str
    """Config that was published; `none runs` where none does, empty before."""

    @property
    def configs(self) -> int:
        """Number of configs there are."""
        return self.waiting + self.running + self.finished

    @property
    def state(self) -> str:
        """`not begun`, `tuning`, `done` (all measured) or `published`."""
        if not self.configs:
            return "not begun"
        if self.finished < self.configs:
            return "tuning"
        return "published" if self.winner else "done"


def progress(storage: BaseStorage, jobs: Sequence[Job] = ()) -> list[Progress]:
    """Return the progress of every study, and of those jobs of a catalogue that have none."""
    found: list[Progress] = []
    for summary in storage.get_all_studies():
        values = {n: printable(str(summary.user_attrs.get(n, ""))) for n in ATTRIBUTES}
        if not values["kernel"]:
            continue  # another's, or made a moment ago
        trials = optuna.load_study(storage=storage, study_name=summary.study_name).get_trials(
            deepcopy=False
        )
        now = counting(trials)
        states = Counter(trial.state for trial in now.values())
        finished = [trial for trial in now.values() if trial.state.is_finished()]
        times = [trial.value for trial in finished if trial.value is not None]
        marks = (v for k, v in summary.user_attrs.items() if k.startswith(PUBLISHED))
        found.append(
            Progress(
                **values,
                waiting=states[TrialState.WAITING],
                running=states[TrialState.RUNNING],
                finished=len(finished),
                abandoned=sum(
                    t.state == TrialState.FAIL and CONFIG in t.user_attrs for t in trials
                ),
                best_us=min(times, default=None),
                winner=printable(str(next(marks, ""))),
            )
        )
    known = {(one.gpu, one.kernel, one.problem) for one in found}
    found += [
        Progress(
            **job.attributes,
            waiting=0,
            running=0,
            finished=0,
            abandoned=0,
            best_us=None,
            winner="",
        )
        for job in jobs
        if (job.gpu.name, job.kernel, job.problem.key) not in known
    ]
    return sorted(found, key=lambda one: (one.gpu, one.problem, one.kernel))
