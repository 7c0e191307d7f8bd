"""Parts of a check, each with a share of the time: one that fails or hangs costs only itself."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.parts import ENDING, Part, run_part, run_parts
from benchmarks.summary import summarise
from tests.benchmarks.cases import a_part

HANGS = "import time; print('started', flush=True); time.sleep(600)"
# Ignores the polite signals, and has a child that would outlive it and keep the pipe open.
HANGS_ON = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(child, stdout=open({path!r}, "w"))
print('started', flush=True)
time.sleep(600)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.txt"


def test_parts_that_fail_hang_or_are_missing_cost_only_themselves(log: Path) -> None:
    parts = [
        a_part("writes", "open('left.txt', 'w').write('kept'); print('done')"),
        a_part("fails", "raise SystemExit('went wrong')"),
        Part(name="missing", command=lambda _: ["/no/such/program"], share=1.0),
        a_part("hangs", HANGS, share=0.2),
        a_part("last", "print('reached')"),
    ]
    seen: list[int] = []
    outcomes = run_parts(
        parts, seconds=24, log=log, folder=log.parent, after_each=lambda o: seen.append(len(o))
    )
    assert [(o.name, o.status, o.message) for o in outcomes[:2]] == [
        ("writes", "passed", "done"),
        ("fails", "failed", "went wrong"),
    ]
    assert [(o.name, o.status) for o in outcomes[2:]] == [
        ("missing", "failed"),
        ("hangs", "time over"),
        ("last", "passed"),
    ]
    assert outcomes[3].message == "started"
    assert (log.parent / "left.txt").read_text() == "kept"
    assert seen == [1, 2, 3, 4, 5]
    assert "reached" in log.read_text()


def test_a_part_that_ignores_the_signal_is_killed_with_its_children(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried = tuple((request, 0.3) for request, _ in ENDING)
    monkeypatch.setattr("benchmarks.parts.ENDING", hurried)
    pipe = log.parent / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    part = a_part("hangs", HANGS_ON.format(path=str(pipe)))
    outcome = run_part(part, allowed=1.5, log=log, folder=log.parent)
    assert (outcome.status, outcome.message) == ("time over", "started")
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "ends when nobody can write to it any more"
    os.close(reader)


# Says which polite signals it got; the first may come while it still does something else.
SAVES = """
import signal, sys, time
def save(*_):
    open('saved.txt', 'a').write('SIGTERM')
    sys.exit()
signal.signal(signal.SIGTERM, save)
print('started', flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    open('saved.txt', 'a').write('SIGINT ')
    if len(sys.argv) > 1:
        time.sleep(600)
"""


@pytest.mark.parametrize("extra, saved", [([], "SIGINT "), (["slow"], "SIGINT SIGTERM")])
def test_a_part_over_its_time_is_interrupted_before_it_is_terminated(
    extra: list[str], saved: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (interrupt, _), terminate = ENDING
    monkeypatch.setattr("benchmarks.parts.ENDING", ((interrupt, 1.0), terminate))
    part = Part(name="saves", command=lambda _: [sys.executable, "-c", SAVES, *extra], share=1.0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as behind a shell's `&`
    try:
        outcome = run_part(part, allowed=1.0, log=log, folder=log.parent)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (outcome.status, outcome.message) == ("time over", "started")
    assert (log.parent / "saved.txt").read_text() == saved


def test_tests_over_their_time_leave_their_report(log: Path) -> None:
    (log.parent / "test_slow.py").write_text(
        "import time\ndef test_quick(): pass\ndef test_slow(): time.sleep(600)\n"
    )
    report = log.parent / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", "test_slow.py"]
    part = Part(name="tests", command=lambda _: command, share=1.0)
    outcome = run_part(part, allowed=4.0, log=log, folder=log.parent)
    assert outcome.status == "time over"
    text = report.read_text()
    assert 'name="test_quick"' in text
    assert "1 tests, 0 failures" in summarise(log.parent, [outcome])


def test_unused_time_goes_to_the_parts_after(log: Path) -> None:
    parts = [a_part("quick", "pass"), a_part("other", "pass")]
    first, second = run_parts(
        parts, seconds=60, log=log, folder=log.parent, after_each=lambda _: None
    )
    assert first.allowed == pytest.approx(30, abs=0.5)
    assert second.allowed > 50


def test_no_part_starts_when_time_is_over(log: Path) -> None:
    outcome = run_part(a_part("late", "print('ran')"), allowed=-1.0, log=log, folder=log.parent)
    assert outcome.status == "no time left"
    assert not log.exists()
