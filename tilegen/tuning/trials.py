"""What was tried: one line of JSON per trial, on disk the moment it is known."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilegen.config import Kernel, TileConfig
from tilegen.errors import InvalidRecord, Unsupported
from tilegen.measure import Measurement, one_line
from tilegen.problem import AttentionProblem
from tilegen.store.fields import Fields, parse_json
from tilegen.store.record import MAX_SECONDS, config_from, measurement_from, now, slug

log = logging.getLogger("tilegen")

MAX_LOG_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One config tried once."""

    config: TileConfig
    measurement: Measurement
    seconds: float = 0.0
    """What it cost: waiting for the compiler, checking, measuring."""
    spill_bytes: int = 0
    """Registers of one thread that the compiler put into memory; with some, it is a last resort."""
    device_lost: bool = False
    """Whether it broke the CUDA context: never to be tried again."""

    @property
    def is_final(self) -> bool:
        """Whether another try would end the same way; a failed launch may be another's doing, who
        has taken the memory of a shared GPU."""
        return self.device_lost or self.measurement.status != "launch_failed"


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a timing depends on besides the config; another value of one makes it stale."""

    problem: str
    arch: str
    triton: str
    driver: str
    template_digest: str


class TrialLog:
    """The trials of one problem bucket, kernel and GPU, at
    `<cache dir>/trials/<gpu>/<kernel>/<problem>.jsonl`.

    A line is appended in one write and synchronised, so a process killed at any moment leaves at
    most one torn line, which is passed over. The last line about a config counts.
    """

    def __init__(
        self,
        cache_dir: Path,
        gpu: str,
        kernel: Kernel,
        problem: AttentionProblem,
        conditions: Conditions,
    ) -> None:
        self.file = cache_dir / "trials" / slug(gpu) / kernel / f"{slug(problem.key)}.jsonl"
        self._kernel: Kernel = kernel
        self._conditions = conditions

    def read(self) -> dict[TileConfig, Trial]:
        """Return the trials under the present conditions; warn once about lines that are none."""
        try:
            with self.file.open("rb") as file:
                lines = file.read(MAX_LOG_BYTES).split(b"\n")
        except OSError:  # most often: there is none yet
            return {}
        trials: dict[TileConfig, Trial] = {}
        bad: list[str] = []
        for number, line in enumerate(lines, start=1):
            try:
                if line and (trial := self._parse(line)) is not None:
                    trials[trial.config] = trial
            except InvalidRecord as error:
                bad.append(f"line {number}: {one_line(error)}")
        if bad:
            log.warning(
                "trials %r: passed over %d bad lines, first %s", str(self.file), len(bad), bad[0]
            )
        return trials

    def append(self, trial: Trial) -> None:
        """Put a trial on disk. Raises Unsupported when that is not possible."""
        values = {"date": now(), **asdict(trial), "conditions": asdict(self._conditions)}
        try:
            append_line(self.file, values)
        except OSError as error:
            raise Unsupported(
                f"cannot write {str(self.file)!r}: {error.strerror}; "
                "set TILEGEN_CACHE_DIR to a folder you can write to"
            ) from error

    def _parse(self, line: bytes) -> Trial | None:
        """Return the trial of a line, None for one under other conditions. Raises InvalidRecord."""
        try:
            fields = parse_json(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidRecord(f"expected UTF-8, found {error.reason}") from None
        conditions: Fields = fields.group("conditions")
        if conditions.values != asdict(self._conditions):
            return None
        return Trial(
            config=config_from(fields.group("config"), self._kernel),
            measurement=measurement_from(fields.group("measurement")),
            seconds=fields.number("seconds", 0, MAX_SECONDS),
            spill_bytes=fields.integer("spill_bytes", 0, 2**31),
            device_lost=fields.values.get("device_lost") is True,
        )


def append_line(path: Path, values: dict[str, Any]) -> None:
    """Put one line of JSON at the end of a file, and on disk. Raises OSError."""
    line = json.dumps(values, allow_nan=False).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        if file.tell() and not _ends_a_line(file.fileno()):
            line = b"\n" + line  # behind the line that a killed process left torn
        file.write(line)
        os.fsync(file.fileno())


def _ends_a_line(handle: int) -> bool:
    return os.pread(handle, 1, os.fstat(handle).st_size - 1) == b"\n"
