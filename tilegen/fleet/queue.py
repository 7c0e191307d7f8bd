"""The queue of a study, in which every config of a job is a trial.

Optuna's own heartbeats are not used, for three reasons. They work for databases only, not for
journals or through the proxy. A trial whose worker dies before its first heartbeat stays claimed
forever. A trial is lost if the worker that finds it abandoned dies between failing it and putting
it back.

A queue relies on two properties of a storage: trials are numbered, and only one of two workers can
turn a waiting trial into a running one.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import optuna
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from tilegen.fleet.storage import last_failure
from tilegen.kernels.config import TileConfig
from tilegen.store.trials import Conditions, Trial, trial_line

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

CONFIG, RESULT, BEAT, FILLED = "config", "result", "beat", "filled"
"""Attributes of trials and studies besides Optuna's own."""
PUBLISHED = "published to "
"""Prefix of the marks of studies whose winner is in a store."""
STALE_SECONDS = 60.0
"""Time without a beat after which a claim is stale [seconds], and another worker measures its
config."""


@dataclass(frozen=True)
class Claim:
    """A config that only this worker measures."""

    config: TileConfig
    trial: optuna.Trial

    def beat(self, count: int) -> None:
        """Renew the claim, with another count than the last beat's."""
        with contextlib.suppress(UpdateFinishedTrialError):  # claim lost, as `finish` will report
            self.trial.set_user_attr(BEAT, count)


class Queue:
    """The configs of a study that are not measured yet; any number of workers share the queue.

    If a config has several trials that have not failed, the trial with the lowest number counts and
    the others are ignored. So two workers may put a config back at the same moment.
    """

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        attributes: Mapping[str, str],
        *,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        """Open the study, or create it. The worker that creates a study fills it."""
        sampler = optuna.samplers.RandomSampler()  # never samples: trials are enqueued with configs
        try:
            self._study = optuna.create_study(storage=storage, study_name=name, sampler=sampler)
            self._made = True
            for key, value in attributes.items():
                self._study.set_user_attr(key, value)
        except DuplicatedStudyError:
            self._study = optuna.load_study(storage=storage, study_name=name, sampler=sampler)
            self._made = False
        self._storage = storage
        self._opened = time.monotonic()
        self._stale = stale_seconds
        self._filled = False
        self._beats: dict[int, tuple[int, float]] = {}
        """Last beat of each running trial, and the time when this process first saw that beat, by
        `time.monotonic` [seconds]."""

    def ready(
        self,
        configs: Sequence[TileConfig],
        known: Callable[[], Collection[dict[str, Any]]] = lambda: (),
    ) -> bool:
        """Fill the queue if that is this worker's part; return True once the queue is filled.

        A worker that did not create the study fills it only if the creator takes too long. `known`
        returns results from elsewhere, which are not measured again.
        """
        if not self._filled:
            is_creator_late = time.monotonic() - self._opened > self._stale
            if not self._made and not is_creator_late:
                self._filled = bool(self._study.user_attrs.get(FILLED))
                return self._filled
            done = self._counting()
            for result in known():
                if _key(result) not in done:
                    self._study.add_trial(_finished(result))
            self._put_missing(configs)
            self._study.set_user_attr(FILLED, True)
            self._filled = True
        return True

    def claim(self) -> Claim | None:
        """Claim the next waiting config; None if no config is waiting."""
        while _some_wait(before := self._all()):
            trial = self._study.ask()
            # No key: another worker took the last waiting trial, and `ask` made a new trial.
            key = trial.user_attrs.get(CONFIG, "")
            # A trial that counted before it was claimed still counts; another trial may by now.
            if _counts(trial, key, before) or _counts(trial, key, self._all()):
                return Claim(TileConfig.parse(key), trial)
            self._study.tell(trial, state=TrialState.FAIL)
        return None

    def finish(self, claim: Claim, trial: Trial, conditions: Conditions) -> bool:
        """Store the result of a claim; return False if another worker has put its config back."""
        result = trial_line(trial, conditions)
        value = trial.measurement.median_us
        state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        try:
            claim.trial.set_user_attr(RESULT, json.dumps(result, allow_nan=False))
            self._study.tell(claim.trial, value, state)
        except (UpdateFinishedTrialError, ValueError):
            # Another worker finished the trial, or a retried call did whose answer was lost.
            return self._trial(claim).state == state
        return True

    def release(self, claim: Claim) -> None:
        """Put back a config that was claimed and not measured."""
        self._put_back(self._trial(claim))

    def reap(self, configs: Sequence[TileConfig]) -> None:
        """Put back the claims of dead workers, and configs that were lost on the way back.

        A worker counts as dead if this process has seen no new beat for `stale_seconds`. Clocks of
        different machines are never compared, and time without the storage does not count.
        """
        now = time.monotonic()
        trials = self._all()
        for trial in (trial for trial in trials if trial.state == TrialState.RUNNING):
            beat = int(trial.user_attrs.get(BEAT, 0))
            last = self._beats.get(trial.number)
            if last is None or last[0] != beat or last[1] < last_failure(self._storage):
                self._beats[trial.number] = (beat, now)
            elif now - last[1] > self._stale:
                self._put_back(trial)
        if all(trial.state.is_finished() for trial in trials):
            self._put_missing(configs)

    def results(self, configs: Sequence[TileConfig]) -> dict[TileConfig, dict[str, Any]] | None:
        """Return the result of every config; None until all configs have a result."""
        counting = self._counting()
        results: dict[TileConfig, dict[str, Any]] = {}
        for config in configs:
            trial = counting.get(config.key)
            if trial is None or not trial.state.is_finished():
                return None
            results[config] = _result(trial)
        return results

    def marked(self, mark: str) -> bool:
        """Return True if a worker has set this mark on the study."""
        return bool(self._study.user_attrs.get(mark))

    def mark(self, mark: str, value: str) -> None:
        """Set a mark on the study, which all workers see."""
        self._study.set_user_attr(mark, value)

    def _all(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _trial(self, claim: Claim) -> FrozenTrial:
        number = claim.trial.number
        return next(trial for trial in self._all() if trial.number == number)

    def _counting(self) -> dict[str, FrozenTrial]:
        return counting(self._all())

    def _put_missing(self, configs: Sequence[TileConfig]) -> None:
        present = self._counting()
        for config in configs:
            if config.key not in present:
                self._put(config.key)

    def _put_back(self, trial: FrozenTrial) -> None:
        try:
            self._study.tell(trial.number, state=TrialState.FAIL)
        except (UpdateFinishedTrialError, ValueError):
            return  # the trial was finished after all, or another worker has put it back
        if key := trial.user_attrs.get(CONFIG):
            self._put(key)

    def _put(self, key: str) -> None:
        self._study.enqueue_trial({}, user_attrs={CONFIG: key})


def counting(trials: Sequence[FrozenTrial]) -> dict[str, FrozenTrial]:
    """Return the trial that counts for each config, by the config's key."""
    first: dict[str, FrozenTrial] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        if trial.state != TrialState.FAIL and (key := trial.user_attrs.get(CONFIG)):
            first.setdefault(key, trial)
    return first


def _result(trial: FrozenTrial) -> dict[str, Any]:
    """Parse the result of a trial; empty if it is unreadable, and the publisher measures again."""
    try:
        result = json.loads(trial.user_attrs[RESULT])
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def _some_wait(trials: Sequence[FrozenTrial]) -> bool:
    return any(trial.state == TrialState.WAITING for trial in trials)


def _counts(trial: optuna.Trial, key: str, among: Sequence[FrozenTrial]) -> bool:
    first = counting(among).get(key)
    return first is not None and first.number == trial.number


def _key(result: Mapping[str, Any]) -> str:
    return TileConfig(**result["config"]).key


def _finished(result: dict[str, Any]) -> FrozenTrial:
    value = result["measurement"]["median_us"]
    return create_trial(
        state=TrialState.PRUNED if value is None else TrialState.COMPLETE,
        value=value,
        user_attrs={CONFIG: _key(result), RESULT: json.dumps(result, allow_nan=False)},
    )
