"""Every constant of the model has a line that says where it comes from."""

from __future__ import annotations

import csv
import re
from dataclasses import fields
from pathlib import Path

import pytest

import tilegen.model
from benchmarks import constants
from benchmarks.workloads import CATALOGUE
from tilegen.kernels.registry import KERNELS
from tilegen.model import time
from tilegen.model.on_chip import UnitsOfFamily
from tilegen.model.rates import Instructions, Rates

FOLDER = Path(tilegen.model.__file__).parent
MEASURED = Path(constants.__file__).parent / "results" / "constants.csv"


def in_the_table() -> set[str]:
    rows = re.findall(r"^\| (`.*?) \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.M)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def in_the_code() -> set[str]:
    results = {
        one.name for record in (Rates, Instructions, UnitsOfFamily) for one in fields(record)
    }
    for path in FOLDER.glob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if match := re.match(r"([A-Z][A-Z_]+(?:, [A-Z][A-Z_]+)*) = (?:\d|{\")", line):
                results |= set(match[1].split(", "))
    return results


def test_every_constant_is_in_the_table_and_no_other() -> None:
    assert {"OVERLAP_NORM", "step_clk", "COLUMNS_PER_WARP", "MAX_WARPS_PER_SM"} <= in_the_code()
    assert in_the_table() == in_the_code()


def test_dependence_on_constants_is_recorded() -> None:
    with MEASURED.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["constant"] for row in rows] == constants.NAMES
    idle = {row["constant"] for row in rows if not int(row["halved"]) and not int(row["doubled"])}
    of_passes = {"rates.launch_seconds", "rates.following_seconds"}  # tell families apart
    of_splits = {"time.IDLE"}  # for a single sequence: test_split_kv.test_splits_fill_the_gpu
    assert idle <= of_passes | of_splits, "a constant that decides nothing: delete it"


def test_a_scaled_constant_changes_choices_and_is_put_back() -> None:
    problems = [CATALOGUE[0].problem]
    before = constants.choices(problems)
    value = time.OVERLAP_NORM
    with constants.scaled("time", "OVERLAP_NORM", 0.25):
        assert value / 4 == time.OVERLAP_NORM
    assert value == time.OVERLAP_NORM
    with constants.scaled("rates", "latency_seconds", 8.0):
        assert constants.changed(problems, before) > 0
    assert constants.changed(problems, before) == 0


@pytest.mark.parametrize("group, name", [("rates", "step_clk"), ("instructions", "score")])
def test_rates_are_scaled_wherever_they_are_read(group: str, name: str) -> None:
    read = getattr(time, "rates_of" if group == "rates" else group)
    argument = "sm_90" if group == "rates" else KERNELS["fwd"]
    value = getattr(read(argument), name)
    with constants.scaled(group, name, 2.0):
        read = getattr(time, "rates_of" if group == "rates" else group)
        assert getattr(read(argument), name) == 2 * value
