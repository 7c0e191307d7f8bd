"""The model beside the times of trials: read whole, and judged by hand-made times."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trials import Judged, judge, read
from tests.support.records import TASK
from tilegen.kernels.config import TileConfig

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
A, B, C = (TileConfig.parse(f"m{rows}n64w4s2") for rows in (32, 64, 128))


def test_regret_and_correlation_of_hand_made_times() -> None:
    judged = Judged(task=TASK, measured={A: 10, B: 20, C: 30}, predicted={A: 8, B: 6, C: 9})
    assert (judged.first, judged.best) == (B, A)
    assert judged.regret == pytest.approx(1.0)
    assert judged.correlation == pytest.approx(0.5)
    assert judged.ratio == pytest.approx(0.8)


def test_every_timed_config_of_an_h200_is_read() -> None:
    timed = {(task.kernel, task.problem.key): times for task, times in read(RESULTS)}
    assert len(timed) == 15
    times = timed["fwd", "b32 hq16 hkv16 q512 kv512 d64 bf16 full"]
    assert len(times) == 11
    assert min(times.values()) == 112.864


def test_the_model_errs_by_no_more_than_is_told() -> None:
    """The errors of benchmarks/results/h200/README.md bound those without machine code."""
    judged = judge(RESULTS, compiled=False)
    of_loops = [one for one in judged if one.task.spec.loop and "combine" not in one.task.kernel]
    of_loops = [one for one in of_loops if one.task.kernel != "bwd_preprocess"]
    assert all(0.7 < one.ratio < 1.2 for one in of_loops)
    assert sorted(one.regret for one in of_loops)[-3] < 0.12
