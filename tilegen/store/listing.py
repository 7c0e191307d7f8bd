"""Lists of records, and explanations of which record a call would use: `list_records`, `why`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilegen.errors import InvalidRecord, TilegenError
from tilegen.store.files import text_of
from tilegen.store.lookup import Difference, Found, identity, joined, soft
from tilegen.store.places import Location, Origin, locations, names, pass_over, read_all
from tilegen.store.reach import Unreachable
from tilegen.store.record import TuningRecord
from tilegen.store.versions import Versions
from tilegen.task import KernelTask
from tilegen.tuning.measure import one_line

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A record file. `trouble` explains why the file is unusable; empty if it is usable."""

    location: Location
    name: str
    """Path of the file, relative to the location."""
    record: TuningRecord | None
    trouble: str

    @property
    def file(self) -> str:
        """Address of the file, for messages."""
        return self.location.address(self.name)

    @property
    def origin(self) -> Origin:
        """Origin of the location: own, shared or shipped."""
        return self.location.origin


def list_records(
    where: Sequence[Location] | None = None, *, strict: bool = False
) -> Iterator[Listed]:
    """Yield every record file of the locations, unusable files included. Changes nothing.

    A location that does not answer is skipped with a warning; with `strict`, it raises Unreachable.
    """
    for location in locations() if where is None else where:
        try:
            records, broken = names(location, "records"), names(location, "broken")
        except Unreachable as error:
            if strict:
                raise
            pass_over(location, error)
            continue
        for name, data in read_all(location, records):
            yield _examine(location, name, data)
        for name in broken:
            trouble = "was broken and set aside; delete it once you have seen it"
            yield Listed(location=location, name=name, record=None, trouble=trouble)


def why(
    task: KernelTask,
    *,
    versions: Versions | None = None,
    template_digest: str = "",
    where: Sequence[Location] | None = None,
    top: int = 10,
) -> list[Found]:
    """List the `top` records nearest to a task, nearest first, each with all its differences."""
    ranked: list[tuple[float, Found]] = []
    for listed in list_records(where):
        if (record := listed.record) is None:
            continue
        hard = identity(task, record)
        doubts = soft(versions or Versions(), template_digest, record)
        distance = sum(map(_distance, hard)) + 0.01 * len(doubts) + 0.1 * (not record.is_measured)
        entry = Found(
            record=record,
            file=listed.file,
            origin=listed.origin,
            differences=(*hard, *doubts),
            borrowed=record.gpu != task.device.name,
        )
        ranked.append((distance, entry))
    ranked.sort(key=lambda pair: pair[0])  # stable: ties keep the order of the locations
    return [entry for _, entry in ranked[:top]]


def why_lines(task: KernelTask, nearest: Sequence[Found]) -> list[str]:
    """Format the result of `why`: one line per record, with the fields that differ."""
    bucket, kernel = task.problem.bucket, task.kernel
    if not nearest:
        return [f"no record of any kind; to make one: tilegen tune '{bucket}' --kernel {kernel}"]
    lines = [f"{kernel} on {task.device.name} for '{bucket}'; {len(nearest)} nearest records:"]
    same = "this record is used"
    for entry in nearest:
        state = "" if entry.record.is_measured else ", unmeasured"
        differs = joined(entry.differences) or same
        if not entry.differences:
            same = "an equal match; the record above is found first"
        lines.append(f"  {entry.origin}{state}  {entry.file!r}: {differs}")
    return lines


def _examine(location: Location, name: str, data: bytes | TilegenError | None) -> Listed:
    record, trouble = None, ""
    try:
        if isinstance(data, TilegenError):
            raise data
        if data is None:
            trouble = "disappeared while it was read"
        else:
            record = TuningRecord.from_json(text_of(data))
            if str(record.path) != name:
                trouble = f"is never found here; it belongs at {location.address(record.path)!r}"
    except (InvalidRecord, Unreachable) as error:
        trouble = one_line(error)
    return Listed(location=location, name=name, record=record, trouble=trouble)


_WEIGHTS = {  # weight of a difference, by field; other fields weigh 1
    "kernel": 100.0,
    "policy": 100.0,
    "arch": 40.0,
    "gpu": 10.0,
    "dtype": 8.0,
    "mask": 8.0,
    "head_dim_qk": 6.0,
    "head_dim_v": 6.0,
}


def _distance(difference: Difference) -> float:
    """Return the distance that a difference adds; numbers weigh by the logarithm of their ratio."""
    weight = _WEIGHTS.get(difference.field, 1.0)
    if not (difference.current.isdecimal() and difference.stored.isdecimal()):
        return weight
    return weight * abs(math.log2(int(difference.current) / int(difference.stored)))
