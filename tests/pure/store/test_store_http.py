"""Web servers that cut, delay, compress or never end their responses."""

from __future__ import annotations

import gzip
import itertools
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.records import PROBLEM, RECORD, TASK, record
from tests.support.servers import pieces, raw_server
from tilegen.store import Location, TuningRecord, look_up, places, remote
from tilegen.store.election import join
from tilegen.store.trials import Conditions, Trial, trial_line

pytest.importorskip("aiohttp", reason="needs the package aiohttp; pip install 'tilegen[dev]'")

LARGE = join(record(us=400.0 + n, source=f"{n:02x}") for n in range(16)).to_json().encode()
CONDITIONS = Conditions(
    problem=PROBLEM.key, arch="sm_90", triton="3", driver="5", template_digest="a"
)
LINE = json.dumps(
    trial_line(
        Trial(config=RECORD.config, measurement=RECORD.measurement, date=RECORD.date), CONDITIONS
    )
).encode()
TRIALS = (LINE + b"\n") * (69_600 // len(LINE))


pytestmark = pytest.mark.usefixtures("first_contact")


def found_at(address: str) -> TuningRecord | None:
    entry = look_up(TASK, where=[Location(address, "shared")], borrow=False)
    return entry and entry.record


def copies_of(address: str) -> list[Path]:
    return [file for file in remote.copies(address).rglob("*.json*") if file.is_file()]


@pytest.mark.parametrize("size", [1460, 14_600])
def test_a_body_that_arrives_in_pieces_is_read_whole(size: int) -> None:
    assert len(LARGE) > 14_000
    for length in ([f"Content-Length: {len(LARGE)}"], []):
        with raw_server(lambda: pieces(LARGE, size), *length) as address:
            assert found_at(address) == TuningRecord.from_json(LARGE.decode()).findings[0]
            assert [file.read_bytes() for file in copies_of(address)] == [LARGE]
    with raw_server(lambda: pieces(TRIALS, size)) as address:
        assert places.read_trials(Location(address, "shared"), "trials/x.jsonl") == TRIALS


@pytest.mark.parametrize(
    "sent, length, said",
    [
        (LARGE[:9000], len(LARGE), "cannot be reached"),
        (LARGE, 9000, "expected JSON"),
        (LARGE[:9000], None, "expected JSON"),
    ],
    ids=["hangs up before its Content-Length", "Content-Length too small", "cut without a length"],
)
def test_a_body_that_is_cut_is_passed_over_and_not_kept(
    sent: bytes, length: int | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    headers = [] if length is None else [f"Content-Length: {length}"]
    with raw_server(lambda: pieces(sent, 1460), *headers) as address:
        assert found_at(address) is None
        assert copies_of(address) == []
    (warning,) = caplog.messages
    assert said in warning


def test_a_compressed_body_is_read(caplog: pytest.LogCaptureFixture) -> None:
    packed = gzip.compress(LARGE)
    with raw_server(lambda: pieces(packed, 500), "Content-Encoding: gzip") as address:
        assert found_at(address) is not None
    assert caplog.messages == []


def endless() -> Iterator[bytes]:
    return itertools.repeat(b" " * 65_536)


@pytest.mark.parametrize(
    "body, headers",
    [
        ([gzip.compress(bytes(2**26))], ["Content-Encoding: gzip"]),
        (endless(), []),
        (endless(), [f"Content-Length: {len(LARGE) * 10**9}"]),
    ],
    ids=["gzip bomb", "endless", "huge"],
)
def test_a_body_without_measure_is_refused_at_the_limit(
    body: Iterable[bytes],
    headers: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with raw_server(lambda: body, *headers) as address:
        assert found_at(address) is None
        assert copies_of(address) == []
    (warning,) = caplog.messages
    assert "expected at most 65536 bytes, found more" in warning


def test_a_trickle_costs_one_warning_and_no_thread(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(remote, "WRITE_SECONDS", 0.3)
    before = set(threading.enumerate())
    with raw_server(lambda: itertools.repeat(b" ")) as address:
        for _ in range(3):
            assert found_at(address) is None
        waiting = [one for one in set(threading.enumerate()) - before if one.name == "tilegen-ask"]
        for thread in waiting:
            thread.join(20)
            assert not thread.is_alive()
    (warning,) = caplog.messages
    assert "did not answer within 0.2 s" in warning
