"""Times taken in turns, by a clock that the timed functions advance themselves."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tilegen.cpu.timing import MIN_ROUNDS, timed_in_turns


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def takes(self, name: str, *seconds: float) -> Callable[[], None]:
        """Return a function that takes these times, the last of them for good."""
        left = list(seconds)

        def function() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return function


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


def test_functions_take_turns_and_the_first_round_does_not_count(clock: _Clock) -> None:
    functions = {"a": clock.takes("a", 9.0, 1.0, 2.0, 1.0), "b": clock.takes("b", 9.0, 3.0)}
    times = timed_in_turns(functions, seconds=0.1)
    assert clock.calls == ["a", "b"] * (MIN_ROUNDS + 1)
    assert times["a"].median == 1.0
    assert times["a"].ratio == 1.0
    assert times["a"].rounds == MIN_ROUNDS
    assert times["b"].least == 3.0
    assert times["b"].ratio == 3.0


def test_a_function_that_takes_very_long_is_called_once(clock: _Clock) -> None:
    functions = {"a": clock.takes("a", 1.0), "slow": clock.takes("slow", 6.0, 7.0)}
    times = timed_in_turns(functions, seconds=0.1)
    assert clock.calls.count("slow") == 1
    assert times["slow"].rounds == 1
    assert times["slow"].ratio == times["slow"].median == 6.0
    assert times["a"].rounds == MIN_ROUNDS
