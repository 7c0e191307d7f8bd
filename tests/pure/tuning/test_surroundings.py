"""Surroundings of a measurement: a GPU's from a stand-in of NVML, a processor's from files of the
system."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.nvml import STRANGER, Nvml, installed, measured
from tests.support.records import RECORD, record
from tilegen.errors import InvalidRecord
from tilegen.kernels.config import TileConfig
from tilegen.store import Found, TuningRecord, answer
from tilegen.tuning import measure as measure_module
from tilegen.tuning import surroundings
from tilegen.tuning.in_turns import InTurns
from tilegen.tuning.measure import measure
from tilegen.tuning.report import describe
from tilegen.tuning.surroundings import UNKNOWN, OnCpu, OnGpu, Surroundings


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvml]:
    yield from installed(monkeypatch)


QUIET = Surroundings(clock_mhz=1980, throttled=("sw_power_cap",), power_limit_w=700, others=0)

# --------------------------------------------------------------------------------------------------
# On a GPU


def test_a_gpu_without_others_is_quiet_even_at_its_power_limit(nvml: Nvml) -> None:
    assert measured() == QUIET
    assert QUIET.is_quiet
    assert str(QUIET) == "in quiet, at 1980 MHz, with a power limit of 700 W"


def test_clock_and_reasons_are_read_while_repeats_run_alone(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not during the warm-up, and not after the queue has ended."""
    happened: list[str] = []

    def reasons(gpu: str) -> int:
        happened.append("read")
        return 0x40

    monkeypatch.setattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", reasons, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
    measure(lambda: happened.append("launch"), min_repeats=3, seconds=0.0)
    assert happened == ["launch", "wait", "launch", "read", "wait"]


DISTURBED: dict[str, tuple[Callable[[Nvml], object], Surroundings, bool | None, str]] = {
    "a stranger": (
        lambda nvml: nvml.compute.append(STRANGER),
        replace(QUIET, others=1),
        False,
        "beside 1 other process, at 1980 MHz, with a power limit of 700 W",
    ),
    "strangers that draw": (
        lambda nvml: nvml.graphics.extend([STRANGER, STRANGER + 1, os.getpid()]),
        replace(QUIET, others=2),
        False,
        "beside 2 other processes, at 1980 MHz, with a power limit of 700 W",
    ),
    "heat": (
        lambda nvml: setattr(nvml, "reasons", itertools.cycle([0, 0x40, 0x8])),
        replace(QUIET, throttled=("hw_slowdown", "hw_thermal_slowdown")),
        False,
        "throttled by hw_slowdown and hw_thermal_slowdown, at 1980 MHz, with a power limit of "
        "700 W",
    ),
    "a reason without a name": (
        lambda nvml: setattr(nvml, "reasons", itertools.cycle([0x800])),
        replace(QUIET, throttled=("reason_0x800",)),
        False,
        "throttled by reason_0x800, at 1980 MHz, with a power limit of 700 W",
    ),
    "locked clocks": (
        lambda nvml: setattr(nvml, "reasons", itertools.cycle([0x2])),
        replace(QUIET, throttled=("applications_clocks_setting",)),
        True,
        "in quiet, at 1980 MHz, with a power limit of 700 W",
    ),
    "idle whenever it was asked": (
        lambda nvml: setattr(nvml, "reasons", itertools.cycle([0x1])),
        Surroundings(power_limit_w=700, others=0),
        None,
        "in unknown surroundings, with a power limit of 700 W",
    ),
    "processes hidden": (
        lambda nvml: nvml.compute.clear(),
        replace(QUIET, others=None),
        None,
        "in unknown surroundings, at 1980 MHz, with a power limit of 700 W",
    ),
    "the numbers of other processes alone": (  # such as those of the host, in a container
        lambda nvml: setattr(nvml, "compute", [STRANGER]),
        replace(QUIET, others=None),
        None,
        "in unknown surroundings, at 1980 MHz, with a power limit of 700 W",
    ),
    "no processes told": (
        lambda nvml: nvml.fails.add("nvmlDeviceGetComputeRunningProcesses"),
        replace(QUIET, others=None),
        None,
        "in unknown surroundings, at 1980 MHz, with a power limit of 700 W",
    ),
    "no reasons told": (
        lambda nvml: nvml.fails.add("nvmlDeviceGetCurrentClocksEventReasons"),
        replace(QUIET, throttled=None),
        None,
        "in unknown surroundings, at 1980 MHz, with a power limit of 700 W",
    ),
    "no GPU of the name": (
        lambda nvml: nvml.fails.add("nvmlDeviceGetHandleByUUID"),
        UNKNOWN,
        None,
        "in unknown surroundings",
    ),
    "no library": (
        lambda nvml: nvml.fails.add("nvmlInit"),
        UNKNOWN,
        None,
        "in unknown surroundings",
    ),
    "nothing told": (
        lambda nvml: nvml.fails.update(name for name in dir(nvml) if name.startswith("nvml")),
        UNKNOWN,
        None,
        "in unknown surroundings",
    ),
}


@pytest.mark.parametrize("name", DISTURBED)
def test_what_is_read_and_what_is_unknown(nvml: Nvml, name: str) -> None:
    change, expected, is_quiet, line = DISTURBED[name]
    change(nvml)
    actual = measured()
    assert actual == expected
    assert actual.is_quiet is is_quiet
    assert str(actual) == line


def test_a_stranger_that_comes_or_goes_counts(nvml: Nvml) -> None:
    around = OnGpu()
    around.begin()
    around.read()
    nvml.compute.append(STRANGER)
    assert around.seen().others == 1
    around.begin()
    nvml.compute.remove(STRANGER)
    assert around.seen().others == 1
    around.begin()
    assert around.seen().others == 0


def test_processes_are_hidden_in_a_container(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Even if a list has this process's number, which another may have outside."""
    monkeypatch.setattr(surroundings, "_sees_all_processes", lambda: False)
    assert measured() == replace(QUIET, others=None)
    monkeypatch.undo()
    own = tmp_path / "pid"
    own.symlink_to("pid:[4026531836]")
    assert surroundings._sees_all_processes(own)
    other = tmp_path / "other"
    other.symlink_to("pid:[4026532000]")
    assert not surroundings._sees_all_processes(other)
    assert not surroundings._sees_all_processes(tmp_path / "none")


def test_the_clock_is_the_median_of_readings(nvml: Nvml) -> None:
    nvml.clocks = iter([1200, 1755, 1980])
    around = OnGpu()
    around.begin()
    for _ in range(3):
        around.read()
    assert around.seen().clock_mhz == 1755


def test_numbers_that_stand_for_no_answer_are_unknown(nvml: Nvml) -> None:
    nvml.clocks, nvml.limit = itertools.cycle([2**32 - 1]), 2**32 - 1
    assert measured() == replace(QUIET, clock_mhz=None, power_limit_w=None)


def test_an_older_driver_has_another_name_for_reasons(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.fails.add("nvmlDeviceGetCurrentClocksEventReasons")
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda gpu: 0x80
    assert measured() == replace(QUIET, throttled=("hw_power_brake_slowdown",))


def test_without_the_extra_nothing_is_known(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    surroundings._nvml.cache_clear()
    assert measured() == UNKNOWN


def test_a_timer_of_the_callers_says_nothing(nvml: Nvml) -> None:
    measurement = measure(lambda: None, seconds=0.0, timer=lambda launch, repeats: [1.0] * repeats)
    assert measurement.surroundings == UNKNOWN
    assert measure_module._cuda_timer()(lambda: None, 2) == [250.0, 250.0]


# --------------------------------------------------------------------------------------------------
# On a processor


def on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[OnCpu, Callable[..., None]]:
    """Return the readings of a system, and a function that lets time pass: seconds of this process
    and of others."""
    ticks = os.sysconf("SC_CLK_TCK")
    stat, mounts = tmp_path / "stat", tmp_path / "mountinfo"
    mounts.write_text("22 27 0:21 / /proc rw - proc proc rw\n")
    now = {"time": 100.0, "own": 5.0, "busy": 40.0}

    def passes(seconds: float, own: float, others: float) -> None:
        now["time"] += seconds
        now["own"] += own
        now["busy"] += own + others
        user, rest = int((now["busy"] - 7) * ticks), ticks
        # user, nice, system, idle, wait for disks, two kinds of interrupts, stolen
        numbers = (user, rest, 2 * rest, 10**6, 10**6, rest, 2 * rest, rest, 0, 0)
        stat.write_text(f"cpu  {' '.join(map(str, numbers))}\ncpu0 1 2 3\n")

    passes(0, 0, 0)
    monkeypatch.setattr(surroundings.time, "monotonic", lambda: now["time"])
    monkeypatch.setattr(surroundings.os, "times", lambda: (now["own"], 0.0, 0.0, 0.0, 0.0))
    return OnCpu(stat=stat, mounts=mounts), passes


@pytest.mark.parametrize(
    "others,load,is_quiet,line",
    [
        (0.0, 0.0, True, "in quiet"),
        (0.1, 0.2, True, "in quiet"),
        (0.5, 1.0, False, "beside a load of 1 cores"),
        (1.6, 3.2, False, "beside a load of 3.2 cores"),
    ],
)
def test_the_load_is_that_of_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    others: float,
    load: float,
    is_quiet: bool,
    line: str,
) -> None:
    around, passes = on_cpu(tmp_path, monkeypatch)
    around.begin()
    passes(0.5, own=0.5, others=others)
    actual = around.seen()
    assert actual == Surroundings(load=load)
    assert actual.is_quiet is is_quiet
    assert str(actual) == line


def test_a_short_measurement_has_the_load_of_a_longer_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around, passes = on_cpu(tmp_path, monkeypatch)
    around.begin()
    passes(0.1, own=0.1, others=0.1)
    assert around.seen() == UNKNOWN
    around.begin()
    passes(0.15, own=0.15, others=0.0)
    assert around.seen() == Surroundings(load=0.4)


def test_a_load_that_does_not_hold_this_process_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around, passes = on_cpu(tmp_path, monkeypatch)
    around.begin()
    before = around.stat.read_text()
    passes(0.5, own=0.5, others=0.1)
    around.stat.write_text(before)  # a container's, in which nothing happens
    assert around.seen() == UNKNOWN
    fewer = before.replace(
        str(33 * os.sysconf("SC_CLK_TCK")), str(33 * os.sysconf("SC_CLK_TCK") + 30)
    )
    assert fewer != before
    around.stat.write_text(fewer)  # 0.3 s of the 0.5 s that this process used
    assert around.seen() == UNKNOWN
    for text in ("", "cpu\n", "cpu  a b c d e f g h\n"):
        around.stat.write_text(text)
        assert around.seen() == UNKNOWN, text
    around.stat.unlink()
    assert around.seen() == UNKNOWN


def test_the_load_of_a_container_of_its_own_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around, passes = on_cpu(tmp_path, monkeypatch)
    around.mounts.write_text("70 22 0:50 /proc/stat /proc/stat rw - fuse.lxcfs lxcfs rw\n")
    around.begin()
    passes(0.5, own=0.5, others=0.0)
    assert around.seen() == UNKNOWN


def test_the_load_of_this_system_is_no_less_than_nothing() -> None:
    around = OnCpu()
    around.begin()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    load = around.seen().load
    assert load is None or load >= 0.0


def test_times_in_turns_say_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around, passes = on_cpu(tmp_path, monkeypatch)
    config = TileConfig.parse("m64n64w4s2")
    turns = InTurns(config, lambda: lambda config: lambda: passes(0.1, own=0.1, others=0.15))
    turns._around = around
    assert turns.measure(config).surroundings == Surroundings(load=1.5)


# --------------------------------------------------------------------------------------------------
# In a record


def test_lines_about_a_record_say_what_is_known() -> None:
    finding = record(measurement=replace(RECORD.measurement, surroundings=QUIET))
    line = "measured in quiet, at 1980 MHz, with a power limit of 700 W"
    for known, told in ((finding, f", {line}"), (RECORD, "")):
        assert describe(known) == f"398 us, fwd, h200, {RECORD.problem}{told}"
        used = Found(record=known, file="x", origin="own", differences=())
        assert answer(used) == f"own record: m128n64w8s3, 398 us{told}"


def test_a_record_keeps_what_is_known() -> None:
    for around in (QUIET, Surroundings(load=0.0), Surroundings(others=0, throttled=()), UNKNOWN):
        finding = record(measurement=replace(RECORD.measurement, surroundings=around))
        stored = json.loads(finding.to_json())["measurement"].get("surroundings", {})
        known = {name: value for name, value in vars(around).items() if value is not None}
        assert stored == json.loads(json.dumps(known))
        assert TuningRecord.from_json(finding.to_json()) == finding


@pytest.mark.parametrize(
    "around,message",
    [
        ([], "measurement.surroundings must be a JSON object"),
        ({"clock_mhz": -1}, "measurement.surroundings.clock_mhz must be an int in"),
        ({"others": 0.5}, "measurement.surroundings.others must be an int in"),
        ({"others": None}, "measurement.surroundings.others must be an int in"),
        ({"load": "low"}, "measurement.surroundings.load must be a number in"),
        ({"throttled": "heat"}, "measurement.surroundings.throttled must be a list of at most 64"),
        ({"throttled": ["heat\n"]}, "measurement.surroundings.throttled.0 must be printable"),
        ({"throttled": ["A B"]}, "measurement.surroundings.throttled.0 must be a reason of NVML"),
    ],
)
def test_invalid_surroundings_are_refused(around: Any, message: str) -> None:
    values = json.loads(RECORD.to_json())
    values["measurement"]["surroundings"] = around
    with pytest.raises(InvalidRecord) as caught:
        TuningRecord.from_json(json.dumps(values))
    assert str(caught.value).startswith(message)
