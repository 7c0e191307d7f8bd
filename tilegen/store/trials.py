"""Trials as lines of JSON: what was tried for a record, and under which conditions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import PurePosixPath
from typing import Any

from tilegen.errors import InvalidRecord
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store.fields import MAX_TEXT, Fields, parse_json
from tilegen.store.record import (
    MAX_SECONDS,
    OtherSchema,
    config_from,
    date_of,
    measurement_from,
    measurement_values,
    slug,
    source_of,
)
from tilegen.store.versions import Versions, is_credible, now
from tilegen.tuning.measure import POLICY, Measurement

MAX_TRIALS_BYTES = 64 * 2**20
"""Limit of a file of trials [bytes]."""
BESIDES = ("tilegen", "torch", "cuda")
"""Names of the versions that a line has besides its conditions: no timing depends on them."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One config tried once."""

    config: TileConfig
    measurement: Measurement
    seconds: float = 0.0
    """Time that the trial took, waiting for the compiler, checking and measuring [seconds]."""
    spill_bytes: int = 0
    """Size of what the compiler put into memory of one thread's registers [bytes]; a config with
    much of it is a last resort."""
    device_lost: bool = False
    """True: the launch broke the CUDA context, so the config is never tried again."""
    source: str = ""
    """Hexadecimal digits that stand for the machine, empty where a line does not say it."""
    versions: Versions = field(default_factory=Versions)
    """Versions that the machine had."""
    date: str = field(default_factory=now, compare=False)
    """Date of the trial in UTC."""

    @property
    def is_final(self) -> bool:
        """True where another try would end the same way; a launch may fail because another process
        has taken the memory of a shared GPU."""
        return self.device_lost or self.measurement.status != "launch_failed"


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions that a timing depends on besides the config; another value makes it stale."""

    problem: str
    arch: str
    triton: str
    driver: str
    template_digest: str
    policy: str = POLICY

    @classmethod
    def of(
        cls, problem: AttentionProblem, arch: str, versions: Versions, template_digest: str
    ) -> Conditions:
        """Return the conditions of timings of a bucket's problem."""
        return cls(
            problem=problem.key,
            arch=arch,
            triton=versions.triton,
            driver=versions.driver,
            template_digest=template_digest,
        )


def of_one_binary(trials: Iterable[Trial]) -> list[tuple[TileConfig, ...]]:
    """Return the groups of configs that timed one and the same binary, each in the order of
    configs; none where every config timed its own."""
    groups: dict[str, list[TileConfig]] = {}
    for trial in trials:
        if digest := trial.measurement.digest:
            groups.setdefault(digest, []).append(trial.config)
    return sorted(tuple(sorted(group)) for group in groups.values() if len(group) > 1)


def one_binary_line(configs: Iterable[TileConfig]) -> str:
    """Return the note on configs that timed one binary."""
    return f"one binary was timed as {', '.join(one.key for one in configs)}: it counts once"


def trials_path(gpu: str, kernel: Kernel, problem: AttentionProblem) -> PurePosixPath:
    """Return where the trials of a problem lie, relative to a location."""
    return PurePosixPath("trials", slug(gpu), kernel, f"{slug(problem.rounded.key)}.jsonl")


def of_trials(path: str) -> tuple[str, Kernel]:
    """Return the GPU, as paths spell it, and the kernel of a file of trials."""
    _, gpu, kernel, _ = path.split("/")
    return gpu, kernel


def trial_line(trial: Trial, conditions: Conditions) -> dict[str, Any]:
    """Return the values of the line that a trial is written as."""
    groups = {"config": vars(trial.config), "measurement": measurement_values(trial.measurement)}
    values = {"date": trial.date, **vars(trial), **groups, "conditions": vars(conditions)}
    versions = {name: getattr(trial.versions, name) for name in BESIDES}
    if not any(versions.values()):
        del values["versions"]
    else:
        values["versions"] = versions
    if not trial.source:
        del values["source"]
    return values


def parse_trial(
    line: bytes, kernel: Kernel, only: Conditions | None = None
) -> tuple[Trial, Conditions] | None:
    """Read the trial and the conditions of a line; None for other conditions than `only`. Raises
    InvalidRecord."""
    try:
        values = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRecord(f"expected UTF-8, found {error.reason}") from None
    conditions = conditions_of(values)
    if only is not None and conditions != only:
        return None
    versions = Versions(triton=conditions.triton, driver=conditions.driver)
    if "versions" in values.values:  # which older lines lack
        there = values.group("versions")
        versions = replace(versions, **{name: there.text(name, longest=80) for name in BESIDES})
    trial = Trial(
        config=config_from(values.group("config"), kernel),
        measurement=measurement_from(values.group("measurement")),
        seconds=values.number("seconds", 0, MAX_SECONDS),
        spill_bytes=values.integer("spill_bytes", 0, 2**31),
        device_lost=values.values.get("device_lost") is True,
        source=source_of(values),
        versions=versions,
        date=date_of(values),
    )
    return trial, conditions


def conditions_of(line: Fields) -> Conditions:
    """Return the conditions of a line, which another tilegen may have written. Raises
    InvalidRecord."""
    group = line.group("conditions")
    return Conditions(
        **{field.name: group.text(field.name, longest=MAX_TEXT) for field in fields(Conditions)}
    )


Entry = tuple[bool, str, bytes]
"""A line to keep, and before it what lines are ordered by."""


def join_trials(
    contents: Iterable[bytes], kernel: Kernel, known: dict[bytes, Entry | None] | None = None
) -> bytes:
    """Return the lines of all files, each once, oldest first; dates that cannot be come before all
    others. What is no trial is left out, and so are the oldest beyond `MAX_TRIALS_BYTES`.

    `known` remembers what became of each line, for another call.
    """
    known = {} if known is None else known
    kept: set[Entry] = set()
    for line in {line for content in contents for line in content.split(b"\n")}:
        if line not in known:
            known[line] = _entry(line, kernel)
        if (entry := known[line]) is not None:
            kept.add(entry)
    lines = [line + b"\n" for *_, line in sorted(kept)]
    first, size = 0, sum(map(len, lines))
    while size > MAX_TRIALS_BYTES:
        size -= len(lines[first])
        first += 1
    return b"".join(lines[first:])


def _entry(line: bytes, kernel: Kernel) -> Entry | None:
    try:
        if (parsed := parse_trial(line, kernel)) is None:
            return None
        text = json.dumps(trial_line(*parsed), allow_nan=False)
        date = parsed[0].date
        return is_credible(date), date, text.encode()
    except OtherSchema:  # which its own tilegen can read
        return False, "", line
    except InvalidRecord:  # torn by a kill, or written by others
        return None
