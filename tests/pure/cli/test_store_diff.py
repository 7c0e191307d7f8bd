"""`tilegen cache diff`: stores, exports and dates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.records import PROBLEM, place, record
from tilegen.cli.main import app
from tilegen.tuning.surroundings import Surroundings

FAST = record(us=300.0, source="ab", date="2026-11-22T09:30:00Z")
SLOW = record(us=330.0, source="ab", date="2026-11-20T09:30:00Z")
OTHER = record(problem=replace(PROBLEM, batch=8), us=500.0, source="cd")


def said(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["cache", "diff", *words])
    assert result.exit_code == code, result.output
    return result.stdout


def test_what_changed_between_two_stores(tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    place(tmp_path / "a", SLOW)
    place(tmp_path / "b", FAST)
    place(tmp_path / "b", OTHER)
    faster, added, count = said(a, b).splitlines()
    assert faster.startswith("faster  330 us to 300 us  1.10 times  fwd")
    assert added.startswith("added")
    assert "b8 hq32" in added
    assert count == "2 of 2 winners differ"
    assert [line.split()[0] for line in said(b, a).splitlines()] == ["slower", "gone", "2"]
    assert said(a, a) == "0 of 1 winners differ\n"
    (change, _) = json.loads(said(a, b, "--json"))
    assert change["before"]["measurement"]["median_us"] == 330.0


def test_what_surrounded_the_measurements_is_said_where_it_differs(tmp_path: Path) -> None:
    around = Surroundings(throttled=(), others=2)
    place(tmp_path / "a", SLOW)
    place(tmp_path / "b", replace(SLOW, measurement=replace(SLOW.measurement, surroundings=around)))
    change, _ = said(str(tmp_path / "a"), str(tmp_path / "b")).splitlines()
    assert change.startswith(
        "same        330 us  measured beside 2 other processes, earlier in unknown surroundings"
    )


def test_an_export_is_a_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place(tmp_path / "a", SLOW)
    file = str(tmp_path / "export.jsonl")
    exported = CliRunner().invoke(app, ["cache", "export", file, str(tmp_path / "a")])
    assert exported.exit_code == 0
    assert said(file, str(tmp_path / "a")) == "0 of 1 winners differ\n"


def test_a_day_leaves_out_later_findings(tmp_path: Path) -> None:
    older = replace(SLOW, source="cd")
    place(tmp_path, replace(FAST, rivals=(older,)))
    assert said(f"{tmp_path}@2026-11-21", str(tmp_path)).startswith(
        "faster  330 us to 300 us  1.10 times, another machine  fwd"
    )
    assert said(f"{tmp_path}@2026-11-19", str(tmp_path)).startswith("added")


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["cache", "diff", str(tmp_path / "no"), str(tmp_path)])
    assert "found none" in str(result.exception)
