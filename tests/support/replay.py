"""A GPU that is a table: config -> time in us, or the status and message of a failure.

`tests/pure/replay_fwd.json` is such a table. Its times are made up, in the shape that real ones
have: a valley in the tile sizes, a step in the warps, two per cent of noise.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.recordings import Replayed
from tests.support.records import TASK, timed
from tilegen.kernels.config import TileConfig
from tilegen.model.estimate import Candidate, CostEstimate
from tilegen.store import TuningRecord
from tilegen.tuning.measure import Measurement, Status
from tilegen.tuning.tuner import tune

TABLE: dict[str, float | str] = json.loads(
    (Path(__file__).parents[1] / "pure" / "replay_fwd.json").read_text(encoding="utf-8")
)
SMALL = dict(list(TABLE.items())[:8])  # all of them timed
LAUNCH_FAILED = [
    TileConfig.parse(key)
    for key, us in TABLE.items()
    if isinstance(us, str) and us.startswith("launch_failed")
]


class Replay(Replayed):
    """`measure` of a table; remembers what was measured."""

    def __init__(
        self, table: Mapping[str, float | str] = TABLE, *, spread: float = 0.005, stop_at: int = -1
    ) -> None:
        """`stop_at` is the measurement, counted from 0, in which Ctrl-C is pressed."""
        super().__init__({TileConfig.parse(key): said(us, spread) for key, us in table.items()})
        self.table = table
        self.spread = spread
        self.stop_at = stop_at

    @property
    def space(self) -> list[TileConfig]:
        return list(self.timings)

    @property
    def fastest(self) -> TileConfig:
        times = {key: us for key, us in self.table.items() if isinstance(us, float)}
        return TileConfig.parse(min(times, key=lambda key: times[key]))

    def us(self, config: TileConfig) -> float:
        return cast("float", self.table[config.key])

    def __call__(self, config: TileConfig) -> Measurement:
        if len(self.measured) == self.stop_at:
            self.stop()
        return super().__call__(config)

    def stop(self) -> None:
        raise KeyboardInterrupt


def said(actual: float | str, spread: float) -> Measurement:
    """Return the measurement of a table's entry."""
    if isinstance(actual, float):
        return timed(actual, spread)
    status, message = actual.split(": ", 1)
    return Measurement(status=cast("Status", status), message=message)


class Killed(Replay):
    """The same, but what stops it is `kill -9`."""

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def candidate(config: TileConfig, seconds: float) -> Candidate:
    """Return a proposal whose estimate is about time only."""
    estimate = CostEstimate(
        kernel="fwd",
        config=config,
        read_bytes=1000,
        write_bytes=100,
        dram_bytes=900,
        lower_bound_bytes=500,
        smem_bytes=65_536,
        registers=168,
        flops=10**9,
        seconds=seconds,
        limit="tensor",
        terms=(("tensor", seconds),),
        waves=1.5,
        cost=seconds,
    )
    return Candidate(kernel="fwd", config=config, estimate=estimate, reason="for a test")


def ranking(configs: Sequence[TileConfig]) -> list[Candidate]:
    """Return proposals in this order."""
    return [candidate(config, (300 + rank) * 1e-6) for rank, config in enumerate(configs)]


def run(replay: Replay, **options: Any) -> Any:
    """Call `tune` on a replay; by default the model's ranking is the order of the table."""
    defaults = {"candidates": ranking(replay.space), "space": replay.space, "progress": False}
    return tune(TASK, measure=replay, **{**defaults, **options})


def trial_file(cache: Path) -> Path:
    (file,) = (cache / "trials").rglob("*.jsonl")
    return file


def trials_on_disk(cache: Path) -> list[TileConfig]:
    """Return the configs in the one trial log there is, in order."""
    lines = trial_file(cache).read_text().splitlines()
    return [TileConfig(**json.loads(line)["config"]) for line in lines]


def stored(cache: Path) -> TuningRecord:
    (file,) = (cache / "h200").rglob("*.json")
    return TuningRecord.from_json(file.read_text())


def slowness(config: TileConfig) -> float:
    us = TABLE[config.key]
    return us if isinstance(us, float) else math.inf


class Clock:
    """Seconds since it was made; `sleep` moves it at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        """Move on."""
        self.now += seconds

    def replaces_time_of(self, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have a module that imports `time` read this clock."""
        fake = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(f"{module}.time", fake)
