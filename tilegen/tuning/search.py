"""The order of trials: the model's ranking first, then Optuna's proposals. No kernel is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.trial import Trial, TrialState, create_trial

from tilegen.errors import Unsupported
from tilegen.kernels.config import TileConfig

MAX_MISSES = 30
"""Maximum number of consecutive proposals that are illegal or already tried; after these, the best
untried config of the ranking is taken."""


class Search:
    """Ask-and-tell over a list of legal configs; no config is proposed twice.

    To Optuna each field of a config is a categorical choice, so it also proposes illegal configs.
    Illegal and already tried configs are answered at once, and cost no trial.
    """

    def __init__(
        self, space: Sequence[TileConfig], *, first: Sequence[TileConfig] = (), seed: int = 0
    ) -> None:
        """Start with the configs of `first`, in their order. `space` is in order of rank."""
        self._untried = dict.fromkeys([*first, *space])
        self._first = deque(dict.fromkeys(first))
        self._known: dict[TileConfig, float | None] = {}
        self._open: dict[TileConfig, Trial] = {}
        self._choices: dict[str, BaseDistribution] = {
            field.name: CategoricalDistribution(
                sorted({getattr(config, field.name) for config in self._untried})
            )
            for field in fields(TileConfig)
            if self._untried
        }
        self._study = quiet_study(
            sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        )

    def replay(self, config: TileConfig, us: float | None) -> None:
        """Add the result of an earlier run: the median [us], None for a failure."""
        self._known[config] = us
        if config in self._untried:
            del self._untried[config]
            state = TrialState.PRUNED if us is None else TrialState.COMPLETE
            params: dict[str, Any] = asdict(config)
            self._study.add_trial(
                create_trial(state=state, value=us, params=params, distributions=self._choices)
            )

    def ask(self) -> TileConfig | None:
        """Propose a config that was not proposed before; None if there are no more."""
        while self._first:
            if (config := self._first.popleft()) in self._untried:
                return self._take(config)
        for _ in range(MAX_MISSES if self._untried else 0):
            trial = self._study.ask(self._choices)
            config = _config(trial.params)
            if config is not None and config in self._untried:
                return self._take(config, trial)
            self._answer(trial, config)
        # Optuna keeps proposing configs that are used up; the best-ranked is as good a guess.
        return self._take(next(iter(self._untried))) if self._untried else None

    def tell(self, config: TileConfig, us: float | None) -> None:
        """Report the result of a proposed config: the median [us], None for a failure."""
        self._known[config] = us
        self._finish(self._open.pop(config), us)

    def _take(self, config: TileConfig, trial: Trial | None = None) -> TileConfig:
        if trial is None:
            self._study.enqueue_trial(asdict(config))
            trial = self._study.ask(self._choices)
        del self._untried[config]
        self._open[config] = trial
        return config

    def _answer(self, trial: Trial, config: TileConfig | None) -> None:
        if config in self._open:  # still being measured: Optuna ignores failed trials
            self._study.tell(trial, state=TrialState.FAIL)
        else:  # tried before, or illegal, which counts as a failed config
            self._finish(trial, None if config is None else self._known.get(config))

    def _finish(self, trial: Trial, us: float | None) -> None:
        if us is None:
            self._study.tell(trial, state=TrialState.PRUNED)  # TPE ranks it below all timed trials
        else:
            self._study.tell(trial, us)


def _config(params: dict[str, Any]) -> TileConfig | None:
    try:
        return TileConfig(**params)
    except Unsupported:  # each field is legal, the combination is not
        return None


def quiet_study(
    sampler: BaseSampler | None = None, pruner: BasePruner | None = None
) -> optuna.Study:
    """Create a study in memory that minimises, without log messages.

    Trials on disk are kept in tilegen's own files, since a stored study cannot change the choices
    of a field.
    """
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(direction="minimize", sampler=sampler, pruner=pruner)
    finally:
        optuna.logging.set_verbosity(verbosity)
