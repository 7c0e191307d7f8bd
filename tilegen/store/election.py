"""The election of a winner among the findings for one key, and joining of records by it.

The rule, which cache/README.md explains to people:

1. Of one machine only the last finding counts.
2. Findings taken with the newest versions stand before all others. Newest is what has the highest
   numbers, so no clock decides that; dates tell templates of one tilegen apart.
3. Of those the fastest wins. Medians that tie with it are equal measurements: then the config that
   most machines measured wins, then the first in the order of configs. A measurement that several
   machines have written down is one.

A finding whose date is more than a day ahead comes from a wrong clock: it counts as older than all
others, and its time as any other's.

A joined record holds the findings it was made from, as rivals. So joining is commutative,
associative and idempotent: stores may be merged in any order, and as often as one likes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tilegen.errors import InvalidRecord
from tilegen.store.floor import too_fast
from tilegen.store.record import MAX_RIVALS, TuningRecord
from tilegen.store.versions import is_credible, release_order
from tilegen.tuning.measure import tie_limit

SOFTWARE = ("triton", "driver")
"""Names of the versions that a timing depends on; in place of tilegen's stands the template's
digest."""


def join(records: Iterable[TuningRecord]) -> TuningRecord:
    """Return one record with what all of them found, the winner in front; what is no finding is
    left out. Raises InvalidRecord if they are about different things, or nothing is left.
    """
    last: dict[str, TuningRecord] = {}
    keys: set[tuple[str, ...]] = set()
    wrong = ""
    for record in records:
        keys.add(record.key)
        for finding in record.findings:
            if trouble := no_finding(finding):
                wrong = trouble
                continue
            who = finding.source or _measured(finding)
            last[who] = max(last.get(who, finding), finding, key=_order)
    if len(keys) != 1:
        raise InvalidRecord(f"expected records about one key, got {sorted(keys)}")
    if not last:
        raise InvalidRecord(wrong)
    kept = sorted(last.values(), key=_order, reverse=True)[: MAX_RIVALS + 1]
    winner = elect(kept)
    return replace(winner, rivals=tuple(one for one in kept if one is not winner))


def elect(findings: Sequence[TuningRecord]) -> TuningRecord:
    """Return the winner of findings about one key."""
    newest = max(findings, key=_newness)
    peers = [one for one in findings if conditions(one) == conditions(newest)]
    fastest = min(peers, key=_speed)
    limit = tie_limit(fastest.measurement)
    equal = [one for one in peers if (one.measurement.median_us or 0.0) <= limit]
    votes = Counter(config for config, _ in {(one.config, one.measurement) for one in equal})
    config = min(votes, key=lambda one: (-votes[one], one))
    return min((one for one in equal if one.config == config), key=_speed)


def no_finding(finding: TuningRecord) -> str:
    """Return why a record is none: nobody has measured it, or nobody can have. An empty text if it
    is one."""
    if not finding.is_measured:
        return "nobody has measured it, so the model at hand chooses"
    return too_fast(finding.measurement, finding.problem, finding.gpu, finding.kernel)


def conditions(record: TuningRecord) -> dict[str, str]:
    """Return the software that a timing depends on besides the key, by name."""
    software = {name: getattr(record.versions, name) for name in SOFTWARE}
    return {**software, "template_digest": record.template_digest}


def verdict(winner: TuningRecord, loser: TuningRecord) -> str:
    """Return why `winner` stands before `loser`, both findings about one key."""
    if trouble := no_finding(loser):
        return f"the other is no finding: {trouble}"
    won, lost = winner.measurement.median_us or 0.0, loser.measurement.median_us or 0.0
    times = f"{won:g} us, the other {lost:g} us"
    if winner.source and winner.source == loser.source:
        return f"of one machine the later finding counts ({times})"
    current, stored = conditions(winner), conditions(loser)
    if differs := [name for name in current if current[name] != stored[name]]:
        what = "; ".join(f"{name} {current[name]}, the other {stored[name]}" for name in differs)
        return f"measured with the newest versions ({what})"
    if won < lost and lost > tie_limit(winner.measurement):
        return f"faster ({times})"
    if winner.config == loser.config:
        return f"the same config ({times})"
    return f"equal measurements ({times}): most machines chose it, or it is first in order"


def _order(finding: TuningRecord) -> tuple[Any, ...]:
    """Later findings of a machine sort behind earlier ones; the rest makes the order total."""
    return is_credible(finding.date), finding.date, finding.trials, _text(finding)


def _newness(finding: TuningRecord) -> tuple[Any, ...]:
    """Findings with higher versions sort behind those with lower ones, tilegen's first of all."""
    versions = [getattr(finding.versions, name) for name in ("tilegen", *SOFTWARE)]
    return *map(release_order, versions), *_order(finding)


def _speed(finding: TuningRecord) -> tuple[float, str]:
    return finding.measurement.median_us or 0.0, _text(finding)


def _measured(finding: TuningRecord) -> str:
    """Return the measurement of an unknown machine, with its conditions: it is a finding once,
    however many have written it down."""
    return f"{finding.config} {finding.measurement} {conditions(finding)}"


@lru_cache(maxsize=1024)
def _text(finding: TuningRecord) -> str:
    # Without line ends and with sorted names: the order must not depend on how files are laid out.
    return json.dumps(json.loads(finding.to_json()), sort_keys=True)
