"""Records of libraries: the time of a whole pass by the fastest of PyTorch's own kernels.

Each is a JSON file in the local cache, at `libraries/<gpu>/<pass>/<problem>.json`. It holds only
for one machine's PyTorch, so it is not shared.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, cast

from tilegen.disk import say_once
from tilegen.errors import InvalidRecord
from tilegen.problem import AttentionProblem
from tilegen.settings import settings
from tilegen.store.fields import MAX_TEXT, parse_json
from tilegen.store.files import inside, read_bytes, text_of, update
from tilegen.store.record import (
    OtherSchema,
    arch_of,
    date_of,
    gpu_of,
    measurement_from,
    measurement_values,
    problem_of,
    slug,
    versions_of,
)
from tilegen.store.versions import Versions
from tilegen.tuning.measure import POLICY, Measurement

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec
    from tilegen.kernels.spec import Direction

SCHEMA = 1
Backend = Literal["cudnn", "flash", "efficient"]
BACKENDS: tuple[Backend, ...] = ("cudnn", "flash", "efficient")
PASSES: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class LibraryRecord:
    """The fastest library for one pass of one problem bucket on one GPU."""

    gpu: str
    arch: str
    direction: Direction
    problem: AttentionProblem
    """The measured problem: batch and lengths are those of a bucket."""
    policy: str = POLICY
    library: Backend
    measurement: Measurement
    """Time of the whole pass, with status ok."""
    versions: Versions
    """Versions on the machine that measured; another PyTorch has other kernels."""
    date: str
    command: str = ""

    @property
    def config(self) -> str:
        """Name of the library, shown in place of a tile config: `library: cudnn`."""
        return f"library: {self.library}"

    def to_json(self) -> str:
        """Serialise the record to its file's text; `from_json` is the inverse."""
        values: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        values |= {
            "problem": self.problem.key,
            "measurement": measurement_values(self.measurement),
            "versions": dataclasses.asdict(self.versions),
        }
        return json.dumps({"schema": SCHEMA, **values}, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> LibraryRecord:
        """Parse a record and check every field. Raises InvalidRecord."""
        fields = parse_json(text)
        if (schema := fields.integer("schema", 1, 2**31)) != SCHEMA:
            raise OtherSchema(f"schema must be {SCHEMA}, got {schema}")
        measurement = measurement_from(fields.group("measurement"))
        if measurement.status != "ok":
            raise InvalidRecord(f"measurement.status must be ok, got {measurement.status}")
        return cls(
            gpu=gpu_of(fields),
            arch=arch_of(fields),
            direction=cast("Direction", fields.choice("direction", PASSES)),
            problem=problem_of(fields),
            policy=fields.text("policy", longest=40),
            library=cast("Backend", fields.choice("library", BACKENDS)),
            measurement=measurement,
            versions=versions_of(fields.group("versions")),
            date=date_of(fields),
            command=fields.text("command", longest=MAX_TEXT),
        )


def library_path(gpu: str, direction: Direction, problem: AttentionProblem) -> PurePosixPath:
    """Return the path of a library's record in the local cache."""
    return PurePosixPath("libraries", slug(gpu), direction, f"{slug(problem.rounded.key)}.json")


def save_library(record: LibraryRecord) -> Path:
    """Write a record to the local cache, replacing an earlier record; return the file. Raises
    Unsupported."""
    path = library_path(record.gpu, record.direction, record.problem)
    file = inside(settings().cache_dir, path)
    update(file, lambda _: record.to_json().encode())
    return file


def library_record(
    problem: AttentionProblem, gpu: GpuSpec, direction: Direction
) -> LibraryRecord | None:
    """Load the record of a problem's bucket on a GPU model; None if there is no usable record. An
    unusable record is logged once."""
    bucket = problem.bucket
    file = settings().cache_dir / library_path(gpu.name, direction, bucket)
    try:
        if (data := read_bytes(file)) is None:
            return None
        record = LibraryRecord.from_json(text_of(data))
    except InvalidRecord as error:
        say_once(f"record {str(file)!r} passed over: {error}")
        return None
    wanted = (gpu.name, gpu.arch, direction, bucket, POLICY)
    if wanted != (record.gpu, record.arch, record.direction, record.problem, record.policy):
        say_once(f"record {str(file)!r} is about something else; passed over")
        return None
    return record
