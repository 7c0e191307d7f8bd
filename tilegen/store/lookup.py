"""Look-up of records, of this GPU model and then of similar models: `look_up`, and `why`, which
explains it."""

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
from tilegen.errors import InvalidRecord
from tilegen.gpus.spec import GpuSpec, catalogue
from tilegen.problem import AttentionProblem
from tilegen.store import places
from tilegen.store.election import conditions, elect, join, why_not_legal, why_not_valid
from tilegen.store.files import Unreadable, text_of
from tilegen.store.listing import list_records
from tilegen.store.places import Location, Owner, locations
from tilegen.store.record import OtherSchema, TuningRecord, bucket_of, older_paths, record_path
from tilegen.store.remote import Unreachable
from tilegen.store.versions import Versions
from tilegen.task import KernelTask
from tilegen.tuning.measure import one_line
from tilegen.tuning.surroundings import UNKNOWN
from tilegen.units import us_text


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

    rows: tuple[Device, ...] = catalogue() if isinstance(device, GpuSpec) else cpus.catalogue()
    others = [spec for spec in rows if spec.arch == device.arch and spec.name != device.name]
    return sorted(others, key=lambda spec: (_far(device, spec), spec.name))


def _far(device: Device, other: Device) -> float:
    is_gpu = isinstance(device, GpuSpec)
    traits = ("num_sms", "dram_bandwidth", "l2_bandwidth", "smem_per_block")
    if not is_gpu:
        traits = ("product_flops_32", "dram_bandwidth", "l3_bandwidth", "l2_bytes", "l1_bytes")
    return sum(abs(math.log2(getattr(device, name) / getattr(other, name))) for name in traits)


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


# --------------------------------------------------------------------------------------------------
# Explanations


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
    around = record.measurement.surroundings
    time += "" if around == UNKNOWN else f", measured {around}"
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
