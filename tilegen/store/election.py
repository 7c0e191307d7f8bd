"""Election of a winner among the findings for one key, and the join of records by that election.

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

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tilegen.errors import InvalidRecord
from tilegen.store.floor import why_not_credible
from tilegen.store.forms import MAX_RIVALS
from tilegen.store.record import TuningRecord
from tilegen.store.versions import is_credible, release_order
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
