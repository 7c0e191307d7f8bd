"""Find, save, list and explain records: own directory, extra locations, shipped `cache/`."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tilegen.config import KERNELS, Kernel
from tilegen.disk import say_once
from tilegen.errors import InvalidRecord, Unsupported
from tilegen.measure import one_line
from tilegen.problem import AttentionProblem
from tilegen.resources import data_dir
from tilegen.settings import Settings, settings
from tilegen.store.files import BROKEN, Unreadable, only_writer, read_text, set_aside, write_text
from tilegen.store.record import OtherSchema, TuningRecord, Versions, record_path

if TYPE_CHECKING:
    from tilegen.device import GpuSpec

log = logging.getLogger("tilegen")

Origin = Literal["own", "extra", "shipped"]


@dataclass(frozen=True)
class Location:
    """A folder of records, laid out as cache/README.md says."""

    root: Path
    origin: Origin


@dataclass(frozen=True)
class Difference:
    """A field in which a record is not what was asked for."""

    field: str
    current: str
    stored: str

    def __str__(self) -> str:
        return f"{self.field}: current {self.current}, stored {self.stored}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A record and where it came from."""

    record: TuningRecord
    file: Path
    origin: Origin
    differences: tuple[Difference, ...]
    """From `look_up`: soft ones, which leave its optimality in doubt. From `why`: all of them."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Whether a record was written, and why (not)."""

    file: Path
    written: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One record file; `trouble` says why it is not used, and is empty when it is."""

    file: Path
    origin: Origin
    record: TuningRecord | None
    trouble: str


def locations(current: Settings | None = None) -> tuple[Location, ...]:
    """Return where records are looked for, in order."""
    current = current or settings()
    found = [Location(current.cache_dir, "own")]
    found += [Location(root, "extra") for root in current.cache_path]
    with contextlib.suppress(Unsupported):  # an installation without records has none to offer
        found.append(Location(data_dir("cache"), "shipped"))
    return tuple(found)


def look_up(
    problem: AttentionProblem,
    gpu: GpuSpec,
    kernel: Kernel,
    *,
    versions: Versions | None = None,
    template_digest: str = "",
    where: Sequence[Location] | None = None,
) -> Found | None:
    """Return the record to use for a problem, or None: then ask the model.

    The first location with a measured record wins; a choice nobody has measured is used only when
    no location has better. Files that cannot be used are passed over with one warning each.
    """
    wanted = record_path(gpu.name, kernel, problem)
    best: Found | None = None
    for location in locations() if where is None else where:
        if location.origin == "extra" and not _is_there(location.root):
            continue
        file = location.root / wanted
        record = _usable(file, location)
        if record is None:
            continue
        if wrong := _identity(problem, gpu, kernel, record):
            say_once(f"record {str(file)!r} is about something else ({_join(wrong)}); passed over")
            continue
        found = Found(
            record=record,
            file=file,
            origin=location.origin,
            differences=_soft(versions or Versions(), template_digest, record),
        )
        if record.is_measured:
            best = found
            break
        best = best or found
    if best is not None and best.differences:
        say_once(
            f"record {str(best.file)!r} is used, but may no longer be the best choice "
            f"({_join(best.differences)})"
        )
    return best


def save(record: TuningRecord, *, root: Path | None = None, force: bool = False) -> Saved:
    """Put a record into the own directory (or `root`), unless what is there is better.

    A record nobody measured never replaces a measured one. Of two measured under the same
    conditions the faster stays, unless `force`. Raises Unsupported when it cannot be written.
    """
    text = record.to_json()
    if TuningRecord.from_json(text) != record:
        raise InvalidRecord(
            f"a record must read back as it was written; this one does not: {record}"
        )
    file = (settings().cache_dir if root is None else root) / record.path
    with only_writer(file.parent):
        reason = "no record was there"
        try:
            old = _read(file)
        except InvalidRecord as error:
            aside = set_aside(file)
            kept = f"kept as {aside.name!r}" if aside else "could not be kept"
            old, reason = None, f"what was there was no record ({one_line(error)}) and is {kept}"
        if old is not None:
            written, reason = _compare(old, record, force)
            if not written:
                return Saved(file=file, written=False, reason=reason)
        write_text(file, text)
    return Saved(file=file, written=True, reason=reason)


def why(
    problem: AttentionProblem,
    gpu: GpuSpec,
    kernel: Kernel,
    *,
    versions: Versions | None = None,
    template_digest: str = "",
    where: Sequence[Location] | None = None,
    top: int = 10,
) -> list[Found]:
    """Return records of all locations, nearest to the problem first, each with all differences."""
    found: list[tuple[float, Found]] = []
    for listed in list_records(where):
        if (record := listed.record) is None:
            continue
        identity = _identity(problem, gpu, kernel, record)
        soft = _soft(versions or Versions(), template_digest, record)
        distance = sum(map(_distance, identity)) + 0.01 * len(soft) + 0.1 * (not record.is_measured)
        entry = Found(
            record=record, file=listed.file, origin=listed.origin, differences=(*identity, *soft)
        )
        found.append((distance, entry))
    found.sort(key=lambda pair: pair[0])  # stable: equals stay in the order of the locations
    return [entry for _, entry in found[:top]]


def why_lines(
    problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel, nearest: Sequence[Found]
) -> list[str]:
    """Return the report of `why` for people: one line per record, only what differs."""
    bucket = problem.bucket
    if not nearest:
        return [f"no record of any kind; to make one: tilegen tune '{bucket}' --kernel {kernel}"]
    lines = [f"{kernel} on {gpu.name} for '{bucket}'; {len(nearest)} nearest records:"]
    for entry in nearest:
        state = "" if entry.record.is_measured else ", unmeasured"
        differs = _join(entry.differences) if entry.differences else "this is the one"
        lines.append(f"  {entry.origin}{state}  {str(entry.file)!r}: {differs}")
    return lines


def list_records(where: Sequence[Location] | None = None) -> Iterator[Listed]:
    """Yield every record file of all locations, also those that cannot be used. Changes nothing."""
    for location in locations() if where is None else where:
        for kernel in KERNELS:
            for file in _files(location.root, f"*/{kernel}/*.json"):
                yield _examine(file, location)
            for file in _files(location.root, f"*/{kernel}/*{BROKEN}"):
                trouble = "was broken and set aside; delete it once you have seen it"
                yield Listed(file=file, origin=location.origin, record=None, trouble=trouble)


def _is_there(root: Path) -> bool:
    """Whether an extra location can be used; if not, a warning has named it."""
    try:
        trouble = "" if root.is_dir() else "is not a folder"
    except OSError as error:
        trouble = f"cannot be looked at: {error.strerror}"
    if trouble:
        say_once(f"record location {str(root)!r} {trouble}; passed over")
    return not trouble


def _files(root: Path, pattern: str) -> list[Path]:
    try:
        return sorted(root.glob(pattern))
    except OSError as error:
        say_once(f"record location {str(root)!r} cannot be listed: {error.strerror}")
        return []


def _examine(file: Path, location: Location) -> Listed:
    record, trouble = None, ""
    try:
        record = _read(file)
        if record is None:
            trouble = "disappeared while it was read"
        elif location.root / record.path != file:
            trouble = f"is never found here; it belongs at {str(location.root / record.path)!r}"
    except InvalidRecord as error:
        trouble = one_line(error)
    return Listed(file=file, origin=location.origin, record=record, trouble=trouble)


def _read(file: Path) -> TuningRecord | None:
    """Return the record of a file, None if there is no file. Raises InvalidRecord."""
    text = read_text(file)
    return None if text is None else TuningRecord.from_json(text)


def _usable(file: Path, location: Location) -> TuningRecord | None:
    """Return the record of a file, or None after a warning that names it."""
    try:
        return _read(file)
    except (OtherSchema, Unreadable) as error:  # may be in order, so it stays where it is
        say_once(f"record {str(file)!r} passed over: {one_line(error)}")
    except InvalidRecord as error:
        aside = set_aside(file) if location.origin == "own" else None
        done = f"set aside as {aside.name!r}" if aside else "passed over"
        say_once(f"record {str(file)!r} {done}: {one_line(error)}")
    return None


def _compare(old: TuningRecord, new: TuningRecord, force: bool) -> tuple[bool, str]:
    """Return whether `new` replaces `old`, and why."""
    if old.is_measured and not new.is_measured:
        return False, "the one there was measured, this one was not"
    if force:
        return True, "replaced as told"
    if not old.is_measured:
        return True, "the one there was not measured"
    if differs := _unequal(_software(new.versions, new.template_digest, old)):
        return True, f"the one there was measured with other versions ({_join(differs)})"
    was, now = old.measurement.median_us or 0.0, new.measurement.median_us or 0.0
    if now > was:
        return False, f"the one there is faster ({was:g} us, this one {now:g} us)"
    return True, f"this one is no slower ({now:g} us, the one there {was:g} us)"


def _identity(
    problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel, record: TuningRecord
) -> tuple[Difference, ...]:
    """Return the hard differences: with one of them, a record is about something else."""
    pairs = {
        "kernel": (kernel, record.kernel),
        "gpu": (gpu.name, record.gpu),
        "arch": (gpu.arch, record.arch),
    }
    pairs |= {
        field.name: (
            str(getattr(problem.bucket, field.name)),
            str(getattr(record.problem, field.name)),
        )
        for field in fields(AttentionProblem)
    }
    return tuple(_unequal(pairs))


def _soft(current: Versions, template_digest: str, record: TuningRecord) -> tuple[Difference, ...]:
    """Return the soft differences; what either side does not know is none."""
    differs = _unequal(_software(current, template_digest, record))
    return tuple(d for d in differs if d.current and d.stored)


def _software(
    current: Versions, template_digest: str, record: TuningRecord
) -> dict[str, tuple[str, str]]:
    """Return what a timing may depend on besides the GPU: (current, stored) by name."""
    pairs = {
        field.name: (getattr(current, field.name), getattr(record.versions, field.name))
        for field in fields(Versions)
        if field.name != "tilegen"  # what matters of it is in the template's digest
    }
    return {**pairs, "template_digest": (template_digest, record.template_digest)}


def _unequal(pairs: dict[str, tuple[str, str]]) -> list[Difference]:
    return [
        Difference(name, current, stored)
        for name, (current, stored) in pairs.items()
        if current != stored
    ]


_WEIGHTS = {
    "kernel": 100.0,
    "arch": 40.0,
    "gpu": 10.0,
    "dtype": 8.0,
    "mask": 8.0,
    "head_dim_qk": 6.0,
    "head_dim_v": 6.0,
}


def _distance(difference: Difference) -> float:
    """Return how far a difference takes a record's choice from being a good guess."""
    weight = _WEIGHTS.get(difference.field, 1.0)
    if not (difference.current.isdecimal() and difference.stored.isdecimal()):
        return weight
    return weight * abs(math.log2(int(difference.current) / int(difference.stored)))


def _join(differences: Sequence[Difference]) -> str:
    return "; ".join(map(str, differences))
