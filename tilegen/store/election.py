"""Election of a winner among the findings for one key, and the join of records by that election:
`join`, and `save`, which joins a record into a location.

cache/README.md explains the rule to users:

1. Of each machine only the latest finding counts.
2. Findings measured with the newest versions precede all others. Version numbers decide, not
   clocks; dates decide only between templates of equal versions.
3. Of these, findings measured in quiet precede those beside other processes, throttled, or in
   unknown surroundings.
4. Of these the fastest wins. Medians that tie with the fastest are equal measurements: then the
   config that most machines measured wins, then the first in the order of configs. A measurement
   counts once, however many machines wrote it down.

A date more than a day ahead comes from a wrong clock: such a finding counts as the oldest, but its
measurement counts like any other.

A joined record keeps its findings as rivals. So joins are commutative, associative and idempotent:
stores may be merged in any order and any number of times.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

from tilegen.environment import current
from tilegen.errors import InvalidRecord, Unsupported
from tilegen.gpus.spec import GpuSpec, catalogue
from tilegen.kernels.config import Dim, Kernel
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem
from tilegen.store import places
from tilegen.store.files import text_of
from tilegen.store.places import Location
from tilegen.store.record import MAX_RIVALS, OtherSchema, TuningRecord
from tilegen.store.versions import is_credible, release_order, second_after
from tilegen.task import Tiled
from tilegen.tuning.measure import Measurement, tie_limit
from tilegen.tuning.surroundings import UNKNOWN, Surroundings
from tilegen.units import us_text

SOFTWARE = ("triton", "driver")
"""Versions that a timing depends on. The template's digest takes the place of tilegen's version."""


def join(records: Iterable[TuningRecord]) -> TuningRecord:
    """Join records about one key into the elected winner, with the other findings as rivals.

    Invalid findings are dropped, and the oldest beyond `MAX_RIVALS` rivals. Raises InvalidRecord if
    the keys differ, or no valid finding is left.
    """
    latest: dict[str, TuningRecord] = {}
    keys: set[tuple[str, ...]] = set()
    last_reason = ""
    for record in records:
        keys.add(record.key)
        for finding in record.findings:
            if reason := why_not_valid(finding):
                last_reason = reason
                continue
            machine = finding.source or _measured(finding)
            latest[machine] = max(latest.get(machine, finding), finding, key=_order)
    if len(keys) != 1:
        raise InvalidRecord(f"expected records about one key, got {sorted(keys)}")
    if not latest:
        raise InvalidRecord(last_reason)
    kept = sorted(latest.values(), key=_order, reverse=True)[: MAX_RIVALS + 1]
    winner = elect(kept)
    return replace(winner, rivals=tuple(finding for finding in kept if finding is not winner))


def elect(findings: Sequence[TuningRecord]) -> TuningRecord:
    """Elect the winner among findings about one key."""
    newest = max(findings, key=_newness)
    peers = [finding for finding in findings if conditions(finding) == conditions(newest)]
    peers = [finding for finding in peers if _surroundings(finding).is_quiet] or peers
    fastest = min(peers, key=_speed)
    limit = tie_limit(fastest.measurement)
    tied = [finding for finding in peers if (finding.measurement.median_us or 0.0) <= limit]
    # A set: several machines may have written down one measurement.
    measured = {(finding.config, _timing(finding)) for finding in tied}
    votes = Counter(config for config, _ in measured)
    elected = min(votes, key=lambda config: (-votes[config], config))
    return min((finding for finding in tied if finding.config == elected), key=_speed)


def why_not_valid(finding: TuningRecord) -> str:
    """Explain why a record is no valid finding: it is unmeasured, or faster than its GPU can be.
    Empty if the finding is valid."""
    if not finding.is_measured:
        return "nobody has measured it, so the model chooses"
    return why_not_credible(finding.measurement, finding.problem, finding.gpu, finding.kernel)


def conditions(record: TuningRecord) -> dict[str, str]:
    """Return the versions that a timing depends on besides the record's key, by name."""
    software = {name: getattr(record.versions, name) for name in SOFTWARE}
    return {**software, "template_digest": record.template_digest}


def verdict(winner: TuningRecord, loser: TuningRecord) -> str:
    """Explain why `winner` precedes `loser`; both are findings about one key."""
    if reason := why_not_valid(loser):
        return f"the other is invalid: {reason}"
    won, lost = winner.measurement.median_us or 0.0, loser.measurement.median_us or 0.0
    times = f"{us_text(won)}, the other {us_text(lost)}"
    if winner.source and winner.source == loser.source:
        return f"of one machine the later finding counts ({times})"
    current, stored = conditions(winner), conditions(loser)
    if differs := [name for name in current if current[name] != stored[name]]:
        what = "; ".join(f"{name} {current[name]}, the other {stored[name]}" for name in differs)
        return f"measured with the newest versions ({what})"
    around, elsewhere = _surroundings(winner), _surroundings(loser)
    if around.is_quiet and not elsewhere.is_quiet:
        return f"measured in quiet, the other {elsewhere} ({times})"
    if won < lost and lost > tie_limit(winner.measurement):
        return f"faster ({times})"
    if winner.config == loser.config:
        return f"the same config ({times})"
    return f"equal measurements ({times}): most machines chose it, or it is first in order"


def _order(finding: TuningRecord) -> tuple[Any, ...]:
    """Return a sort key that places later findings last. `trials` and the text make it total. A
    copy of an older tilegen, which drops the surroundings, comes before the original."""
    is_known = _surroundings(finding) != UNKNOWN
    return is_credible(finding.date), finding.date, finding.trials, is_known, _text(finding)


def _newness(finding: TuningRecord) -> tuple[Any, ...]:
    """Return a sort key that places higher versions last; tilegen's version decides first."""
    versions = [getattr(finding.versions, name) for name in ("tilegen", *SOFTWARE)]
    return *map(release_order, versions), *_order(finding)


def _speed(finding: TuningRecord) -> tuple[float, str]:
    return finding.measurement.median_us or 0.0, _text(finding)


def _measured(finding: TuningRecord) -> str:
    """Identify the measurement of an unknown machine, so that copies count as one finding."""
    return f"{finding.config} {_timing(finding)} {conditions(finding)}"


def _timing(finding: TuningRecord) -> Measurement:
    """Return the measurement without its surroundings, which older tilegens drop."""
    return replace(finding.measurement, surroundings=UNKNOWN)


def _surroundings(finding: TuningRecord) -> Surroundings:
    return finding.measurement.surroundings


@lru_cache(maxsize=1024)
def _text(finding: TuningRecord) -> str:
    # Sorted names and no line ends: the order must not depend on the layout of files.
    return json.dumps(json.loads(finding.to_json()), sort_keys=True)


# --------------------------------------------------------------------------------------------------
# Times that no launch can reach, and configs that cannot run

ALLOWED = 0.75
"""Smallest credible median, as a part of the bound: some boards beat their catalogue figures."""


def why_not_credible(
    measurement: Measurement, problem: AttentionProblem, gpu: str, kernel: Kernel
) -> str:
    """Explain why a median is below the time that any launch needs. Empty if it is credible, or the
    GPU is not in the catalogue."""
    median = measurement.median_us
    # A mask only lowers the bound, and counting it is slow: try without it first.
    if median is None or median >= ALLOWED * _floor_us(problem, gpu, kernel, masked=False):
        return ""
    bound = _floor_us(problem, gpu, kernel, masked=True)
    if median >= ALLOWED * bound:
        return ""
    return (
        f"median_us must be at least {us_text(ALLOWED * bound)}, since {gpu} at its peaks takes "
        f"{us_text(bound)} for the bytes and products of {kernel}; got {us_text(median)}"
    )


@lru_cache(maxsize=4096)
def _floor_us(problem: AttentionProblem, gpu: str, kernel: Kernel, *, masked: bool) -> float:
    """Compute a lower bound on a launch [us]; 0 if the GPU is not in the catalogue."""
    if (spec := _catalogued(gpu)) is None:
        return 0.0
    kind, e = KERNELS[kernel], problem.element_bytes
    rows, columns = problem.seqlen_q, problem.seqlen_kv
    entries = rows * columns
    if masked:
        from tilegen.model.mask_size import mask_size  # loads the model

        size = mask_size(problem.mask, rows, columns)
        rows, columns, entries = size.rows, size.columns, size.entries
    heads, groups = problem.batch * problem.num_heads_q, problem.batch * problem.num_heads_kv
    # Only reads count: L2 is cleared before a launch, but may keep what the launch writes.
    read = [moved.tensor for moved in kind.floor if moved.direction == "read"]
    row_dims: list[Dim] = [one.head_dim for one in read if one.side == "rows" and one.head_dim]
    key_dims: list[Dim] = [one.head_dim for one in read if one.side == "columns" and one.head_dim]
    words = heads * rows * _width(problem, row_dims) + groups * columns * _width(problem, key_dims)
    flops = 2 * heads * entries * _width(problem, kind.products)
    peak = spec.vector_flops_32 if problem.dtype == "fp32" else spec.tensor_flops_16
    return 1e6 * max(words * e / spec.dram_bandwidth, flops / peak)


def _width(problem: AttentionProblem, dims: Iterable[Dim]) -> int:
    return sum(problem.head_dims[dim] for dim in dims)


def _catalogued(name: str) -> GpuSpec | None:
    return next((spec for spec in catalogue() if spec.name == name), None)


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


# --------------------------------------------------------------------------------------------------
# Saving


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

    note = places.update(location, record.path, change, dry_run=dry_run)
    written, wins, reason = result or (False, False, "")
    return Saved(
        file=location.address(record.path), written=written, wins=wins, reason=note or reason
    )


def own_findings(path: PurePosixPath) -> tuple[TuningRecord, ...]:
    """Return the findings of a record of the local cache; none if it is missing or invalid."""
    with contextlib.suppress(InvalidRecord):
        data = places.peek(Location(str(current().cache_dir), "own"), path)
        return () if data is None else TuningRecord.from_json(text_of(data)).findings
    return ()


def dated(record: TuningRecord) -> TuningRecord:
    """Date a new record after all findings of the same machine in the local cache: the machine's
    clock may have been set back since."""
    earlier = [one.date for one in own_findings(record.path) if one.source == record.source]
    last = max(filter(is_credible, earlier), default="")
    return replace(record, date=second_after(last)) if last >= record.date else record


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
