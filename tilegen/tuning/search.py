"""The order of trials: the model's ranking first, then Optuna. Kernels play no part in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import Trial, TrialState, create_trial

from tilegen.errors import Unsupported
from tilegen.kernels.config import TileConfig

MAX_MISSES = 30
"""Number of proposals in a row that may be illegal or tried before; then the next config is taken
by rank."""


class Search:
    """Ask-and-tell over a list of legal configs; never asks for one twice.

    Each field of a config is a categorical choice to Optuna, so its products include illegal
    configs. Those, and configs tried before, are answered on the spot and cost no trial.
    """

    def __init__(
        self, space: Sequence[TileConfig], *, first: Sequence[TileConfig] = (), seed: int = 0
    ) -> None:
        """`space` in order of rank; `first` are tried before Optuna is asked, in their order."""
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
        self._study = _quiet_study(seed)

    def replay(self, config: TileConfig, us: float | None) -> None:
        """Learn what an earlier run found: the median in us, None for a failure."""
        self._known[config] = us
        if config in self._untried:
            del self._untried[config]
            state = TrialState.PRUNED if us is None else TrialState.COMPLETE
            params: dict[str, Any] = asdict(config)
            self._study.add_trial(
                create_trial(state=state, value=us, params=params, distributions=self._choices)
            )

    def ask(self) -> TileConfig | None:
        """Return a config that was never asked for before, None when there are no more."""
        while self._first:
            if (config := self._first.popleft()) in self._untried:
                return self._take(config)
        for _ in range(MAX_MISSES if self._untried else 0):
            trial = self._study.ask(self._choices)
            config = _config(trial.params)
            if config is not None and config in self._untried:
                return self._take(config, trial)
            self._answer(trial, config)
        # Optuna keeps to a corner that is used up; the best-ranked config left is as good a guess.
        return self._take(next(iter(self._untried))) if self._untried else None

    def tell(self, config: TileConfig, us: float | None) -> None:
        """Answer a config that was asked for: the median in us, None for a failure."""
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
        if config in self._open:  # being measured: no answer yet, and none to learn from
            self._study.tell(trial, state=TrialState.FAIL)
        else:  # tried before, or illegal, which is as good as a failure
            self._finish(trial, None if config is None else self._known.get(config))

    def _finish(self, trial: Trial, us: float | None) -> None:
        if us is None:
            self._study.tell(trial, state=TrialState.PRUNED)  # to TPE: worse than anything timed
        else:
            self._study.tell(trial, us)


def _config(params: dict[str, Any]) -> TileConfig | None:
    try:
        return TileConfig(**params)
    except Unsupported:  # each field is legal, the combination is not
        return None


def _quiet_study(seed: int) -> optuna.Study:
    """Return a study in memory; the trials on disk are ours, because Optuna fixes its choices."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        return optuna.create_study(direction="minimize", sampler=sampler)
    finally:
        optuna.logging.set_verbosity(verbosity)
