"""Processes that tune the same at the same time: each config is measured once in all.

Threads stand for processes here: locks of files exclude both alike.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.records import PROBLEM, RECORD, TASK, own, record, written
from tests.support.replay import SMALL, Replay, run
from tilegen import pipeline
from tilegen.choose import records
from tilegen.errors import Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.store import save
from tilegen.task import KernelTask
from tilegen.tuning import tuner as tune_module
from tilegen.tuning.measure import Measurement
from tilegen.tuning.trials import alone

SECONDS = 30


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILEGEN_TUNE", "1")


def at_once(count: int, act: Callable[[], Any]) -> list[Any]:
    """Call `act` from many threads at the same moment; return the results."""
    start, results = threading.Barrier(count), []

    def one() -> None:
        start.wait(SECONDS)
        results.append(act())

    threads = [threading.Thread(target=one, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(results) == count
    return results


def test_tuning_at_the_same_moment_measures_each_config_once() -> None:
    measured: list[TileConfig] = []

    class Slow(Replay):
        def __call__(self, config: TileConfig) -> Measurement:
            measured.append(config)
            threading.Event().wait(0.01)  # in which the others would measure it, too
            return super().__call__(config)

    actual = at_once(3, lambda: run(Slow(SMALL)))
    assert sorted(measured) == sorted(Replay(SMALL).space)
    assert {one.config for one in actual} == {Replay(SMALL).fastest}


def test_calls_at_the_same_moment_tune_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[str] = []
    looked, here = threading.Barrier(3), threading.local()
    look_up = records.look_up

    def look(*arguments: Any, **options: Any) -> Any:
        entry = look_up(*arguments, **options)
        if not getattr(here, "has_looked", False):
            here.has_looked = True
            looked.wait(SECONDS)  # all see that there is none, before one has tuned
        return entry

    def tune(task: KernelTask, **_: Any) -> Any:
        tuned.append(task.kernel)
        save(RECORD, location=own(tmp_path))
        return RECORD

    monkeypatch.setattr(records, "look_up", look)
    monkeypatch.setattr(tune_module, "tune", tune)
    chosen = at_once(3, lambda: pipeline.choose_kernel(TASK, may_tune=True))
    assert [(one.config, one.source) for one in chosen] == [(RECORD.config, "tuned now")] * 3
    assert tuned == ["fwd"]


def test_who_has_waited_too_long_takes_the_best_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(record(gpu="h100"), location=own(tmp_path))
    monkeypatch.setattr(records, "TUNE_SECONDS", 0.01)
    caplog.set_level(logging.INFO, logger="tilegen")
    chosen: list[Any] = []
    with alone("h200", "fwd", PROBLEM):
        chosen += at_once(1, lambda: pipeline.choose_kernel(TASK, may_tune=True))
    (item,) = chosen
    assert item.config == RECORD.config
    assert item.source.endswith("borrowed from h100")
    said = "\n".join(caplog.messages)
    assert f"another process tunes fwd for '{PROBLEM}'; waiting for what it finds" in said
    assert (
        f"tuning failed, using the best known config: expected to tune fwd for '{PROBLEM}', found"
        in said
    )


def test_others_are_not_waited_for(tmp_path: Path) -> None:
    with alone("h200", "fwd", PROBLEM), alone("h200", "fwd", PROBLEM):
        for gpu, kernel in (("h100", "fwd"), ("h200", "bwd_dq")):
            with alone(gpu, kernel, PROBLEM, seconds=0):  # type: ignore[arg-type]
                pass
        assert at_once(1, refused) == [True]
    assert at_once(1, refused) == [False], "it is free again"
    assert written(tmp_path) == []


def refused() -> bool:
    try:
        with alone("h200", "fwd", PROBLEM, seconds=0):
            return False
    except Unsupported:
        return True
