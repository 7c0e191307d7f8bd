"""Moves of records and trials between stores. Each is a join by the rule of `election`, so
repeating it changes nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tilegen.disk import write_whole
from tilegen.errors import InvalidRecord, TilegenError, Unsupported
from tilegen.kernels.config import Kernel
from tilegen.store import places
from tilegen.store.election import OtherTilegen, join, save, why_not_valid
from tilegen.store.fields import parse_json
from tilegen.store.files import text_of
from tilegen.store.listing import list_records
from tilegen.store.places import Location
from tilegen.store.record import GPU, KERNEL, OtherSchema, TuningRecord, problem_of, slug
from tilegen.store.remote import Unreachable
from tilegen.store.trials import (
    MAX_TRIALS_BYTES,
    Entry,
    conditions_of,
    join_trials,
    of_trials,
    trials_path,
)
from tilegen.tuning.measure import one_line

EXPORT = 1
"""Version of the files that `export` writes."""
TRIALS_OF_A_LINE = 10_000
"""Maximum number of trials in a line of an export, about 6 MB; `import_` accepts 64 MiB."""

Action = Literal["added", "changed", "same", "refused"]


@dataclass(frozen=True, kw_only=True)
class Transferred:
    """Outcome of joining one file of records or trials."""

    file: str
    action: Action
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.action:8} {self.file}" + (f": {self.reason}" if self.reason else "")


def _refused(file: str, reason: str) -> Transferred:
    return Transferred(file=file, action="refused", reason=reason)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A selection of records by GPU and kernel; None selects all."""

    gpu: str | None = None
    kernel: Kernel | None = None

    def has(self, gpu: str, kernel: str) -> bool:
        """Return True if a GPU, as spelt in paths, and a kernel are selected."""
        return (self.gpu is None or slug(self.gpu) == gpu) and self.kernel in (None, kernel)


ALL = Selection()


def merge(
    sources: Sequence[Location], target: Location, *, wanted: Selection = ALL, dry_run: bool = False
) -> Iterator[Transferred]:
    """Join the records and trials of `sources` into `target`; yield the outcome of each file.

    The result does not depend on the order of the sources. Raises Unsupported if the target cannot
    be written. Raises Unreachable if the target does not answer, and at the end if a source did
    not.
    """
    places.check_writable(target)
    unreachable: list[str] = []
    for source in sources:
        try:
            listing = list(list_records([source], strict=True))
        except Unreachable as error:
            unreachable.append(f"{source.address()!r} {error}")
            continue
        for listed in listing:
            if (record := listed.record) is None or listed.reason:
                yield _refused(listed.file, listed.reason)
            elif wanted.has(slug(record.gpu), record.kernel):
                yield put(record, target, dry_run=dry_run)
        for name, data in _trials(source, wanted):
            if isinstance(data, TilegenError):
                yield _refused(source.address(name), one_line(data))
            else:
                yield put_trials(name, [data], target, dry_run=dry_run)
    if unreachable:
        raise Unreachable(
            f"expected all sources to answer; {'; '.join(unreachable)}; try again later"
        )


def put(
    record: TuningRecord, target: Location, *, dry_run: bool = False, alone: bool = False
) -> Transferred:
    """Join a record into `target`; `alone` stores the winner without its rivals."""
    try:
        saved = save(record, location=target, dry_run=dry_run, alone=alone)
    except (OtherTilegen, InvalidRecord) as error:
        return _refused(target.address(record.path), one_line(error))
    action: Action = "changed" if saved.written else "same"
    if saved.written and saved.reason == "there was no record":
        action = "added"
    return Transferred(file=saved.file, action=action, reason=saved.reason)


def put_trials(
    name: str, contents: Sequence[bytes], target: Location, *, dry_run: bool = False
) -> Transferred:
    """Join lines of trials into the file `name` of `target`."""
    _, kernel = of_trials(name)
    before, after = b"", b""
    known: dict[bytes, Entry | None] = {}

    def change(old: bytes | None) -> bytes | None:
        nonlocal before, after
        joined = join_trials([old or b"", *contents], kernel, known)
        if joined == (old or b""):  # nothing new, or called again after its own write
            return None
        before, after = old or b"", joined
        return joined

    # Parse all lines into `known` before taking the lock, so that the lock is held only briefly.
    places.update(target, name, change, MAX_TRIALS_BYTES, dry_run=True)
    if not dry_run and after != before:
        places.update(target, name, change, MAX_TRIALS_BYTES)
    new = after.count(b"\n") - before.count(b"\n")
    action: Action = "same" if after == before else "changed" if before else "added"
    return Transferred(file=target.address(name), action=action, reason=f"{max(0, new)} new trials")


def promote(
    sources: Sequence[Location], target: Location, *, wanted: Selection = ALL, dry_run: bool = False
) -> Iterator[Transferred]:
    """Join the winners of `sources`, without rivals, into the folder that ships with the package;
    yield the outcome of each. Unmeasured winners are refused."""
    for listed in list_records(sources):
        record = listed.record
        if record is None or listed.reason or not wanted.has(slug(record.gpu), record.kernel):
            continue
        yield put(record, target, dry_run=dry_run, alone=True)


def export(
    sources: Sequence[Location], file: Path, *, wanted: Selection = ALL, dry_run: bool = False
) -> list[Transferred]:
    """Write the records and trials of `sources` to one file; return the outcome of each file.

    Each line is a JSON object: a header, then the records, then trials in groups of at most
    `TRIALS_OF_A_LINE`.
    """
    records: dict[str, TuningRecord] = {}
    moved: list[Transferred] = []
    for listed in list_records(sources):
        record = listed.record
        if reason := listed.reason or (why_not_valid(record) if record else ""):
            moved.append(_refused(listed.file, reason))
        elif record and wanted.has(slug(record.gpu), record.kernel):
            known = records.setdefault(listed.name, record)
            if known.key != record.key:
                reason = f"another location has one about {known.key} at its place"
                moved.append(_refused(listed.file, reason))
                continue
            records[listed.name] = join([known, record])
            moved.append(Transferred(file=listed.file, action="added"))
    lines: list[Any] = [{"record": json.loads(records[name].to_json())} for name in sorted(records)]
    for source in sources:
        for name, data in _trials(source, wanted):
            try:
                entries = _exports_of(name, data)
            except TilegenError as error:
                moved.append(_refused(source.address(name), one_line(error)))
                continue
            if entries:
                lines += entries
                moved.append(Transferred(file=source.address(name), action="added"))
    lines.insert(0, {"tilegen_export": EXPORT, "lines": len(lines) + 1})
    if not dry_run:
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        write_whole(file, text.encode())
    return moved


def import_(file: Path, target: Location, *, dry_run: bool = False) -> Iterator[Transferred]:
    """Join a file that `export` wrote into `target`; yield the outcomes. Broken lines are refused.

    Raises Unsupported if `export` did not write the file, and at the end if lines are missing.
    """
    number, expected, is_torn = 0, 1, False
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(_lines(lines), start=1):
                try:
                    if number == 1:
                        expected = _lines_of_export(line)
                    else:
                        yield from _import_line(line, target, dry_run)
                except InvalidRecord as error:
                    if number == 1:
                        raise Unsupported(
                            f"expected a file that tilegen cache export wrote, got {str(file)!r}: "
                            f"{error}"
                        ) from None
                    is_torn = not line.endswith(b"\n")
                    yield _refused(f"{file}, line {number}", one_line(error))
    except OSError as error:
        raise Unsupported(f"cannot read {str(file)!r}: {error.strerror}") from error
    if number < expected or is_torn:
        raise Unsupported(
            f"expected a whole file that tilegen cache export wrote, got {str(file)!r}, which "
            f"ends in line {number} of {max(number, expected)}; export it again"
        )


def _lines_of_export(line: bytes) -> int:
    """Parse the number of lines from the first line; 1 for exports from before 2026-11-24."""
    fields = parse_json(text_of(line))
    fields.integer("tilegen_export", EXPORT, EXPORT)
    return fields.integer("lines", 1, 2**40) if "lines" in fields.values else 1


def _lines(file: Any) -> Iterator[bytes]:
    while line := file.readline(MAX_TRIALS_BYTES):
        yield line


def _import_line(line: bytes, target: Location, dry_run: bool) -> Iterator[Transferred]:
    fields = parse_json(text_of(line))
    if "record" in fields.values:
        record = TuningRecord.from_json(json.dumps(fields.group("record").values))
        yield put(record, target, dry_run=dry_run)
    else:
        gpu, kernel = GPU.read(fields, "gpu"), KERNEL.read(fields, "kernel")
        name = str(trials_path(gpu, kernel, problem_of(fields)))
        trials = fields.groups("trials", MAX_TRIALS_BYTES)
        contents = [json.dumps(trial.values).encode() for trial in trials]
        yield put_trials(name, contents, target, dry_run=dry_run)


def _exports_of(name: str, data: bytes | TilegenError) -> list[dict[str, Any]]:
    """Convert a file of trials to lines of an export, of at most TRIALS_OF_A_LINE trials each.

    Raises the error of reading the file, and OtherSchema if no line names a problem.
    """
    if isinstance(data, TilegenError):
        raise data
    gpu, kernel = of_trials(name)
    joined = join_trials([data], kernel).splitlines()
    if not joined:
        return []
    problem = _problem_of(joined)
    trials = [json.loads(line) for line in joined]
    parts = [trials[at : at + TRIALS_OF_A_LINE] for at in range(0, len(trials), TRIALS_OF_A_LINE)]
    return [{"gpu": gpu, "kernel": kernel, "problem": problem, "trials": part} for part in parts]


def _problem_of(lines: Sequence[bytes]) -> str:
    """Parse the problem of a file of trials from the first line with readable conditions. Raises
    OtherSchema."""
    for line in lines:
        with contextlib.suppress(InvalidRecord):
            return conditions_of(parse_json(text_of(line))).problem
    raise OtherSchema("a newer tilegen wrote all lines; use the tilegen that wrote them")


def _trials(source: Location, wanted: Selection) -> Iterator[tuple[str, bytes | TilegenError]]:
    """Yield the name of each selected file of trials, with its content or the error of reading."""
    try:
        names = places.names(source, "trials")
    except Unreachable:  # reported when the location's records were listed
        return
    chosen = [name for name in names if wanted.has(*of_trials(name))]
    for name, data in places.read_all(source, chosen, MAX_TRIALS_BYTES):
        if data is not None:
            yield name, data


def summary(moved: Iterable[Transferred]) -> str:
    """Count the files by action, in a line: added, changed, same, refused."""
    counts = dict.fromkeys(("added", "changed", "same", "refused"), 0)
    for outcome in moved:
        counts[outcome.action] += 1
    return ", ".join(f"{count} {action}" for action, count in counts.items())
