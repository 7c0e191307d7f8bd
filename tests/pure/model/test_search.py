"""The order of trials: every config once, whatever Optuna proposes."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from tests.support.replay import Replay
from tilegen.kernels.config import TileConfig
from tilegen.tuning.search import MAX_MISSES, Search

pytestmark = pytest.mark.oldest


def test_an_empty_search_measures_nothing() -> None:
    assert Search([]).ask() is None


def test_search_goes_by_rank_if_optuna_repeats_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = Replay().space
    search = Search(space)
    stubborn = {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 2}
    asked: list[int] = []

    class SameAgain(optuna.samplers.BaseSampler):
        def infer_relative_search_space(self, *_: Any) -> dict[str, Any]:
            return {}

        def sample_relative(self, *_: Any) -> dict[str, Any]:
            return {}

        def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
            asked.append(trial.number)
            return stubborn[name]

    search._study.sampler = SameAgain()
    for expected in space[:4]:
        config = search.ask()
        assert expected == config
        search.tell(config, 100.0)
    assert len(set(asked)) == 1 + 3 * MAX_MISSES


def test_search_answers_every_proposal_it_does_not_try() -> None:
    space = [TileConfig.parse(key) for key in ("m16n16w4s1", "m32n32w4s1", "m64n64w4s1")]
    search = Search(space, seed=3)  # six of the nine products are illegal
    state = optuna.trial.TrialState
    times = dict(zip(space, (100.0, None, 300.0), strict=True))
    while (config := search.ask()) is not None:
        search.tell(config, times[config])
    assert len(search._study.trials) > len(space), "no illegal proposal: the test shows nothing"
    for trial in search._study.trials:
        us = times.get(TileConfig(**trial.params))
        assert trial.state == (state.PRUNED if us is None else state.COMPLETE)
        assert trial.values == (None if us is None else [us])
