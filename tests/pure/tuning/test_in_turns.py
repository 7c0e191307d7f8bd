"""Timing in turns on a processor, with functions whose times are known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.records import record
from tilegen.errors import Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.tuning import in_turns
from tilegen.tuning.in_turns import LOSING, PAIRS, InTurns, is_faster, pairs_of

A, B = TileConfig.parse("m64n64w4s2"), TileConfig.parse("m128n64w4s2")
C, D = TileConfig.parse("m64n32w4s2"), TileConfig.parse("m32n64w4s2")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock of threads that only launches move. No measurement takes more pairs than it must."""
    monkeypatch.setattr(in_turns, "SECONDS", 0.0)
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

    pairs = pairs_of(launch("a", 1.0), launch("b", 2.0), least=4, seconds=0.0)
    assert pairs == [(1.0, 2.0)] * 4
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab" + "ba"


def test_pairs_end_early(clock: list[float]) -> None:
    run = taking(clock, lambda: 1.0)
    assert len(pairs_of(run, run, least=20, seconds=0.0)) == 20
    assert len(pairs_of(run, run, least=20, seconds=0.0, stop=lambda pairs: len(pairs) > 6)) == 7


def test_configs_that_clearly_lose_to_the_best_so_far_are_pruned(clock: list[float]) -> None:
    seconds = {A: 1.0, B: 0.8, C: 0.95, D: 0.82}
    noise = itertools.cycle([1.0, 1.02, 0.98])
    turns = InTurns(A, lambda: lambda config: taking(clock, lambda: next(noise) * seconds[config]))
    assert turns.measure(A).repeats == PAIRS
    assert turns.measure(C).repeats == PAIRS  # beats the config in hand
    assert turns.measure(B).repeats == PAIRS
    lost = turns.measure(C)  # 0.95 is more than CLEAR times 0.8
    assert (lost.status, lost.repeats) == ("ok", LOSING)
    assert lost.median_us == pytest.approx(0.95e6, rel=0.05)
    assert turns.measure(D).repeats == PAIRS  # 0.82 is not
    seconds[A] = 5.0
    assert turns.measure(A).repeats == PAIRS  # the config in hand is measured with itself


def test_steady_times_need_few_pairs(clock: list[float]) -> None:
    turns = InTurns(A, lambda: lambda config: taking(clock, lambda: 0.9 if config == B else 1.0))
    assert turns.measure(B).repeats == LOSING
    assert turns.measure(A).repeats == PAIRS  # its spread is that of noise


def test_a_config_that_was_fast_once_is_not_pruned(clock: list[float]) -> None:
    times = iter([1.0, 2.0, 2.0, 1.0, 2.0, 2.0])  # a launch that warms up, and PAIRS
    turns = InTurns(
        A, lambda: lambda config: taking(clock, lambda: 1.0 if config == A else next(times))
    )
    assert turns.measure(B).repeats == PAIRS


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
    ratios = [(1 - gain) * draw.gauss(1.0, 0.02) for _ in range(21)]
    assert is_faster(ratios) == wins


def test_a_small_majority_is_no_proof() -> None:
    assert not is_faster([0.8] * 11 + [1.2] * 10)
    assert is_faster([0.8] * 18 + [1.2] * 3)


def test_a_launch_that_fails_is_a_result() -> None:
    def prepare() -> Callable[[TileConfig], Callable[[], None]]:
        raise RuntimeError("not enough memory")

    measured = InTurns(A, prepare).measure(A)
    assert measured.failure == "launch failed: no inputs to measure on: not enough memory"


def test_a_refusal_keeps_its_words() -> None:
    def prepare() -> Callable[[TileConfig], Callable[[], None]]:
        raise Unsupported("no such mask")

    assert InTurns(A, prepare).measure(A).failure == "launch failed: no such mask"


def test_measuring_takes_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_turns.tempfile, "gettempdir", lambda: str(tmp_path))
    threads = torch.get_num_threads()
    with in_turns.alone_on_this_machine():
        assert torch.get_num_threads() == 1
        assert [path.name for path in tmp_path.rglob("*.lock")] == ["measuring.lock"]
    assert torch.get_num_threads() == threads
