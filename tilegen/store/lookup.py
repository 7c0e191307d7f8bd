"""Look-up of records, of this GPU model and then of similar models; and saving of records."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Literal

from tilegen.device import Device
from tilegen.disk import say_once
from tilegen.environment import current
from tilegen.errors import InvalidRecord, Unsupported
from tilegen.gpus import spec as gpus
from tilegen.gpus.spec import GpuSpec
from tilegen.problem import AttentionProblem
from tilegen.store import places
from tilegen.store.election import conditions, elect, join, verdict, why_not_valid
from tilegen.store.files import Change, Unreadable, text_of
from tilegen.store.forms import OtherSchema
from tilegen.store.places import Location, Owner, locations
from tilegen.store.reach import Unreachable
from tilegen.store.record import TuningRecord, bucket_of, older_paths, record_path
from tilegen.store.versions import Versions, is_credible, second_after
from tilegen.task import KernelTask, Tiled
from tilegen.tuning.measure import one_line


@dataclass(frozen=True)
class Difference:
    """A field in which a record differs from the task."""

    field: str
    current: str
    stored: str

    def __str__(self) -> str:
        return f"{self.field}: current {self.current}, stored {self.stored}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A record and its origin."""

    record: TuningRecord
    file: str
    origin: Owner
    differences: tuple[Difference, ...]
    """Differences from the task. `why` lists all. `look_up` lists soft differences, which leave in
    doubt whether the record is still the best, and the GPU of a borrowed record."""
    borrowed: bool = False
    """True if the record is of another GPU model; from `look_up`, of the same architecture."""
    others: tuple[TuningRecord, ...] = ()
    """The other findings of the record's file; only `look_up` lists them."""

    def __str__(self) -> str:
        return f"{self.file}, borrowed from {self.record.gpu}" if self.borrowed else self.file


class OtherTilegen(Unsupported):
    """A record that another tilegen wrote; saving never replaces it."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Outcome of saving a record."""

    file: str
    written: bool
    """True if the file changed, or would change without `dry_run`."""
    wins: bool
    """True if the saved record is now the winner of its file."""
    reason: str
    """Why the record wins or not, or a note on an invalid file that was there."""


def look_up(
    task: KernelTask,
    *,
    versions: Versions | None = None,
    template_digest: str = "",
    where: Sequence[Location] | None = None,
    borrow: bool | Literal["only"] = True,
    strict: bool = False,
) -> Found | None:
    """Look up the record to use for a task; None if there is no usable record.

    The first location with a measured record wins. If there is none, the record of the nearest GPU
    of the same architecture is borrowed, unless `borrow` is False; `borrow="only"` skips the task's
    own GPU model. Unusable records are skipped with one warning each. With `strict`, shared
    locations are read afresh, and a location that does not answer raises Unreachable.
    """
    request, gpu = _Asked(task, versions or Versions(), template_digest, strict), task.device
    where = locations() if where is None else where
    best = None if borrow == "only" else next(request.all(gpu, where), None)
    if best is None and borrow:
        borrowable = (
            record for other in similar_devices(gpu) for record in request.all(other, where)
        )
        best = next(borrowable, None)
    if best is not None and best.borrowed:
        say_once(f"no measured record for {gpu.name}: record {best.file!r} is borrowed")
    elif best is not None and best.differences:
        say_once(
            f"record {best.file!r} is used, but may no longer be the best choice "
            f"({joined(best.differences)})"
        )
    return best


@dataclass(frozen=True)
class _Asked:
    """A look-up: a task, with the versions and template that its record should match."""

    task: KernelTask
    versions: Versions
    template_digest: str
    strict: bool

    def all(self, gpu: Device, where: Sequence[Location]) -> Iterator[Found]:
        """Yield the usable records of `gpu`, in the order of locations, for the task's device."""
        task, runs_on = self.task, self.task.device
        bucket = bucket_of(task.problem)
        of = gpu.name, task.kernel, bucket, gpu.policy
        for location in where:
            # At URLs each file costs a request: `cache merge` moves older records there.
            older = older_paths(*of) if location.folder else ()
            usable = {
                path: record
                for path in (record_path(*of), *older)
                if (record := self._usable(path, location)) is not None
            }
            if not usable:
                continue
            file = location.address(next(iter(usable)))
            record = join(usable.values()) if len(usable) > 1 else next(iter(usable.values()))
            if hard := identity(replace(task, device=gpu), record):
                say_once(f"record {file!r} is about something else ({joined(hard)}); skipped")
                continue
            if not (findings := self._possible(record, file)):
                continue
            record = self._best_of(findings)
            if reason := why_not_legal(task.tiled(record.config)):
                say_once(f"record {file!r} skipped: {reason}")
                continue
            borrowed = gpu is not runs_on
            pairs = {"gpu": (runs_on.name, gpu.name)} if borrowed else {}
            yield Found(
                record=record,
                file=file,
                origin=location.origin,
                differences=(
                    *unequal(pairs),
                    *soft(self.versions, self.template_digest, record),
                ),
                borrowed=borrowed,
                others=tuple(finding for finding in findings if finding is not record),
            )

    def _possible(self, record: TuningRecord, file: str) -> tuple[TuningRecord, ...]:
        """Return the valid findings of a record, the winner first; log an invalid finding."""
        reasons = {finding: why_not_valid(finding) for finding in record.findings}
        if reason := next(filter(None, reasons.values()), ""):
            say_once(f"record {file!r}: a finding is skipped: {reason}")
        valid = tuple(finding for finding in record.findings if not reasons[finding])
        return join(valid).findings if valid and reason else valid

    def _best_of(self, findings: Sequence[TuningRecord]) -> TuningRecord:
        """Choose the winner, or a rival if only rivals match the present versions and template."""
        winner, *rivals = findings
        if not rivals or not soft(self.versions, self.template_digest, winner):
            return winner
        current = [
            rival for rival in rivals if not soft(self.versions, self.template_digest, rival)
        ]
        return elect(current) if current else winner

    def _usable(self, path: PurePosixPath, location: Location) -> TuningRecord | None:
        """Read the record of a location; None if it is missing, or unusable and logged."""
        file = location.address(path)
        try:
            data = places.read(location, path, fresh=self.strict)
            return None if data is None else _parsed(text_of(data))
        except Unreachable as error:
            if self.strict:
                raise Unreachable(
                    f"expected record location {location.address()!r} to answer, since all ranks "
                    f"must choose alike; it {error}"
                ) from None
            places.pass_over(location, error)
        except (OtherSchema, Unreadable) as error:  # may be valid, so it is not set aside
            say_once(f"record {file!r} skipped: {one_line(error)}")
        except InvalidRecord as error:
            aside = places.set_aside(location, path, _check)
            done = f"set aside as {aside!r}" if aside else "skipped"
            say_once(f"record {file!r} {done}: {one_line(error)}")
        return None


def _check(data: bytes) -> None:
    """Raise InvalidRecord unless this or another tilegen can read a record."""
    with contextlib.suppress(OtherSchema):
        _parsed(text_of(data))


def similar_devices(device: Device) -> list[Device]:
    """List the catalogue's other devices of the same architecture, nearest first: GPUs by number of
    SMs, bandwidths of DRAM and L2, and shared memory, processors by rates and caches."""
    from tilegen.cpus import spec as cpus

    rows: tuple[Device, ...] = gpus.catalogue() if isinstance(device, GpuSpec) else cpus.catalogue()
    others = [spec for spec in rows if spec.arch == device.arch and spec.name != device.name]
    return sorted(others, key=lambda spec: (_far(device, spec), spec.name))


def _far(device: Device, other: Device) -> float:
    is_gpu = isinstance(device, GpuSpec)
    traits = ("num_sms", "dram_bandwidth", "l2_bandwidth", "smem_per_block")
    if not is_gpu:
        traits = ("product_flops_32", "dram_bandwidth", "l3_bandwidth", "l2_bytes", "l1_bytes")
    return sum(abs(math.log2(getattr(device, name) / getattr(other, name))) for name in traits)


def why_not_legal(tiled: Tiled) -> str:
    """Explain why a config cannot run on a device; empty if no reason is known."""
    if not isinstance(tiled.device, GpuSpec):
        return ""
    from tilegen.model.footprint import footprint

    needs, device = footprint(tiled), tiled.gpu
    if needs.may_fit(device):
        return ""
    return (
        f"{tiled.config.key} needs {needs.smem_bytes} bytes of shared memory for "
        f"'{tiled.problem.bucket}', and {device.name} has {device.smem_per_block}"
    )


def save(
    record: TuningRecord,
    *,
    location: Location | None = None,
    dry_run: bool = False,
    alone: bool = False,
) -> Saved:
    """Join a record with the record in the local cache (or `location`), by the rule of `election`.

    `dry_run` writes nothing and reports the outcome; `alone` stores the winner without its rivals.
    Raises Unsupported if the file cannot be written, OtherTilegen if another tilegen wrote it, and
    InvalidRecord if the record has no valid finding.
    """
    if TuningRecord.from_json(record.to_json()) != record:
        raise InvalidRecord(
            f"a record must read back as it was written; this one does not: {record}"
        )
    location = location or Location(str(current().cache_dir), "own")
    record = join([record])
    result: tuple[bool, bool, str] | None = None

    def change(data: bytes | None) -> bytes | None:
        nonlocal result
        old = None if data is None else _old(data, record)
        new = join([record] if old is None else [old, record])
        new = new.findings[0] if alone else new
        text = new.to_json().encode()
        # A remote update calls again after its own write, and the first outcome is to be kept.
        if result is None or text != data:
            result = (text != data, *_outcome(record, new, old))
        return None if text == data else text

    if dry_run:
        note = _peek(location, record.path, change)
    else:
        note = places.update(location, record.path, change)
    written, wins, reason = result or (False, False, "")
    return Saved(
        file=location.address(record.path), written=written, wins=wins, reason=note or reason
    )


def dated(record: TuningRecord) -> TuningRecord:
    """Date a new record after all findings of the same machine in the local cache: the machine's
    clock may have been set back since."""
    own = Location(str(current().cache_dir), "own")
    with contextlib.suppress(InvalidRecord):
        data = places.peek(own, record.path)
        old = () if data is None else TuningRecord.from_json(text_of(data)).findings
        earlier = [finding.date for finding in old if finding.source == record.source]
        dates = [date for date in earlier if is_credible(date)]
        if dates and (last := max(dates)) >= record.date:
            return replace(record, date=second_after(last))
    return record


def _peek(location: Location, path: PurePosixPath, change: Change) -> str:
    """Call `change` without writing its result; return a note on an invalid file."""
    try:
        change(places.peek(location, path))
    except InvalidRecord as error:
        change(None)
        return f"the existing file is not a record ({one_line(error)}) and would be kept"
    return ""


def _old(data: bytes, new: TuningRecord) -> TuningRecord:
    """Parse the record that `new` is to be joined with. Raises InvalidRecord if it is invalid or
    has another key; OtherTilegen."""
    try:
        old = TuningRecord.from_json(text_of(data))
    except OtherSchema as error:
        raise OtherTilegen(
            f"expected a record this tilegen can read at {str(new.path)!r}: {error}; "
            "use the tilegen that wrote it, or another location"
        ) from None
    if old.key != new.key:
        raise InvalidRecord(f"expected a record about {new.key}, found one about {old.key}")
    return old


def _outcome(given: TuningRecord, new: TuningRecord, old: TuningRecord | None) -> tuple[bool, str]:
    """Check whether the winner of `given` is that of `new`; return the answer and a reason."""
    if old is None:
        return True, "there was no record"
    winner, mine, was = new.findings[0], given.findings[0], old.findings[0]
    if winner == was:
        wins, why = winner == mine, "nothing new" if winner == mine else verdict(winner, mine)
        return wins, why if wins else f"the existing record stays: {why}"
    return winner == mine, verdict(winner, was)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> TuningRecord:
    return TuningRecord.from_json(text)


def identity(task: KernelTask, record: TuningRecord) -> tuple[Difference, ...]:
    """Return the hard differences: any of them means that the record is about another task."""
    pairs = {
        "kernel": (task.kernel, record.kernel),
        "gpu": (task.device.name, record.gpu),
        "arch": (task.device.arch, record.arch),
        "policy": (task.device.policy, record.policy),
    }
    if (bucket := bucket_of(task.problem)) != record.problem:
        pairs |= {
            field.name: (str(getattr(bucket, field.name)), str(getattr(record.problem, field.name)))
            for field in fields(AttentionProblem)
        }
    return tuple(unequal(pairs))


def soft(current: Versions, template_digest: str, record: TuningRecord) -> tuple[Difference, ...]:
    """Return the soft differences: in the versions and template that both sides know."""
    stored = conditions(record)
    known = {
        # Versions has no template digest, so the default applies to that name alone.
        name: (wanted, stored[name])
        for name in stored
        if (wanted := getattr(current, name, template_digest)) and stored[name]
    }
    return tuple(unequal(known))


def unequal(pairs: dict[str, tuple[str, str]]) -> list[Difference]:
    """Return a Difference for each name whose current and stored values differ."""
    return [
        Difference(name, current, stored)
        for name, (current, stored) in pairs.items()
        if current != stored
    ]


def joined(differences: Sequence[Difference]) -> str:
    """Join differences into one line."""
    return "; ".join(map(str, differences))
