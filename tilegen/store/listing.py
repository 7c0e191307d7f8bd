"""Lists of the files of stores, `list_records`; their faults, `check`; removal of useless files,
`prune`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tilegen.disk import printable
from tilegen.errors import InvalidRecord, TilegenError, Unsupported
from tilegen.gpus.spec import catalogue
from tilegen.kernels.registry import KERNELS
from tilegen.store import places
from tilegen.store.election import join, why_not_legal, why_not_valid
from tilegen.store.files import inside, only_writer, text_of
from tilegen.store.places import Location, Owner, locations, pass_over
from tilegen.store.record import OtherSchema, TuningRecord, path_of_key
from tilegen.store.remote import Unreachable
from tilegen.store.trials import MAX_TRIALS_BYTES, of_trials, parse_trial
from tilegen.store.versions import is_credible
from tilegen.task import Tiled
from tilegen.tuning.measure import one_line


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
            records, broken = (places.names(location, what) for what in ("records", "broken"))
        except Unreachable as error:
            if strict:
                raise
            pass_over(location, error)
            continue
        for name, data in places.read_all(location, records):
            yield _examine(location, name, data)
        for name in broken:
            reason = "was broken and set aside; delete it once you have seen it"
            yield Listed(location=location, name=name, record=None, reason=reason)


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


# --------------------------------------------------------------------------------------------------
# Upkeep

TMP_SECONDS = 3600.0
"""Age from which a temporary file must be the leftover of a killed writer [seconds]: a write takes
milliseconds."""
MAX_DAYS = 36_500
"""Upper bound on `older_than_days`."""
COPY_SECONDS = 7 * 24 * 3600.0
"""Age from which copies of remote records are removed [seconds]; a look-up makes them again."""


@dataclass(frozen=True, kw_only=True)
class Noted:
    """A file of a store, or a location, and the fault or the reason for its removal; the reason is
    empty if all is well."""

    file: str
    reason: str


def check(where: Sequence[Location]) -> Iterator[Noted]:
    """Check every file of records and trials; yield each with the reason. Changes nothing."""
    for location in where:
        for listed in list_records([location]):
            reason = listed.reason or (_why_not_right(listed.record) if listed.record else "")
            yield Noted(file=listed.file, reason=reason)
        try:
            names = places.names(location, "trials")
        except Unreachable as error:
            yield Noted(file=location.address(), reason=one_line(error))
            continue
        for name, data in places.read_all(location, names, MAX_TRIALS_BYTES):
            reason = one_line(data) if isinstance(data, TilegenError) else _bad_lines(name, data)
            yield Noted(file=location.address(name), reason=reason)


def _why_not_right(record: TuningRecord) -> str:
    """Describe the first mistake in a readable record; empty if there is none."""
    specs = {spec.name: spec for spec in catalogue()}
    if (spec := specs.get(record.gpu)) is not None:
        if spec.arch != record.arch:
            return f"arch must be {spec.arch}, that of {spec.name}, got {record.arch}"
        for finding in record.findings:
            tiled = Tiled.of(finding.kernel, finding.problem, spec, finding.config)
            if reason := why_not_legal(tiled):
                return reason
    if reasons := list(filter(None, map(why_not_valid, record.findings))):
        return reasons[0]
    dates = [finding.date for finding in record.findings]
    if future := [date for date in dates if not is_credible(date)]:
        return f"date must be at most a day ahead of this machine's clock, got {future[0]}"
    if join([record]) != record:
        return "the winner is not the one its findings elect; merging it with anything repairs it"
    return ""


def _bad_lines(name: str, data: bytes | None) -> str:
    _, kernel = of_trials(name)
    bad: list[str] = []
    for number, line in enumerate((data or b"").splitlines(), start=1):
        try:
            parse_trial(line, kernel)
        except OtherSchema:  # valid for the tilegen that wrote it
            continue
        except InvalidRecord as error:
            bad.append(f"line {number}: {one_line(error)}")
    return f"{len(bad)} lines are not trials, first {bad[0]}" if bad else ""


def prune(
    where: Location,
    *,
    older_than_days: float | None = None,
    unmeasured: bool = False,
    dry_run: bool = False,
) -> list[Noted]:
    """Remove leftovers of killed writers, files set aside, and CPU kernels of other compilers.

    In the local cache, old copies of remote records are removed too. `older_than_days` adds records
    that are older, `unmeasured` adds records without a measurement. `dry_run` removes nothing.
    Return the removed files. Raises Unsupported.
    """
    from tilegen.cpu.objects import is_stale  # look-ups load this module

    folder = where.folder
    if folder is None:
        raise Unsupported(f"expected a folder to prune, got {where.address()!r}")
    limit = None
    if older_than_days is not None:
        if not 0 <= older_than_days <= MAX_DAYS:
            raise Unsupported(f"days must be 0..{MAX_DAYS}, got {older_than_days:g}")
        oldest = datetime.now(UTC) - timedelta(days=older_than_days)
        limit = oldest.strftime("%Y-%m-%dT%H:%M:%SZ")
    # Match only names that tilegen writes: the folder may hold other files.
    folders = [f"{parent}*/{kernel}/" for parent in ("", "trials/") for kernel in KERNELS]
    reasons = {
        file: "left by a writer that was killed"
        for parent in (*folders, "kernels/**/", "remote/**/")
        for file in _old(folder, f"{parent}.*.tmp", TMP_SECONDS)
    }
    if where.origin == "own":
        copies = _old(folder, "remote/**/*", COPY_SECONDS)
        reasons |= dict.fromkeys(copies, "copy of a remote record")
    objects = _old(folder, "kernels/*/*.o", 0)
    reasons |= {file: "made by another compiler" for file in objects if is_stale(file)}
    records: dict[Path, Listed] = {}
    for listed in list_records([where]):
        if reason := _useless(listed, limit, unmeasured):
            reasons[file := folder / listed.name] = reason
            if listed.record is not None:
                records[file] = listed
    return [
        Noted(file=printable(str(file)), reason=reason)
        for file, reason in sorted(reasons.items())
        if _is_inside(folder, file) and (dry_run or _remove(file, records.get(file)))
    ]


def _remove(file: Path, listed: Listed | None) -> bool:
    """Remove a file; return True if it was removed. A record that changed since it was listed
    stays: it may have been improved."""
    try:
        if listed is None:
            file.unlink(missing_ok=True)
            return True
        with only_writer(file.parent):
            ((name, data),) = places.read_all(listed.location, [listed.name])
            is_same = _examine(listed.location, name, data).record == listed.record
            if is_same:
                file.unlink()
            return is_same
    except OSError as error:
        raise Unsupported(f"cannot remove {str(file)!r}: {error.strerror}") from error


def _is_inside(folder: Path, file: Path) -> bool:
    """Return False if a symbolic link below the folder leads to the file."""
    try:
        return inside(folder, file.relative_to(folder)) == file
    except Unsupported:
        return False


def _useless(listed: Listed, limit: str | None, unmeasured: bool) -> str:
    if (record := listed.record) is None:
        return "was set aside" if listed.name.endswith(".broken") else ""
    if unmeasured and not any(finding.is_measured for finding in record.findings):
        return "nobody has measured it"
    if limit is not None and all(finding.date < limit for finding in record.findings):
        return f"of {record.date}"
    return ""


def _old(folder: Path, pattern: str, seconds: float) -> list[Path]:
    now = time.time()
    try:
        return [
            file
            for file in sorted(folder.glob(pattern))
            if file.is_file() and now - file.lstat().st_mtime > seconds
        ]
    except OSError as error:
        raise Unsupported(f"cannot list {str(folder)!r}: {error.strerror}") from error
