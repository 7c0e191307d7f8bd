"""Find and save records: this GPU model's, then those of its like; own, shared, shipped."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from tilegen.disk import say_once
from tilegen.errors import InvalidRecord, Unsupported
from tilegen.problem import AttentionProblem
from tilegen.settings import settings
from tilegen.store import places
from tilegen.store.election import conditions, elect, join, no_finding, verdict
from tilegen.store.files import Change, Unreadable, text_of
from tilegen.store.places import Location, Origin, locations
from tilegen.store.reach import Unreachable
from tilegen.store.record import OtherSchema, TuningRecord, bucket_of, record_path
from tilegen.store.versions import Versions, is_credible, second_after
from tilegen.task import KernelTask, Tiled
from tilegen.tuning.measure import POLICY, one_line

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec


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
    file: str
    origin: Origin
    differences: tuple[Difference, ...]
    """Differences from what was asked for. `look_up` gives soft ones, which leave in doubt whether
    the record is still the best; `why` gives all."""
    borrowed: bool = False
    """True: the record is of another GPU of the same architecture."""
    others: tuple[TuningRecord, ...] = ()
    """Findings of other machines, before which `record` stands; `look_up` gives them."""

    def __str__(self) -> str:
        return f"{self.file}, borrowed from {self.record.gpu}" if self.borrowed else self.file


class OtherTilegen(Unsupported):
    """A record of another schema is in the way, and stays."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Outcome of saving a record."""

    file: str
    written: bool
    """True: the file has changed."""
    wins: bool
    """True: a look-up finds this record there now."""
    reason: str


def look_up(
    task: KernelTask,
    *,
    versions: Versions | None = None,
    template_digest: str = "",
    where: Sequence[Location] | None = None,
    borrow: bool | Literal["only"] = True,
    strict: bool = False,
) -> Found | None:
    """Return the record to use for a task; None where there is none, and the model decides.

    The first location with a measured record wins. Without one, unless `borrow` is false, that of
    the nearest GPU of the same architecture does; with `borrow="only"` no other is looked for. What
    cannot be used is passed over with one warning each. With `strict` shared locations are read
    anew, and one that does not answer raises Unreachable.
    """
    asked, gpu = _Asked(task, versions or Versions(), template_digest, strict), task.device
    where = locations() if where is None else where
    best = None if borrow == "only" else next(asked.all(gpu, where), None)
    if best is None and borrow:
        others = (found for other in like(gpu) for found in asked.all(other, where))
        best = next(others, None)
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
    """One look-up: a task, and what a record should have been measured with."""

    task: KernelTask
    versions: Versions
    template_digest: str
    strict: bool

    def all(self, gpu: GpuSpec, where: Sequence[Location]) -> Iterator[Found]:
        """Yield the usable records of `gpu` in the order of locations, for the task's device."""
        task, runs_on = self.task, self.task.device
        path = record_path(gpu.name, task.kernel, bucket_of(task.problem))
        for location in where:
            if (record := self._usable(path, location)) is None:
                continue
            file = location.address(path)
            if wrong := identity(replace(task, device=gpu), record):
                say_once(f"record {file!r} is about something else ({joined(wrong)}); passed over")
                continue
            if not (findings := self._possible(record, file)):
                continue
            record = self._best_of(findings)
            if trouble := illegal(task.tiled(record.config)):
                say_once(f"record {file!r} passed over: {trouble}")
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
                others=tuple(one for one in findings if one is not record),
            )

    def _possible(self, record: TuningRecord, file: str) -> tuple[TuningRecord, ...]:
        """Return the measured part of a record, a winner first."""
        troubles = {one: no_finding(one) for one in record.findings}
        if wrong := next(filter(None, troubles.values()), ""):
            say_once(f"record {file!r}: a finding is passed over: {wrong}")
        left = tuple(one for one in record.findings if not troubles[one])
        return join(left).findings if left and wrong else left

    def _best_of(self, findings: Sequence[TuningRecord]) -> TuningRecord:
        """Return the finding to use, one under the present conditions if there is any."""
        winner, *rivals = findings
        if not rivals or not soft(self.versions, self.template_digest, winner):
            return winner
        alike = [one for one in rivals if not soft(self.versions, self.template_digest, one)]
        return elect(alike) if alike else winner

    def _usable(self, path: PurePosixPath, location: Location) -> TuningRecord | None:
        """Return the record at a place, or None after a warning that names it."""
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
        except (OtherSchema, Unreadable) as error:  # may be in order, so it stays where it is
            say_once(f"record {file!r} passed over: {one_line(error)}")
        except InvalidRecord as error:
            aside = places.set_aside(location, path, lambda data: _parsed(text_of(data)))
            done = f"set aside as {aside!r}" if aside else "passed over"
            say_once(f"record {file!r} {done}: {one_line(error)}")
        return None


def like(gpu: GpuSpec) -> list[GpuSpec]:
    """Return the other GPUs of the catalogue with the same architecture, nearest first: in SMs,
    bandwidth and fast memory."""
    from tilegen.gpus.spec import catalogue

    others = [spec for spec in catalogue() if spec.arch == gpu.arch and spec.name != gpu.name]
    return sorted(others, key=lambda spec: (_far(gpu, spec), spec.name))


def _far(one: GpuSpec, other: GpuSpec) -> float:
    traits = ("num_sms", "dram_bandwidth", "l2_bandwidth", "smem_per_block")
    return sum(abs(math.log2(getattr(one, name) / getattr(other, name))) for name in traits)


def illegal(tiled: Tiled) -> str:
    """Return why a config cannot run on a device; empty if it can, as far as is known."""
    from tilegen.model.footprint import footprint

    needs, device = footprint(tiled), tiled.device
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
    """Join a record with what is in the own directory (or `location`), by the rule of `election`.

    Raises Unsupported when it cannot be written, OtherTilegen when a record of another schema is
    there, InvalidRecord when nothing of it is a finding. With `dry_run` says what would happen;
    with `alone` keeps the winner without its rivals.
    """
    if TuningRecord.from_json(record.to_json()) != record:
        raise InvalidRecord(
            f"a record must read back as it was written; this one does not: {record}"
        )
    location = location or Location(str(settings().cache_dir), "own")
    record = join([record])
    result: tuple[bool, bool, str] | None = None

    def change(data: bytes | None) -> bytes | None:
        nonlocal result
        old = None if data is None else _old(data, record)
        new = join([record] if old is None else [old, record])
        new = new.findings[0] if alone else new
        text = new.to_json().encode()
        if result is None or text != data:  # asked again about its own work, it says the same
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
    """Return a record that was found just now, dated behind what the own directory has of the same
    machine: its clock may have been set back since."""
    own = Location(str(settings().cache_dir), "own")
    with contextlib.suppress(InvalidRecord):
        data = places.peek(own, record.path)
        old = () if data is None else TuningRecord.from_json(text_of(data)).findings
        dates = [one.date for one in old if one.source == record.source and is_credible(one.date)]
        if dates and (last := max(dates)) >= record.date:
            return replace(record, date=second_after(last))
    return record


def _peek(location: Location, path: PurePosixPath, change: Change) -> str:
    """Find out what `change` would do."""
    try:
        change(places.peek(location, path))
    except InvalidRecord as error:
        change(None)
        return f"what is there is no record ({one_line(error)}) and would be kept"
    return ""


def _old(data: bytes, new: TuningRecord) -> TuningRecord:
    """Return the record that is there. Raises InvalidRecord if it is none, or about something else;
    OtherTilegen."""
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
    """Return whether the given record's winner is in front now, and why (not)."""
    if old is None:
        return True, "no record was there"
    winner, mine, was = new.findings[0], given.findings[0], old.findings[0]
    if winner == was:
        wins, why = winner == mine, "nothing new" if winner == mine else verdict(winner, mine)
        return wins, why if wins else f"the one there stays: {why}"
    return winner == mine, verdict(winner, was)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> TuningRecord:
    return TuningRecord.from_json(text)


def identity(task: KernelTask, record: TuningRecord) -> tuple[Difference, ...]:
    """Return the hard differences: with one of them, a record is about something else."""
    pairs = {
        "kernel": (task.kernel, record.kernel),
        "gpu": (task.device.name, record.gpu),
        "arch": (task.device.arch, record.arch),
        "policy": (POLICY, record.policy),
    }
    if (bucket := bucket_of(task.problem)) != record.problem:
        pairs |= {
            field.name: (str(getattr(bucket, field.name)), str(getattr(record.problem, field.name)))
            for field in fields(AttentionProblem)
        }
    return tuple(unequal(pairs))


def soft(current: Versions, template_digest: str, record: TuningRecord) -> tuple[Difference, ...]:
    """Return the soft differences: versions that both sides know and that are not the same."""
    stored = conditions(record)
    known = {
        name: (wanted, stored[name])
        for name in stored
        if (wanted := getattr(current, name, template_digest)) and stored[name]
    }
    return tuple(unequal(known))


def unequal(pairs: dict[str, tuple[str, str]]) -> list[Difference]:
    """Return a difference for each name whose current and stored values are not the same."""
    return [
        Difference(name, current, stored)
        for name, (current, stored) in pairs.items()
        if current != stored
    ]


def joined(differences: Sequence[Difference]) -> str:
    """Return differences as one line."""
    return "; ".join(map(str, differences))
