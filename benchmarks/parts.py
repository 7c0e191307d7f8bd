"""Run commands one after the other within one time limit, each in its own process, come what may.

A part that fails, hangs or kills its process costs its own result and nothing else: whatever it has
left on disk stays, and the next part starts on time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ENDING = ((signal.SIGINT, 12.0), (signal.SIGTERM, 2.0))
"""Signals that a part is sent before it is killed, and the time that each has to work [seconds].

First what Ctrl-C sends: it lets pytest write its report and the tuner its best so far. With
several workers, pytest gives those 10 seconds to end.
"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command."""

    name: str
    command: Callable[[float], Sequence[str]]
    """Function from the time that the part gets [seconds] to the arguments of the command."""
    share: float
    """Share of the time that is left when the part starts, relative to those of later parts."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """End of a part."""

    name: str
    status: Literal["passed", "failed", "time over", "no time left"]
    seconds: float
    allowed: float
    """Time that the part was given [seconds]."""
    message: str
    """Last line that the part printed before it was asked to end."""


def run_parts(
    parts: Sequence[Part],
    *,
    seconds: float,
    log: Path,
    folder: Path,
    after_each: Callable[[Sequence[Outcome]], None],
) -> list[Outcome]:
    """Run every part in `folder`, its output appended to `log`; return how each ended.

    A part that ends early leaves its time to those after it. `after_each` gets all outcomes so far.
    """
    deadline = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    for index, part in enumerate(parts):
        left = deadline - time.monotonic()
        allowed = left * part.share / sum(later.share for later in parts[index:])
        outcomes.append(run_part(part, allowed=allowed, log=log, folder=folder))
        after_each(outcomes)
    return outcomes


def run_part(part: Part, *, allowed: float, log: Path, folder: Path) -> Outcome:
    """Run one part for at most `allowed` seconds, plus at most those of ENDING to end in."""
    if allowed <= 0:
        return Outcome(name=part.name, status="no time left", seconds=0.0, allowed=0.0, message="")
    command = list(part.command(allowed))
    started = time.monotonic()
    with log.open("a", encoding="utf-8") as output:
        output.write(f"\n== {part.name}, at most {allowed:.0f} s: {' '.join(command)}\n")
        output.flush()
        before = output.tell()
        try:
            # A session of its own: a part's children are ended with it.
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_hear_interrupts,
            )
        except OSError as error:
            return _outcome(part, "failed", started, allowed, str(error))
        end = None
        try:
            status = "passed" if process.wait(timeout=allowed) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "time over"
            end = log.stat().st_size
        finally:  # also when this process is interrupted; and no child may outlive its part
            _end(process)
    return _outcome(part, status, started, allowed, last_line(log, before, end))


def _hear_interrupts() -> None:
    """Undo what a shell does to commands behind `&`: they and their children ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started: first asked, then killed."""
    try:
        for request, grace in ENDING:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, request)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace)
                break
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_line(log: Path, start: int, end: int | None = None) -> str:
    """Return the last line that is not blank, of what was written from byte `start` to `end`."""
    lines = log.read_bytes()[start:end].decode(errors="replace").splitlines()
    return next((text.strip() for text in reversed(lines) if text.strip()), "")


def _outcome(
    part: Part,
    status: Literal["passed", "failed", "time over"],
    started: float,
    allowed: float,
    message: str,
) -> Outcome:
    return Outcome(
        name=part.name,
        status=status,
        seconds=time.monotonic() - started,
        allowed=allowed,
        message=message,
    )
