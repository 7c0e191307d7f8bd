"""One study: every config of a kernel, problem and GPU model is one of its trials.

Optuna's own heartbeats are left alone. They work for databases only, not for journals or through
the proxy; a trial whose worker dies before the first heartbeat stays claimed for ever; and a trial
is lost if the worker that found it abandoned dies between failing it and putting it back. A queue
needs no more of a storage than that trials are numbered and that only one of two workers makes a
waiting trial a running one.
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
"""Names of the attributes that trials and studies carry besides Optuna's own."""
PUBLISHED = "published to "
"""Start of the marks of studies whose winner is in a store."""
STALE_SECONDS = 60.0
"""Time without a beat after which a claim belongs to nobody [seconds]: another worker measures its
config."""


@dataclass(frozen=True)
class Claim:
    """A config that this worker, and no other, is to measure."""

    config: TileConfig
    trial: optuna.Trial

    def beat(self, count: int) -> None:
        """Say that the worker is still at it."""
        with contextlib.suppress(UpdateFinishedTrialError):  # `finish` will find that out
            self.trial.set_user_attr(BEAT, count)


class Queue:
    """The configs of one study that are still to be measured; any number of workers share it.

    Of the trials of a config that have not failed the one with the lowest number counts, all others
    are passed over. So it does no harm when two workers put a config back at the same moment.
    """

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        attributes: Mapping[str, str],
        *,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        """Opens the study; who makes it is the one who fills it."""
        sampler = optuna.samplers.RandomSampler()  # never asked: all configs are named beforehand
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
        """Last beat of each running trial, and the time when it was new by this process's clock
        [seconds]."""

    def ready(
        self,
        configs: Sequence[TileConfig],
        known: Callable[[], Collection[dict[str, Any]]] = lambda: (),
    ) -> bool:
        """True once the configs are in the queue; puts them there if that is this worker's job.

        `known` returns results from elsewhere, which need not be found again.
        """
        if not self._filled:
            makers_time_is_up = time.monotonic() - self._opened > self._stale
            if not self._made and not makers_time_is_up:
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
        """Return the next config for this worker to measure, None if none is waiting."""
        while _some_wait(before := self._all()):
            trial = self._study.ask()
            key = trial.user_attrs.get(CONFIG, "")  # none: another was faster, ask made a new one
            # One that counted before it was claimed still does; one that did not may do now.
            if _counts(trial, key, before) or _counts(trial, key, self._all()):
                return Claim(TileConfig.parse(key), trial)
            self._study.tell(trial, state=TrialState.FAIL)
        return None

    def finish(self, claim: Claim, trial: Trial, conditions: Conditions) -> bool:
        """Write down what was measured; False if others have taken the config for abandoned."""
        result = trial_line(trial, conditions)
        value = trial.measurement.median_us
        state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        try:
            claim.trial.set_user_attr(RESULT, json.dumps(result, allow_nan=False))
            self._study.tell(claim.trial, value, state)
        except (UpdateFinishedTrialError, ValueError):  # finished: by others, or by this very call
            return self._trial(claim).state == state
        return True

    def release(self, claim: Claim) -> None:
        """Put a config back that was claimed and not measured."""
        self._put_back(self._trial(claim))

    def reap(self, configs: Sequence[TileConfig]) -> None:
        """Put back what dead workers have claimed, and what was lost on the way back.

        A worker is dead if for some time no new beat has been seen from here. Clocks of different
        machines are never compared, and time in which the storage was away does not count.
        """
        now = time.monotonic()
        trials = self._all()
        for trial in (t for t in trials if t.state == TrialState.RUNNING):
            beat = int(trial.user_attrs.get(BEAT, 0))
            last = self._beats.get(trial.number)
            if last is None or last[0] != beat or last[1] < last_failure(self._storage):
                self._beats[trial.number] = (beat, now)
            elif now - last[1] > self._stale:
                self._put_back(trial)
        if all(trial.state.is_finished() for trial in trials):
            self._put_missing(configs)

    def results(self, configs: Sequence[TileConfig]) -> dict[TileConfig, dict[str, Any]] | None:
        """Return the results of every config, None as long as a config has none."""
        counting = self._counting()
        found: dict[TileConfig, dict[str, Any]] = {}
        for config in configs:
            trial = counting.get(config.key)
            if trial is None or not trial.state.is_finished():
                return None
            found[config] = _result(trial)
        return found

    def marked(self, mark: str) -> bool:
        """True where a worker has set this mark on the study."""
        return bool(self._study.user_attrs.get(mark))

    def mark(self, mark: str, value: str) -> None:
        """Mark the study, for all to see."""
        self._study.set_user_attr(mark, value)

    def _all(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _trial(self, claim: Claim) -> FrozenTrial:
        number = claim.trial.number
        return next(trial for trial in self._all() if trial.number == number)

    def _counting(self) -> dict[str, FrozenTrial]:
        return counting(self._all())

    def _put_missing(self, configs: Sequence[TileConfig]) -> None:
        there = self._counting()
        for config in configs:
            if config.key not in there:
                self._put(config.key)

    def _put_back(self, trial: FrozenTrial) -> None:
        try:
            self._study.tell(trial.number, state=TrialState.FAIL)
        except (UpdateFinishedTrialError, ValueError):
            return  # it was finished after all, or another has put it back
        if key := trial.user_attrs.get(CONFIG):
            self._put(key)

    def _put(self, key: str) -> None:
        self._study.enqueue_trial({}, user_attrs={CONFIG: key})


def counting(trials: Sequence[FrozenTrial]) -> dict[str, FrozenTrial]:
    """Return the trial of each config that counts."""
    found: dict[str, FrozenTrial] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        if trial.state != TrialState.FAIL and (key := trial.user_attrs.get(CONFIG)):
            found.setdefault(key, trial)
    return found


def _result(trial: FrozenTrial) -> dict[str, Any]:
    """Return the result in a trial, empty where it cannot be read: then the publisher measures
    it."""
    try:
        result = json.loads(trial.user_attrs[RESULT])
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def _some_wait(trials: Sequence[FrozenTrial]) -> bool:
    return any(trial.state == TrialState.WAITING for trial in trials)


def _counts(trial: optuna.Trial, key: str, among: Sequence[FrozenTrial]) -> bool:
    found = counting(among).get(key)
    return found is not None and found.number == trial.number


def _key(result: Mapping[str, Any]) -> str:
    return TileConfig(**result["config"]).key


def _finished(result: dict[str, Any]) -> FrozenTrial:
    value = result["measurement"]["median_us"]
    return create_trial(
        state=TrialState.PRUNED if value is None else TrialState.COMPLETE,
        value=value,
        user_attrs={CONFIG: _key(result), RESULT: json.dumps(result, allow_nan=False)},
    )
