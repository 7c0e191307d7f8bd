"""Statistics, time limits and failures of a measurement, with a timer that needs no GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from tilegen.errors import BuildFailed, Unsupported
from tilegen.tuning import measure as measure_module
from tilegen.tuning.measure import (
    MAX_MESSAGE,
    MAX_REPEATS,
    DeviceLost,
    Measurement,
    Timer,
    measure,
    one_line,
    summarise,
)


class Recorded:
    """A timer that hands out recorded times, and counts the launches asked of it."""

    def __init__(self, times: list[float], sleep: float = 0.0) -> None:
        self.times = itertools.cycle(times)
        self.sleep = sleep
        self.batches: list[int] = []

    def __call__(self, launch: Callable[[], object], repeats: int) -> list[float]:
        self.batches.append(repeats)
        for _ in range(repeats):
            launch()
        time.sleep(self.sleep * repeats)
        return [next(self.times) for _ in range(repeats)]


def raising(error: Exception, after: int = 0) -> Callable[[], object]:
    """Return a launch that raises after so many launches that do not."""
    launches = itertools.count()

    def launch() -> None:
        if next(launches) >= after:
            raise error

    return launch


def test_median_and_spread() -> None:
    times = [float(us) for us in range(1, 101)]
    expected = Measurement(
        status="ok", median_us=50.5, p20_us=20.8, p80_us=80.2, repeats=100, message=""
    )
    assert expected == summarise(times)
    assert expected == summarise(times[::-1])


@pytest.mark.parametrize("times", [[7.0], [7.0, 7.0], [7.0] * 9])
def test_equal_times_have_no_spread(times: list[float]) -> None:
    expected = Measurement(
        status="ok", median_us=7.0, p20_us=7.0, p80_us=7.0, repeats=len(times), message=""
    )
    assert expected == summarise(times)


def test_one_slow_run_moves_the_median_little() -> None:
    steady = summarise([10.0] * 20)
    disturbed = summarise([10.0] * 19 + [1e6])
    assert steady.median_us == disturbed.median_us
    assert steady.p80_us == disturbed.p80_us


def test_times_are_kept_to_the_nanosecond() -> None:
    assert summarise([412.31998443603516] * 3).median_us == 412.32


@pytest.mark.parametrize("times", [[], [1.0, 0.0], [-1.0], [float("nan")], [float("inf")]])
def test_invalid_times_are_failures(times: list[float]) -> None:
    actual = summarise(times)
    assert actual.status == "launch_failed"
    assert "expected times above 0 us" in actual.message
    assert actual.median_us is None


def test_warm_up_is_not_counted() -> None:
    measurement = measure(
        lambda: None, seconds=0.01, timer=Recorded([5000.0, *[10.0] * MAX_REPEATS])
    )
    assert measurement.status == "ok"
    assert (measurement.p20_us, measurement.median_us, measurement.p80_us) == (10.0, 10.0, 10.0)


def test_fast_launches_stop_at_the_largest_number() -> None:
    timer = Recorded([10.0])
    measurement = measure(lambda: None, seconds=60.0, timer=timer)
    assert measurement.repeats == MAX_REPEATS
    assert sum(timer.batches) == MAX_REPEATS + 1
    assert max(timer.batches) == measure_module.MAX_BATCH


def test_slow_launches_run_the_requested_times_then_stop() -> None:
    timer = Recorded([10.0], sleep=0.03)
    measurement = measure(lambda: None, min_repeats=8, seconds=0.2, timer=timer)
    assert 8 <= measurement.repeats <= 12


def test_very_slow_launch_is_cut_off() -> None:
    timer = Recorded([10.0], sleep=0.05)
    measurement = measure(lambda: None, min_repeats=1000, seconds=0.01, timer=timer)
    assert measurement.status == "ok"
    assert measurement.repeats == 1


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize(
    "error, status, message",
    [
        (
            OutOfResources(269_000, 232_448, "shared memory"),
            "out_of_resources",
            "Required: 269000, Hardware limit: 232448",
        ),
        (PTXASError("ptxas died"), "build_failed", "ptxas died"),
        (CompilationError(None, None, "no such op"), "build_failed", "no such op"),
        (BuildFailed("no ptxas"), "build_failed", "no ptxas"),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), "launch_failed", "invalid arg"),
        (ValueError(), "launch_failed", "ValueError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_failures_are_values(error: Exception, status: str, message: str, after: int) -> None:
    measurement = measure(raising(error, after), seconds=0.01, timer=Recorded([10.0]))
    assert status == measurement.status
    assert message in measurement.message
    assert (measurement.median_us, measurement.p20_us, measurement.p80_us, measurement.repeats) == (
        None,
        None,
        None,
        0,
    )


def test_a_class_that_only_has_the_name_is_a_failed_launch() -> None:
    class OutOfResources(Exception):
        """Somebody else's."""

    measurement = measure(raising(OutOfResources("x")), timer=Recorded([1.0]))
    assert measurement.status == "launch_failed"


def test_interrupt_is_not_swallowed() -> None:
    def launch() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(launch, timer=Recorded([1.0]))


def test_lost_device_is_raised_with_the_failure_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "_device_answers", lambda: False)
    launch = raising(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(DeviceLost, match=r"takes no more work .*illegal memory access") as caught:
        measure(launch, timer=Recorded([1.0]))
    assert caught.value.measurement.status == "launch_failed"
    assert "illegal memory access" in caught.value.measurement.message


def test_message_is_one_printable_line_of_limited_length() -> None:
    assert one_line(RuntimeError("first\n\n  second\x1b[31m\tthird")) == "first second [31m third"
    long = one_line(RuntimeError("x" * 5000))
    assert len(long) == MAX_MESSAGE
    assert long.endswith("...")


def test_without_a_gpu_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match=r"needs a GPU .*tilegen propose"):
        measure(lambda: None)


def test_the_cuda_timer_flushes_before_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    happened: list[str] = []

    class Buffer:
        def zero_(self) -> None:
            happened.append("flush")

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            happened.append("event")

        def elapsed_time(self, end: Event) -> float:
            assert happened[-1] == "wait"
            return 0.25  # milliseconds

    class Properties:
        L2_cache_size = 126 * 2**20

    sizes: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
    monkeypatch.setattr(torch, "empty", lambda n, dtype, device: (sizes.append(n), Buffer())[1])
    timer: Timer = measure_module._cuda_timer()
    assert timer(lambda: happened.append("launch"), 2) == [250.0, 250.0]
    assert happened == [*["flush", "event", "launch", "event"] * 2, "wait"]
    assert sizes == [4 * 126 * 2**20]
