"""Timing in turns on a processor, with functions whose times are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.records import record
from tilegen.kernels.config import TileConfig
from tilegen.tuning import in_turns
from tilegen.tuning.in_turns import CONFIRMED, LOSING, InTurns, is_faster, pairs_of

A, B = TileConfig.parse("m64n64w4s2"), TileConfig.parse("m128n64w4s2")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock of threads that only launches move."""
    now = [0.0]
    monkeypatch.setattr(in_turns.time, "thread_time", lambda: now[0])
    return now


def taking(clock: list[float], seconds: Callable[[], float]) -> Callable[[], None]:
    def launch() -> None:
        clock[0] += seconds()

    return launch


def test_pairs_start_with_either(clock: list[float]) -> None:
    calls: list[str] = []

    def launch(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            clock[0] += seconds

        return run

    pairs = pairs_of(launch("a", 1.0), launch("b", 2.0), least=4, seconds=0.0, give_up=False)
    assert pairs == [(1.0, 2.0)] * 4
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab" + "ba"


def test_a_config_that_loses_clearly_is_given_up(clock: list[float]) -> None:
    slow, fast = (taking(clock, lambda s=s: s) for s in (1.2, 1.0))
    assert len(pairs_of(fast, slow, least=20, seconds=0.0, give_up=True)) == LOSING
    assert len(pairs_of(slow, fast, least=20, seconds=0.0, give_up=True)) == 20


def test_times_are_ratios_to_the_config_in_hand(clock: list[float]) -> None:
    speed = [1.0]  # of the machine, which slows down
    seconds = {A: 2e-3, B: 1e-3}
    turns = InTurns(A, lambda: lambda config: taking(clock, lambda: speed[0] * seconds[config]))
    assert turns.measure(A).median_us == pytest.approx(2000)
    speed[0] = 3.0
    measured = turns.measure(B)
    assert measured.median_us == pytest.approx(1000)
    assert measured.message.endswith("0.500 times the time of m64n64w4s2")
    turns.resume(record(us=500.0).measurement)
    assert turns.measure(B).median_us == pytest.approx(250)


@pytest.mark.parametrize("gain, wins", [(0.1, True), (0.03, True), (0.005, False), (-0.05, False)])
def test_a_winner_beats_noise(gain: float, wins: bool) -> None:
    draw = random.Random(1)
    ratios = [(1 - gain) * draw.gauss(1.0, 0.02) for _ in range(CONFIRMED)]
    assert is_faster(ratios) == wins


def test_a_small_majority_is_no_proof() -> None:
    assert not is_faster([0.8] * 11 + [1.2] * 10)
    assert is_faster([0.8] * 18 + [1.2] * 3)


def test_a_launch_that_fails_is_a_result() -> None:
    def prepare() -> Callable[[TileConfig], Callable[[], None]]:
        raise RuntimeError("not enough memory")

    measured = InTurns(A, prepare).measure(A)
    assert measured.failure == "launch failed: no inputs to measure on: not enough memory"


def test_measuring_takes_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_turns.tempfile, "gettempdir", lambda: str(tmp_path))
    threads = torch.get_num_threads()
    with in_turns.alone_on_this_machine():
        assert torch.get_num_threads() == 1
        assert [path.name for path in tmp_path.rglob("*.lock")] == ["measuring.lock"]
    assert torch.get_num_threads() == threads
