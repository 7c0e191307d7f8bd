"""Trials as lines of JSON: the configs tried for a record, and the conditions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import PurePosixPath
from typing import Any

from tilegen.device import Device
from tilegen.errors import InvalidRecord
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store.fields import MAX_TEXT, Fields, Form, Rule, optional, parse_json, rule, sparse
from tilegen.store.files import text_of
from tilegen.store.record import (
    CONFIG,
    DATE,
    MAX_SECONDS,
    MEASUREMENT,
    SOURCE,
    OtherSchema,
    config_from,
    naming_newer,
    slug,
)
from tilegen.store.versions import Versions, is_credible, now
from tilegen.tuning.measure import POLICY, Measurement
from tilegen.tuning.surroundings import UNKNOWN

MAX_TRIALS_BYTES = 64 * 2**20
"""Maximum size of a file of trials [bytes]."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One attempt to compile and measure a config."""

    config: TileConfig
    measurement: Measurement
    seconds: float = 0.0
    """Duration of the trial: waiting for the compiler, checking and measuring [seconds]."""
    spill_bytes: int = 0
    """Register spills [bytes a thread]. A config that spills much is a last resort."""
    device_lost: bool = False
    """True if the launch broke the CUDA context; the config is then never tried again."""
    source: str = ""
    """Hexadecimal identifier of the machine; empty if it is unknown."""
    versions: Versions = field(default_factory=Versions)
    """Versions on that machine."""
    date: str = field(default_factory=now, compare=False)
    """UTC date of the trial."""

    @property
    def is_final(self) -> bool:
        """True if another attempt would end the same way."""
        # A launch may fail because another process took the memory of a shared GPU.
        return self.device_lost or self.measurement.status != "launch_failed"


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions besides the config that a timing depends on. Any change makes the timing stale."""

    problem: str
    arch: str
    triton: str
    driver: str
    template_digest: str
    policy: str = POLICY

    @classmethod
    def of(
        cls,
        problem: AttentionProblem,
        device: Device,
        versions: Versions,
        template_digest: str,
    ) -> Conditions:
        """Collect the conditions of timings of a bucket's problem."""
        return cls(
            problem=problem.key,
            arch=device.arch,
            triton=versions.triton,
            driver=versions.driver,
            template_digest=template_digest,
            policy=device.policy,
        )


def of_one_binary(trials: Iterable[Trial]) -> list[tuple[TileConfig, ...]]:
    """Group the configs that compiled to the same binary, each group in the order of configs.
    Groups of a single config are left out."""
    groups: dict[str, list[TileConfig]] = {}
    for trial in trials:
        if digest := trial.measurement.digest:
            groups.setdefault(digest, []).append(trial.config)
    return sorted(tuple(sorted(group)) for group in groups.values() if len(group) > 1)


def one_binary_line(configs: Iterable[TileConfig]) -> str:
    """Format the note on configs that share a binary."""
    keys = ", ".join(config.key for config in configs)
    return f"one binary was timed as {keys}: it counts once"


def trials_path(gpu: str, kernel: Kernel, problem: AttentionProblem) -> PurePosixPath:
    """Return the path of a problem's trials, relative to a location."""
    return PurePosixPath("trials", slug(gpu), kernel, f"{slug(problem.rounded.key)}.jsonl")


def of_trials(path: str) -> tuple[str, Kernel]:
    """Parse the GPU, as spelt in paths, and the kernel from the path of a file of trials."""
    _, gpu, kernel, _ = path.split("/")
    return gpu, kernel


def trial_line(trial: Trial, conditions: Conditions) -> dict[str, Any]:
    """Return the JSON values of a trial's line."""
    values = _TRIAL.values(trial) | {"config": vars(trial.config)}
    values["versions"] = _BESIDES.values(trial.versions)
    if not any(values["versions"].values()):
        del values["versions"]
    return values | {"conditions": vars(conditions)}


def parse_trial(
    line: bytes | Fields, kernel: Kernel, only: Conditions | None = None
) -> tuple[Trial, Conditions] | None:
    """Parse the trial and the conditions of a line; None if the conditions are not `only`. Raises
    InvalidRecord; OtherSchema for lines that only a newer tilegen can read."""
    values = line if isinstance(line, Fields) else parse_json(text_of(line))
    with naming_newer(values):
        conditions = conditions_of(values)
        if only is not None and conditions != only:
            return None
        versions = Versions()
        if "versions" in values.values:  # older lines have no versions
            versions = _BESIDES.read(values.group("versions"))
        trial = _TRIAL.read(
            values,
            config=config_from(values.group("config"), kernel),
            versions=replace(versions, triton=conditions.triton, driver=conditions.driver),
        )
        return trial, conditions


def conditions_of(line: Fields) -> Conditions:
    """Parse the conditions of a line, which another tilegen may have written. Raises
    InvalidRecord."""
    return _CONDITIONS.read(line.group("conditions"))


_LONG, _SHORT = rule(Fields.text, longest=MAX_TEXT), rule(Fields.text, longest=80)
_CONDITIONS = Form(Conditions, **{field.name: _LONG for field in fields(Conditions)})
_BESIDES = Form(Versions, tilegen=_SHORT, torch=_SHORT, cuda=_SHORT)
"""Versions that a line holds besides its conditions: no timing depends on these."""
_TRIAL = Form(
    Trial,
    date=DATE,
    config=CONFIG,
    measurement=MEASUREMENT,
    seconds=rule(Fields.number, 0, MAX_SECONDS),
    spill_bytes=rule(Fields.integer, 0, 2**31),
    device_lost=optional(Rule(lambda fields, name: fields.values[name] is True)),
    source=sparse(SOURCE),
)

Entry = tuple[bool, str, bool, bytes]
"""The sort key of a line to keep, and the line: True if its date is credible, the date, True if
surroundings are known. So the copy of an older tilegen, which drops them, comes before."""


def join_trials(
    contents: Iterable[bytes], kernel: Kernel, known: dict[bytes, Entry | None] | None = None
) -> bytes:
    """Join the lines of files of trials, each line once, oldest first.

    Lines with dates in the future come before all others. Invalid lines are dropped, and so are the
    oldest beyond `MAX_TRIALS_BYTES`. `known` caches parsed lines for further calls.
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
        date, is_known = parsed[0].date, parsed[0].measurement.surroundings != UNKNOWN
        return is_credible(date), date, is_known, text.encode()
    except OtherSchema:  # only the tilegen that wrote the line can read it
        return False, "", False, line
    except InvalidRecord:  # cut when its writer was killed, or no trial
        return None
