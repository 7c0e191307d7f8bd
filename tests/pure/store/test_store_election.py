"""The rule by which findings are joined, and that no order of joining changes what comes out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.records import RECORD, UNMEASURED, VERSIONS, record, timed
from tilegen.errors import InvalidRecord
from tilegen.kernels.config import TileConfig
from tilegen.store import TuningRecord, Versions
from tilegen.store.election import join, verdict
from tilegen.store.record import MAX_RIVALS
from tilegen.store.versions import release_order
from tilegen.tuning.measure import Measurement
from tilegen.tuning.surroundings import UNKNOWN, Surroundings

OLD = replace(VERSIONS, triton="3.6.0")
CONFIGS = [TileConfig.parse(text) for text in ("m128n64w8s3", "m64n64w4s2", "m128n128w8s2")]


def day(n: int) -> str:
    return f"2026-11-{n:02}T09:30:00Z"


def newer(triton: str) -> Versions:
    return replace(VERSIONS, triton=triton)


QUIET = Surroundings(clock_mhz=1980, throttled=("sw_power_cap",), others=0)
BESIDE = Surroundings(throttled=(), others=2)
HOT = Surroundings(throttled=("hw_slowdown",), others=0)
LOW = Surroundings(load=0.25)


def around(us: float, surroundings: Surroundings, spread: float = 0.0) -> Measurement:
    return replace(timed(us, spread), surroundings=surroundings)


RULE: dict[str, tuple[list[TuningRecord], int, str]] = {
    "the fastest wins": (
        [record(us=400.0, source="aa"), record(us=390.0, source="bb")],
        1,
        r"faster (390 us, the other 400 us)",
    ),
    "the fastest wins, whichever config comes first": (
        [
            record(us=us, source=source, config=config)
            for us, source, config in zip(
                (410.0, 400.0, 390.0), ("aa", "bb", "cc"), sorted(CONFIGS), strict=True
            )
        ],
        2,
        r"faster (390 us, the other 410 us)",
    ),
    "of one machine the later finding": (
        [
            record(us=390.0, source="aa", date=day(21)),
            record(us=400.0, source="aa", date=day(22)),
        ],
        1,
        "of one machine the later finding counts (400 us, the other 390 us)",
    ),
    "of one machine and moment the one with more trials": (
        [record(us=390.0, source="aa", trials=9), record(us=400.0, source="aa", trials=10)],
        1,
        "of one machine the later finding counts (400 us, the other 390 us)",
    ),
    "the newest versions": (
        [
            record(us=300.0, source="aa", date=day(20), versions=OLD),
            record(us=400.0, source="bb", date=day(21)),
        ],
        1,
        "measured with the newest versions (triton 3.7.1, the other 3.6.0)",
    ),
    "the newest versions, whatever the clocks say": (
        [
            record(us=300.0, source="aa", date=day(22), versions=OLD),
            record(us=400.0, source="bb", date=day(1)),
        ],
        1,
        "measured with the newest versions (triton 3.7.1, the other 3.6.0)",
    ),
    "a release before its candidates": (
        [
            record(us=500.0, source="aa", date=day(22), versions=newer("3.8.0rc1")),
            record(us=300.0, source="bb", date=day(1), versions=newer("3.8.0")),
        ],
        1,
        "measured with the newest versions (triton 3.8.0, the other 3.8.0rc1)",
    ),
    "a clock that is years ahead makes nothing the latest": (
        [
            record(us=8800.0, source="aa", date="2099-01-01T00:00:00Z", template_digest="ab"),
            record(us=400.0, source="bb"),
            record(us=410.0, source="cc"),
        ],
        1,
        "measured with the newest versions (template_digest 87ebae389eec, the other ab)",
    ),
    "a machine whose clock was put right": (
        [
            record(us=8800.0, source="aa", date="2099-01-01T00:00:00Z"),
            record(us=400.0, source="aa"),
        ],
        1,
        "of one machine the later finding counts (400 us, the other 8.80 ms)",
    ),
    "the template of the latest finding": (
        [
            record(us=300.0, source="aa", date=day(20), template_digest="ab"),
            record(us=400.0, source="bb", date=day(21)),
        ],
        1,
        "measured with the newest versions (template_digest 87ebae389eec, the other ab)",
    ),
    "another tilegen with the same template is the same": (
        [
            record(us=300.0, source="aa", versions=replace(VERSIONS, tilegen="0.0.9")),
            record(us=400.0, source="bb", date=day(22)),
        ],
        0,
        "faster (300 us, the other 400 us)",
    ),
    "the majority of equal measurements": (
        [
            record(config=CONFIGS[0], measurement=timed(400.0, 0.01), source="aa"),
            record(config=CONFIGS[2], measurement=timed(402.0, 0.01), source="bb"),
            record(config=CONFIGS[2], measurement=timed(401.0, 0.01), source="cc"),
        ],
        2,
        "equal measurements (401 us, the other 400 us): most machines chose it, "
        "or it is first in order",
    ),
    "no majority by copies of a measurement": (
        [
            record(config=CONFIGS[0], measurement=timed(400.0, 0.01), source="aa"),
            record(config=CONFIGS[2], measurement=timed(402.0, 0.01), source="bb"),
            record(config=CONFIGS[2], measurement=timed(402.0, 0.01), source="cc"),
            record(config=CONFIGS[2], measurement=timed(402.0, 0.01), source="dd"),
        ],
        0,
        "equal measurements (400 us, the other 402 us): most machines chose it, "
        "or it is first in order",
    ),
    "no majority of slower ones": (
        [
            record(config=CONFIGS[0], measurement=timed(400.0, 0.01), source="aa"),
            record(config=CONFIGS[2], measurement=timed(405.0, 0.01), source="bb"),
            record(config=CONFIGS[2], measurement=timed(405.0, 0.01), source="cc"),
        ],
        0,
        "faster (400 us, the other 405 us)",
    ),
    "the first in order of equals": (
        [
            record(config=CONFIGS[0], measurement=timed(400.0, 0.01), source="aa"),
            record(config=CONFIGS[1], measurement=timed(401.0, 0.01), source="bb"),
        ],
        1,
        "equal measurements (401 us, the other 400 us): most machines chose it, "
        "or it is first in order",
    ),
    "the faster of one config": (
        [
            record(measurement=timed(401.0, 0.01), source="aa"),
            record(measurement=timed(400.0, 0.01), source="bb"),
        ],
        1,
        "the same config (400 us, the other 401 us)",
    ),
    "in quiet before beside strangers, whatever the speed": (
        [
            record(measurement=around(300.0, BESIDE), source="aa"),
            record(measurement=around(400.0, QUIET), source="bb"),
        ],
        1,
        "measured in quiet, the other beside 2 other processes (400 us, the other 300 us)",
    ),
    "in quiet before throttled": (
        [
            record(measurement=around(300.0, HOT), source="aa"),
            record(measurement=around(400.0, QUIET), source="bb"),
        ],
        1,
        "measured in quiet, the other throttled by hw_slowdown (400 us, the other 300 us)",
    ),
    "in quiet before nobody knows where": (
        [
            record(us=300.0, source="aa"),
            record(measurement=around(400.0, QUIET), source="bb"),
        ],
        1,
        "measured in quiet, the other in unknown surroundings (400 us, the other 300 us)",
    ),
    "the fastest of those in quiet": (
        [
            record(measurement=around(300.0, BESIDE), source="aa"),
            record(measurement=around(410.0, QUIET), source="bb"),
            record(measurement=around(400.0, LOW), source="cc"),
        ],
        2,
        "measured in quiet, the other beside 2 other processes (400 us, the other 300 us)",
    ),
    "the fastest where none is in quiet": (
        [
            record(us=410.0, source="aa"),
            record(measurement=around(400.0, BESIDE), source="bb"),
        ],
        1,
        "faster (400 us, the other 410 us)",
    ),
    "the newest versions before quiet": (
        [
            record(measurement=around(300.0, QUIET), source="aa", versions=OLD),
            record(measurement=around(400.0, BESIDE), source="bb"),
        ],
        1,
        "measured with the newest versions (triton 3.7.1, the other 3.6.0)",
    ),
    "of one machine the later finding, though beside others": (
        [
            record(measurement=around(300.0, QUIET), source="aa", date=day(21)),
            record(measurement=around(400.0, BESIDE), source="aa", date=day(22)),
        ],
        1,
        "of one machine the later finding counts (400 us, the other 300 us)",
    ),
    "no majority by copies without their surroundings": (
        [
            record(config=CONFIGS[0], measurement=around(400.0, BESIDE, 0.01), source="aa"),
            record(config=CONFIGS[2], measurement=around(402.0, BESIDE, 0.01), source="bb"),
            record(config=CONFIGS[2], measurement=timed(402.0, 0.01), source="cc"),
        ],
        0,
        "equal measurements (400 us, the other 402 us): most machines chose it, "
        "or it is first in order",
    ),
}


@pytest.mark.parametrize("name", RULE)
def test_rule(name: str) -> None:
    findings, wins, reason = RULE[name]
    for order in itertools.permutations(findings):
        guess = record(measurement=UNMEASURED, source=order[0].source, date=day(22))
        assert join([guess, *order, guess]) == join(order), "what nobody measured changes nothing"
        assert join(order).findings[0] == findings[wins]
    assert verdict(findings[wins], findings[0 if wins else 1]) == reason


def test_versions_are_in_the_order_of_their_releases() -> None:
    released = [
        "",
        "git",
        "2.13.0",
        "2.14.0.dev20261120+cu130",
        "2.14.0a0+git1234567",
        "2.14.0rc1",
        "2.14.0rc10",
        "2.14.0+cu130",
        "2.14.0.post1",
        "2.100",
        "6.2.41133-dd7f95766",
        "580.65.06",
    ]
    shuffled = sorted(released, reverse=True)
    assert sorted(shuffled, key=release_order)[2:] == released[2:]
    assert release_order("2.13.0+cu130") == release_order("2.13.0+cpu")


def test_only_records_about_one_key_can_be_joined() -> None:
    for other in (record(gpu="h100"), record(kernel="bwd_dq"), record(policy="warm_l2")):
        with pytest.raises(InvalidRecord, match="expected records about one key"):
            join([RECORD, other])
    with pytest.raises(InvalidRecord):
        join([])
    with pytest.raises(InvalidRecord, match="nobody has measured it"):
        join([record(measurement=UNMEASURED)])


def test_the_oldest_findings_are_dropped() -> None:
    many = [record(us=400.0 + n, source=f"{n:02x}", date=day(1 + n)) for n in range(20)]
    kept = join(many)
    assert len(kept.findings) == MAX_RIVALS + 1
    assert {one.date for one in kept.findings} == {day(n) for n in range(5, 21)}
    assert kept.measurement.median_us == 404.0
    assert TuningRecord.from_json(kept.to_json()) == kept


def test_findings_of_unknown_machines_are_distinguished_by_content() -> None:
    joined = join([record(us=400.0), record(us=410.0), record(us=400.0)])
    assert [one.measurement.median_us for one in joined.findings] == [400.0, 410.0]


@pytest.mark.parametrize("source", ["", "aa"])
def test_the_copy_of_an_older_tilegen_does_not_replace_the_original(source: str) -> None:
    """An older tilegen drops the surroundings of findings that it joins."""
    original = record(measurement=around(400.0, QUIET), source=source)
    copy = replace(original, measurement=timed(400.0))
    assert join([original, copy]) == join([copy, original]) == original


FINDINGS = st.builds(
    record,
    measurement=st.builds(
        around,
        st.sampled_from([399.0, 400.0, 401.0, 500.0]),
        st.sampled_from([UNKNOWN, QUIET, BESIDE, HOT, LOW]),
        st.sampled_from([0.0, 0.01]),
    ),
    config=st.sampled_from(CONFIGS),
    source=st.sampled_from(["", "aa", "bb", "cc"]),
    versions=st.sampled_from([VERSIONS, OLD]),
    date=st.integers(1, 4).map(day) | st.just("2099-01-01T00:00:00Z"),
    trials=st.integers(0, 2),
)


@given(st.lists(FINDINGS, min_size=1, max_size=24), st.randoms())
@settings(max_examples=150, deadline=None)
def test_any_order_and_grouping_gives_the_same_bytes(
    findings: list[TuningRecord], chance: object
) -> None:
    import random

    assert isinstance(chance, random.Random)
    expected = join(findings).to_json()
    shuffled = chance.sample(findings, len(findings))
    one_by_one = reduce(lambda so_far, one: join([so_far, one]), shuffled)
    assert one_by_one.to_json() == expected
    cut = chance.randint(0, len(shuffled))
    halves = [join(part) for part in (shuffled[:cut], shuffled[cut:]) if part]
    assert join(halves).to_json() == expected, "it is associative"
    assert join([*halves, *halves, *shuffled]).to_json() == expected, "and idempotent"
