"""Files of trials: joined in linear time, whole, under their limit."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.records import PROBLEM, RECORD, own, timed
from tilegen.store import files, trials
from tilegen.store.transfer import put_trials
from tilegen.store.trials import Conditions, Trial, join_trials, trial_line, trials_path
from tilegen.tuning.surroundings import Surroundings
from tilegen.tuning.trials import TrialLog

CONDITIONS = Conditions(
    problem=PROBLEM.key, arch="sm_90", triton="3.7.1", driver="580", template_digest="ab"
)


def lines_of(count: int) -> list[bytes]:
    return [
        json.dumps(
            trial_line(
                Trial(
                    config=RECORD.config,
                    measurement=timed(100.0 + n),
                    date=f"2026-11-21T09:30:{n:02}Z",
                ),
                CONDITIONS,
            )
        ).encode()
        for n in range(count)
    ]


def test_trials_are_parsed_once_each_and_not_while_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 137 000 lines parsing takes a minute, after which who waits for the lock gives up."""
    lines, target = lines_of(20), own(tmp_path)
    name = str(trials_path("h200", "fwd", PROBLEM))
    put_trials(name, [b"\n".join(lines[:12])], target)
    parsed: list[tuple[bytes, bool]] = []
    held = False
    parse, only_writer = trials.parse_trial, files.only_writer

    @contextlib.contextmanager
    def watched(folder: Path) -> Iterator[None]:
        nonlocal held
        # Somebody else is faster: what they wrote is not lost, and is all that is read now.
        with (tmp_path / name).open("ab") as file:
            file.write(lines[19] + b"\n")
        with only_writer(folder):
            held = True
            yield
            held = False

    def parse_trial(line: bytes, kernel: Any) -> Any:
        parsed.append((line, held))
        return parse(line, kernel)

    monkeypatch.setattr(files, "only_writer", watched)
    monkeypatch.setattr(trials, "parse_trial", parse_trial)
    moved = put_trials(name, [b"\n".join(lines[6:19])], target)
    assert (moved.action, moved.reason) == ("changed", "7 new trials")
    assert (tmp_path / name).read_bytes().splitlines() == lines
    assert sorted(line for line, _ in parsed if line) == lines
    assert [line for line, waiting in parsed if waiting] == [lines[19]]
    put_trials(name, [b"\n".join(lines)], target)
    assert (tmp_path / name).read_bytes().splitlines() == lines


def test_trials_beyond_the_limit_go_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is longer could not be read again."""
    lines = lines_of(20)
    monkeypatch.setattr(trials, "MAX_TRIALS_BYTES", sum(map(len, lines[15:])) + 5)
    for order in (lines, lines[::-1]):
        assert join_trials(order, "fwd").splitlines() == lines[15:]
    joined = join_trials([b"\n".join(lines[:18]), *lines[4:]], "fwd")
    assert joined.splitlines() == lines[15:]


def test_the_line_of_an_older_tilegen_does_not_replace_the_original(tmp_path: Path) -> None:
    """An older tilegen drops the surroundings of trials that it joins."""
    around = Surroundings(clock_mhz=1980, throttled=(), others=0)
    measured = replace(RECORD.measurement, surroundings=around)
    trial = Trial(config=RECORD.config, measurement=measured, date=RECORD.date)
    lines = [
        json.dumps(trial_line(one, CONDITIONS)).encode()
        for one in (trial, replace(trial, measurement=RECORD.measurement))
    ]
    for order in (lines, lines[::-1]):
        log = TrialLog(tmp_path, "h200", "fwd", PROBLEM, CONDITIONS)
        log.file.parent.mkdir(parents=True, exist_ok=True)
        log.file.write_bytes(join_trials(order, "fwd"))
        (read,) = log.read().values()
        assert read.measurement == measured
