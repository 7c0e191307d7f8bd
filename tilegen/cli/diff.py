"""`tilegen cache diff`: what changed between two stores, exports or dates."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilegen.cli.options import Json, console, print_json
from tilegen.cli.places import PLACE, location, source
from tilegen.errors import Unsupported
from tilegen.units import us_text

if TYPE_CHECKING:
    from tilegen.store import Location, TuningRecord

Side = Annotated[
    str, typer.Argument(help=f"{PLACE}, or an export; with @2026-11-21: as it was after that day")
]


def cache_diff(before: Side, after: Side, json_: Json = False) -> None:
    """Say which winners changed from one store, export or date to another.

    Example: tilegen cache diff own@2026-11-21 own
    """
    old, new = _winners(before), _winners(after)
    changes = [(old.get(key), new.get(key)) for key in sorted({*old, *new})]
    changes = [(was, now) for was, now in changes if was != now]
    if json_:
        sides = [[one and json.loads(one.to_json()) for one in pair] for pair in changes]
        print_json([dict(zip(("before", "after"), pair, strict=True)) for pair in sides])
        return
    for was, now in changes:
        console.print(_line(was, now))
    console.print(f"{len(changes)} of {len({*old, *new})} winners differ")


def _line(was: TuningRecord | None, now: TuningRecord | None) -> str:
    """Format a change: the times, the configs if they differ, and the versions that do."""
    from tilegen.store.election import conditions

    record = now or was
    assert record is not None
    where = f"{record.kernel:15}{record.gpu}  '{record.problem}'"
    time = us_text(record.measurement.median_us)
    if was is None or now is None:
        return f"{'added' if was is None else 'gone':8}{time:>10}  {record.config.key}  {where}"
    before, after = was.measurement.median_us or 1.0, now.measurement.median_us or 1.0
    word = "same" if before == after else "faster" if after < before else "slower"
    parts = [] if word == "same" else [f"{max(before, after) / min(before, after):.2f} times"]
    if was.config != now.config:
        parts.append(f"{was.config.key} to {now.config.key}")
    old, new = conditions(was), conditions(now)
    parts += [f"{name} {old[name]} to {new[name]}" for name in new if old[name] != new[name]]
    parts += ["another machine"] if was.source != now.source else []
    around, earlier = now.measurement.surroundings, was.measurement.surroundings
    parts += [f"measured {around}, earlier {earlier}"] if around != earlier else []
    times = f"{us_text(before)} to {time}" if word != "same" else time
    return f"{word:8}{times:>10}  {', '.join(parts) or 'measured again'}  {where}"


def _winners(text: str) -> dict[tuple[str, ...], TuningRecord]:
    """Return the winner of each key in a store or an export, at a date if one is named."""
    from tilegen.store import list_records
    from tilegen.store.election import join

    place, at, day = text.rpartition("@")
    if not at or len(day) != len("2026-11-21") or not day.replace("-", "").isdecimal():
        place, day = text, "9999-99-99"
    winners: dict[tuple[str, ...], TuningRecord] = {}
    with _store(place) as store:
        for listed in list_records([store], strict=True):
            if listed.record is None or listed.reason:
                continue
            findings = [one for one in listed.record.findings if one.date[: len(day)] <= day]
            if findings:
                winners[listed.record.key] = replace(join(findings), rivals=())
    return winners


@contextmanager
def _store(text: str) -> Generator[Location]:
    """Return a store; an export becomes one in a temporary folder. Raises Unsupported."""
    from tilegen.store import Location
    from tilegen.store.transfer import import_

    if "://" in text or not location(text).folder or not Path(text).is_file():
        yield source(text)
        return
    with tempfile.TemporaryDirectory() as folder:
        target = Location(folder, "shared")
        refused = [str(one) for one in import_(Path(text), target) if one.action == "refused"]
        if refused:
            raise Unsupported(f"expected a whole export at {text!r}: {refused[0]}")
        yield target
