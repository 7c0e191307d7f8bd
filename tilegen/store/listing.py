"""Lists of records, and explanations of which record a call would use: `list_records`, `why`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilegen.errors import InvalidRecord, TilegenError
from tilegen.store.files import text_of
from tilegen.store.lookup import Difference, Found, identity, joined, soft
from tilegen.store.places import Location, Owner, locations, names, pass_over, read_all
from tilegen.store.reach import Unreachable
from tilegen.store.record import TuningRecord, path_of_key
from tilegen.store.versions import Versions
from tilegen.task import KernelTask
from tilegen.tuning.measure import one_line
from tilegen.units import us_text


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A record file. `reason` explains why the file is unusable; empty if it is usable."""

    location: Location
    name: str
    """Path of the file, relative to the location."""
    record: TuningRecord | None
    reason: str

    @property
    def file(self) -> str:
        """Address of the file, for messages."""
        return self.location.address(self.name)

    @property
    def origin(self) -> Owner:
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
            reason = "was broken and set aside; delete it once you have seen it"
            yield Listed(location=location, name=name, record=None, reason=reason)


def why(
    task: KernelTask,
    *,
    versions: Versions | None = None,
    template_digest: str = "",
    where: Sequence[Location] | None = None,
    top: int = 10,
) -> list[Found]:
    """List the `top` records of the task's kernel and architecture nearest to a task, nearest
    first, each with all its differences."""
    ranked: list[tuple[float, Found]] = []
    for listed in list_records(where):
        if (record := listed.record) is None:
            continue
        hard = identity(task, record)
        if any(difference.field in ("kernel", "arch") for difference in hard):
            continue
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


def answer(used: Found | None) -> str:
    """Describe the result of `look_up`: the record, its stored values that differ, tile and time;
    or the model."""
    if used is None:
        return "the model: no record"
    record, differs = used.record, [f"{d.field} {d.stored}" for d in used.differences]
    of = f" of {', '.join(differs)}" if differs else ""
    median = record.measurement.median_us
    time = f", {us_text(median)}" if median else ""
    return f"{used.origin} record{of}: {record.config.key}{time}"


def why_lines(task: KernelTask, used: Found | None, nearest: Sequence[Found]) -> Iterator[str]:
    """Format the result of `why` without the record that is used: the path of each record in its
    store, and the fields that differ."""
    others = [entry for entry in nearest if used is None or entry.file != used.file]
    number = len(others) or "no"
    yield f"{task.kernel}: {number} other record{'s' * (len(others) != 1)} on {task.device.arch}"
    for entry in others:
        state = "" if entry.record.is_measured else ", unmeasured"
        yield f"  {entry.origin}{state}  {entry.record.path}"
        yield f"    {joined(entry.differences) or 'an equal match, in a later location'}"


def _examine(location: Location, name: str, data: bytes | TilegenError | None) -> Listed:
    record, reason = None, ""
    try:
        if isinstance(data, TilegenError):
            raise data
        if data is None:
            reason = "disappeared while it was read"
        else:
            record = TuningRecord.from_json(text_of(data))
            if str(record.path) != name != _older_path(record, data):
                reason = f"is never found here; it belongs at {location.address(record.path)!r}"
    except (InvalidRecord, Unreachable) as error:
        reason = one_line(error)
    return Listed(location=location, name=name, record=record, reason=reason)


def _older_path(record: TuningRecord, data: bytes) -> str:
    """Return the path of a record under the notation of its mask that the file has."""
    key = json.loads(data)["problem"]
    return str(path_of_key(record.gpu, record.kernel, key, record.policy))


_WEIGHTS = {  # weight of a difference, by field; other fields weigh 1
    "policy": 100.0,
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
