"""Up to 32 processes write and read one store, a third is killed: nothing is lost or torn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.programs.store_stress import KEYS, finding
from tests.support import warm
from tests.support.servers import s3_server
from tilegen.store import Location, list_records, places, record_path
from tilegen.store.election import join
from tilegen.store.trials import trials_path

ROOT = Path(__file__).parents[2]


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        import fsspec

        fs, _ = fsspec.url_to_fs("s3://store")
        fs.mkdir("store")
        yield "s3://store/team"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "network folder", "s3"])
def test_killed_writers_lose_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "mine"))
    url = {"folder": str(tmp_path / "store"), "network folder": f"file://{tmp_path}/store"}.get(
        kind
    ) or request.getfixturevalue("s3")
    (tmp_path / "logs").mkdir()
    # One Python process plays the server of s3://, and all others wait for it.
    steps, processes = (4, 32) if kind == "network folder" else (3, 16)
    where = f"{url!r}, Path({str(tmp_path / 'logs')!r})"
    said = warm.output(
        "from pathlib import Path\nfrom tests.programs.store_stress import main\n"
        f"main({where}, steps={steps}, processes={processes})"
    )
    told: dict[str, Any] = json.loads(said)
    assert told["trouble"] == []
    assert told["saves"] > steps * (processes - processes // 3)

    where = Location(url, "own" if kind == "folder" else "shared")
    listed = {one.name: one for one in list_records([where])}
    assert [one.reason for one in listed.values() if one.reason] == [], "no torn file"
    for text, step in told["last"].items():
        key, process = map(int, text.split())
        there = listed[str(record_path("h200", "fwd", KEYS[key]))].record
        assert there is not None
        (mine,) = (one for one in there.findings if one.source == f"{process:04x}")
        # A killed writer may have put one more than it lived to tell of.
        assert mine.trials in (step, step + 2), "the last finding that was acknowledged"
        assert mine.measurement.median_us == finding(process, key, mine.trials)["us"]
        assert join([there]) == there, "the winner is in front"
    there = b"".join(places.read_trials(where, trials_path("h200", "fwd", key)) for key in KEYS)
    assert set(told["trials"]) <= {json.loads(line)["seconds"] for line in there.splitlines()}
