"""Recordings: the time of every config of a kernel, for one problem and GPU, to be replayed.

One file of JSON lines per kernel and problem:
`benchmarks/results/<gpu>/exhaustive/<kernel>/<problem>.jsonl`. A line with `"recording"` opens a
session: what was timed, where, with which versions. Every other line is one config, on disk the
moment it is known. A session under other conditions than the last one (another Triton, template or
driver) is stale and is not read; the last line about a config counts.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from benchmarks.environment import RESULTS, Environment
from tilegen.device import Device
from tilegen.emit.identity import template_digest
from tilegen.errors import InvalidRecord, TilegenError
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem
from tilegen.store.fields import Fields, parse_json
from tilegen.store.record import MAX_SECONDS, measurement_from, measurement_values, slug
from tilegen.store.trials import Trial, of_one_binary
from tilegen.tuning.bench import as_tuned
from tilegen.tuning.measure import Measurement
from tilegen.tuning.trials import append_line

SCHEMA = 1
MEASURED = "measured"
"""Source of what a GPU has timed; any other source says how the times were made up."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """One run of the recorder: what it times, and with which versions."""

    source: str = MEASURED
    gpu: str
    """Catalogue key."""
    arch: str
    kernel: Kernel
    problem: AttentionProblem
    template_digest: str
    space: int
    """Number of configs to be timed."""
    environment: Environment

    @property
    def conditions(self) -> tuple[str, ...]:
        """Conditions that a timing depends on besides its config."""
        versions = self.environment.triton, self.environment.driver
        return (self.source, self.gpu, self.arch, self.template_digest, *versions)


def new_session(spec: Device, kernel: Kernel, problem: AttentionProblem, space: int) -> Session:
    """Return the session of this process."""
    return Session(
        gpu=spec.name,
        arch=spec.arch,
        kernel=kernel,
        problem=problem,
        template_digest=template_digest(kernel),
        space=space,
        environment=Environment(),
    )


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Timings of one kernel of a problem on a GPU."""

    session: Session
    """Session that recorded last."""
    trials: dict[TileConfig, Trial] = field(default_factory=dict[TileConfig, Trial])

    @property
    def name(self) -> str:
        """Name of the recording: `fwd of 'b1 ...' on h200`."""
        return f"{self.session.kernel} of '{self.session.problem}' on {self.session.gpu}"

    def distinct(self) -> Recording:
        """Return the recording with one config per binary: others timed nothing of their own."""
        again = {c for group in self.one_binary() for c in group[1:]}
        kept = {config: trial for config, trial in self.trials.items() if config not in again}
        return replace(self, trials=kept)

    def one_binary(self) -> list[tuple[TileConfig, ...]]:
        """Return the groups of configs that timed one and the same binary."""
        return of_one_binary(self.trials.values())

    def as_tuned(self) -> dict[TileConfig, Measurement]:
        """Return the recording as the tuner would see it: without kernels that spill much."""
        return {
            config: as_tuned(trial.measurement, trial.spill_bytes)
            for config, trial in self.trials.items()
        }

    def times(self) -> dict[TileConfig, float]:
        """Return the median us of the configs that the tuner can choose from."""
        medians = {config: one.median_us for config, one in self.as_tuned().items()}
        return {config: us for config, us in medians.items() if us is not None}


class Replayed:
    """`measure` of recorded timings; remembers what was measured, in order."""

    def __init__(self, timings: Mapping[TileConfig, Measurement]) -> None:
        self.timings = timings
        self.measured: list[TileConfig] = []

    def __call__(self, config: TileConfig) -> Measurement:
        self.measured.append(config)
        return self.timings[config]


class Recorder:
    """Appends to the file of one recording, and knows what is in it."""

    def __init__(self, path: Path, session: Session) -> None:
        self._path, self._session, self._opened = path, session, False
        self.trials: dict[TileConfig, Trial] = {}
        with contextlib.suppress(FileNotFoundError, InvalidRecord):  # or killed before it began
            rows = read(path)
            if rows.session.conditions == session.conditions:
                self.trials = rows.trials

    def todo(self, space: list[TileConfig]) -> list[TileConfig]:
        """Return the configs left to be timed, in a random but fixed order.

        A recording that was cut short is thus a sample that does not depend on the model.
        """
        order = sorted(space)
        random.Random(0).shuffle(order)
        return [c for c in order if c not in self.trials or not self.trials[c].is_final]

    def append(self, trial: Trial) -> None:
        """Put one config on disk."""
        if not self._opened:
            append_line(self._path, _header(self._session))
            self._opened = True
        append_line(
            self._path,
            {
                "config": trial.config.key,
                "measurement": measurement_values(trial.measurement),
                "seconds": trial.seconds,
                "spill_bytes": trial.spill_bytes,
                "device_lost": trial.device_lost,
            },
        )
        self.trials[trial.config] = trial


def file_of(folder: Path, kernel: Kernel, problem: AttentionProblem) -> Path:
    """Return the file of a recording in a folder such as benchmarks/results/h200/exhaustive."""
    return folder / kernel / f"{slug(problem.key)}.jsonl"


def committed() -> list[Path]:
    """Return the recordings of this checkout, in a fixed order."""
    return sorted(RESULTS.glob("*/exhaustive/*/*.jsonl"))


def read(path: Path) -> Recording:
    """Return a recording; a line that a killed run left torn is skipped.

    Raises InvalidRecord for a file that is no recording.
    """
    recording: Recording | None = None
    for line in path.read_bytes().split(b"\n"):
        try:
            fields = parse_json(line.decode("utf-8"))
        except (UnicodeDecodeError, InvalidRecord):
            continue
        if "recording" in fields.values:
            session = _session(fields)
            same = recording is not None and recording.session.conditions == session.conditions
            trials = recording.trials if recording is not None and same else {}
            recording = Recording(session=session, trials=trials)
        elif recording is not None:
            trial = _trial(fields)
            recording.trials[trial.config] = trial
    if recording is None:
        raise InvalidRecord(f"expected a recording in {str(path)!r}, found no line that opens one")
    return recording


def _header(session: Session) -> dict[str, Any]:
    values = {"recording": SCHEMA, **asdict(session)}
    return {**values, "problem": session.problem.key}


def _session(fields: Fields) -> Session:
    fields.integer("recording", SCHEMA, SCHEMA)
    environment = fields.group("environment")
    names = Environment.__dataclass_fields__
    try:
        problem = AttentionProblem.parse(fields.text("problem", longest=1000))
    except TilegenError as error:
        raise InvalidRecord(str(error)) from error
    return Session(
        source=fields.text("source"),
        gpu=fields.text("gpu"),
        arch=fields.text("arch"),
        kernel=cast("Kernel", fields.choice("kernel", KERNELS)),
        problem=problem,
        template_digest=fields.text("template_digest"),
        space=fields.integer("space", 0, 2**20),
        environment=Environment(**{name: environment.text(name, longest=2000) for name in names}),
    )


def _trial(fields: Fields) -> Trial:
    return Trial(
        config=TileConfig.parse(fields.text("config")),
        measurement=measurement_from(fields.group("measurement")),
        seconds=fields.number("seconds", 0, MAX_SECONDS),
        spill_bytes=fields.integer("spill_bytes", 0, 2**31),
        device_lost=fields.values.get("device_lost") is True,
    )
