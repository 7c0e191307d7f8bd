"""Upkeep of stores: `check` names what is wrong in them, `prune` removes what is of no use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tilegen.cpu.objects import is_stale
from tilegen.disk import printable
from tilegen.errors import InvalidRecord, TilegenError, Unsupported
from tilegen.gpus.spec import catalogue
from tilegen.kernels.registry import KERNELS
from tilegen.store import places
from tilegen.store.election import join, no_finding
from tilegen.store.files import inside, only_writer, text_of
from tilegen.store.listing import Listed, list_records
from tilegen.store.lookup import illegal
from tilegen.store.places import Location
from tilegen.store.reach import Unreachable
from tilegen.store.record import OtherSchema, TuningRecord
from tilegen.store.trials import MAX_TRIALS_BYTES, of_trials, parse_trial
from tilegen.store.versions import is_credible
from tilegen.task import Tiled
from tilegen.tuning.measure import one_line

TMP_SECONDS = 3600.0
"""Age at which a temporary file was left by a writer that was killed [seconds]: a write takes
milliseconds."""
MAX_DAYS = 36_500
"""Largest age of records that can be asked for [days]."""
COPY_SECONDS = 7 * 24 * 3600.0
"""Age at which a copy of a remote record is removed [seconds]; a look-up makes it again."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One file of a store; `trouble` is empty if it is in order."""

    file: str
    trouble: str


def check(where: Sequence[Location]) -> Iterator[Checked]:
    """Yield every file of records and trials with what is wrong with it. Changes nothing."""
    for location in where:
        for listed in list_records([location]):
            trouble = listed.trouble or (_trouble(listed.record) if listed.record else "")
            yield Checked(file=listed.file, trouble=trouble)
        try:
            names = places.names(location, "trials")
        except Unreachable as error:
            yield Checked(file=location.address(), trouble=one_line(error))
            continue
        for name, data in places.read_all(location, names, MAX_TRIALS_BYTES):
            trouble = one_line(data) if isinstance(data, TilegenError) else _bad_lines(name, data)
            yield Checked(file=location.address(name), trouble=trouble)


def _trouble(record: TuningRecord) -> str:
    """Describe a mistake in a record that can be read; empty if there is none."""
    specs = {spec.name: spec for spec in catalogue()}
    if (spec := specs.get(record.gpu)) is not None:
        if spec.arch != record.arch:
            return f"arch must be {spec.arch}, that of {spec.name}, got {record.arch}"
        for one in record.findings:
            if trouble := illegal(Tiled.of(one.kernel, one.problem, spec, one.config)):
                return trouble
    if wrong := list(filter(None, map(no_finding, record.findings))):
        return wrong[0]
    if wrong := [one.date for one in record.findings if not is_credible(one.date)]:
        return f"date must be at most a day ahead of this machine's clock, got {wrong[0]}"
    if join([record]) != record:
        return "the winner is not the one its findings elect; merging it with anything repairs it"
    return ""


def _bad_lines(name: str, data: bytes | None) -> str:
    _, kernel = of_trials(name)
    bad: list[str] = []
    for number, line in enumerate((data or b"").splitlines(), start=1):
        try:
            parse_trial(line, kernel)
        except OtherSchema:  # in order for its own tilegen
            continue
        except InvalidRecord as error:
            bad.append(f"line {number}: {one_line(error)}")
    return f"{len(bad)} lines are no trials, first {bad[0]}" if bad else ""


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """A file that was removed, and why."""

    file: str
    reason: str


def prune(
    where: Location,
    *,
    older_than_days: float | None = None,
    unmeasured: bool = False,
    dry_run: bool = False,
) -> list[Pruned]:
    """Remove from a folder what killed writers left, what was set aside, and compiled kernels of
    other compilers; from the own directory old copies of remote records too; if told to, old or
    unmeasured records. Raises Unsupported."""
    folder = where.folder
    if folder is None:
        raise Unsupported(f"expected a folder to prune, got {where.address()!r}")
    limit = None
    if older_than_days is not None:
        if not 0 <= older_than_days <= MAX_DAYS:
            raise Unsupported(f"days must be 0..{MAX_DAYS}, got {older_than_days:g}")
        oldest = datetime.now(UTC) - timedelta(days=older_than_days)
        limit = oldest.strftime("%Y-%m-%dT%H:%M:%SZ")
    # Nothing but what tilegen writes, wherever it is called.
    folders = [f"{parent}*/{kernel}/" for parent in ("", "trials/") for kernel in KERNELS]
    found = {
        file: "left by a writer that was killed"
        for parent in (*folders, "kernels/**/", "remote/**/")
        for file in _old(folder, f"{parent}.*.tmp", TMP_SECONDS)
    }
    if where.origin == "own":
        copies = _old(folder, "remote/**/*", COPY_SECONDS)
        found |= dict.fromkeys(copies, "copy of a remote record")
    objects = _old(folder, "kernels/*/*.o", 0)
    found |= {file: "made by another compiler" for file in objects if is_stale(file)}
    records: dict[Path, Listed] = {}
    for listed in list_records([where]):
        if reason := _useless(listed, limit, unmeasured):
            found[file := folder / listed.name] = reason
            if listed.record is not None:
                records[file] = listed
    found = {file: reason for file, reason in found.items() if _is_inside(folder, file)}
    return [
        Pruned(file=printable(str(file)), reason=reason)
        for file, reason in sorted(found.items())
        if dry_run or _remove(file, records.get(file))
    ]


def _remove(file: Path, listed: Listed | None) -> bool:
    """Remove a file, a record's only as it was listed: somebody may have found better since."""
    try:
        if listed is None:
            file.unlink(missing_ok=True)
            return True
        with only_writer(file.parent):
            is_same = _record_of(listed) == listed.record
            if is_same:
                file.unlink()
            return is_same
    except OSError as error:
        raise Unsupported(f"cannot remove {str(file)!r}: {error.strerror}") from error


def _record_of(listed: Listed) -> TuningRecord | None:
    """Return the record that lies there now, None if it cannot be read."""
    with contextlib.suppress(InvalidRecord, Unreachable):
        if (data := places.peek(listed.location, listed.name)) is not None:
            return TuningRecord.from_json(text_of(data))
    return None


def _is_inside(folder: Path, file: Path) -> bool:
    """True for a file below the folder itself, False for one that a link leads to."""
    try:
        return inside(folder, file.relative_to(folder)) == file
    except Unsupported:
        return False


def _useless(listed: Listed, limit: str | None, unmeasured: bool) -> str:
    if (record := listed.record) is None:
        return "was set aside" if listed.name.endswith(".broken") else ""
    if unmeasured and not any(one.is_measured for one in record.findings):
        return "nobody has measured it"
    if limit is not None and all(one.date < limit for one in record.findings):
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
