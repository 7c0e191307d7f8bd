"""Records of libraries: the time of a whole pass by the fastest of PyTorch's own kernels.

Each is a JSON file in the local cache, at `libraries/<gpu>/<pass>/<problem>.json`. It holds only
for one machine's PyTorch, so it is not shared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tilegen.disk import say_once
from tilegen.environment import current
from tilegen.errors import InvalidRecord
from tilegen.kernels.spec import BACKENDS, Backend, Direction
from tilegen.problem import AttentionProblem
from tilegen.store.fields import Fields, Form, group, parse_json, rule
from tilegen.store.files import inside, read_bytes, text_of, update
from tilegen.store.record import MEASUREMENT, VERSIONS, slug
from tilegen.store.versions import Versions, now
from tilegen.tuning.measure import POLICY, Measurement

if TYPE_CHECKING:
    from tilegen.device import Device

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class LibraryRecord:
    """The fastest library for one pass of one problem bucket on one GPU."""

    library: Backend
    measurement: Measurement
    """Time of the whole pass, with status ok."""
    versions: Versions
    """Versions on the machine that measured; another PyTorch has other kernels."""

    @property
    def seconds(self) -> float:
        """Median time of the pass [s]."""
        return 1e-6 * (self.measurement.median_us or 0.0)


_FORM = Form(
    LibraryRecord,
    library=rule(Fields.choice, BACKENDS),
    measurement=MEASUREMENT,
    versions=group(VERSIONS),
)


def library_path(gpu: str, direction: Direction, problem: AttentionProblem) -> PurePosixPath:
    """Return the path of a library's record in the local cache."""
    return PurePosixPath("libraries", slug(gpu), direction, f"{slug(problem.rounded.key)}.json")


def save_library(
    record: LibraryRecord,
    problem: AttentionProblem,
    gpu: Device,
    direction: Direction,
    command: str = "",
) -> Path:
    """Write the record of a problem's bucket to the local cache, replacing an earlier record;
    return the file. Raises Unsupported."""
    values: dict[str, Any] = {
        "schema": SCHEMA,
        **_subject(problem, gpu, direction),
        **_FORM.values(record),
        "date": now(),
        "command": command,
    }
    text = json.dumps(values, indent=2, allow_nan=False) + "\n"
    file = inside(current().cache_dir, library_path(gpu.name, direction, problem.bucket))
    update(file, lambda _: text.encode())
    return file


def library_record(
    problem: AttentionProblem, gpu: Device, direction: Direction
) -> LibraryRecord | None:
    """Load the record of a problem's bucket on a GPU model; None if there is no usable record. An
    unusable record is logged once."""
    file = current().cache_dir / library_path(gpu.name, direction, problem.bucket)
    try:
        if (data := read_bytes(file)) is None:
            return None
        fields = parse_json(text_of(data))
        fields.integer("schema", SCHEMA, SCHEMA)
        for name, value in _subject(problem, gpu, direction).items():
            fields.choice(name, (value,))
        record = _FORM.read(fields)
        fields.group("measurement").choice("status", ("ok",))
        return record
    except InvalidRecord as error:
        say_once(f"record {str(file)!r} skipped: {error}")
        return None


def _subject(problem: AttentionProblem, gpu: Device, direction: Direction) -> dict[str, str]:
    """Return the fields that identify the task of a record."""
    return {
        "gpu": gpu.name,
        "arch": gpu.arch,
        "direction": direction,
        "problem": problem.bucket.key,
        "policy": POLICY,
    }
