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
    """Progress of a study: the numbers of its waiting, running and finished configs."""

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
    """Shortest median so far [us]."""
    winner: str
    """The published config; `none runs` if no config runs, empty before publication."""

    @property
    def configs(self) -> int:
        """Number of all configs."""
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
    """Collect the progress of every study, and of `jobs` that have no study yet."""
    studies: list[Progress] = []
    for summary in storage.get_all_studies():
        attributes = summary.user_attrs
        values = {name: printable(str(attributes.get(name, ""))) for name in ATTRIBUTES}
        if not values["kernel"]:
            continue  # not tilegen's study, or so new that it has no attributes yet
        trials = optuna.load_study(storage=storage, study_name=summary.study_name).get_trials(
            deepcopy=False
        )
        by_config = counting(trials)
        states = Counter(trial.state for trial in by_config.values())
        finished = [trial for trial in by_config.values() if trial.state.is_finished()]
        times = [trial.value for trial in finished if trial.value is not None]
        marks = (value for name, value in attributes.items() if name.startswith(PUBLISHED))
        studies.append(
            Progress(
                **values,
                waiting=states[TrialState.WAITING],
                running=states[TrialState.RUNNING],
                finished=len(finished),
                abandoned=sum(
                    trial.state == TrialState.FAIL and CONFIG in trial.user_attrs
                    for trial in trials
                ),
                best_us=min(times, default=None),
                winner=printable(str(next(marks, ""))),
            )
        )
    known = {(study.gpu, study.kernel, study.problem) for study in studies}
    studies += [
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
    return sorted(studies, key=lambda study: (study.gpu, study.problem, study.kernel))
