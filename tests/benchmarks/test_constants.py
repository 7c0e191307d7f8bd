"""Every constant of the model has a line that says where it comes from."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import tilegen.model
from benchmarks.published.fit import scaled
from benchmarks.workloads import CATALOGUE
from tilegen.choose.ranker import propose
from tilegen.gpus.spec import gpu
from tilegen.kernels.registry import KERNELS
from tilegen.model import time
from tilegen.model.on_chip import UnitsOfFamily
from tilegen.model.rates import Instructions, Rates
from tilegen.task import KernelTask

FOLDER = Path(tilegen.model.__file__).parent


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


def test_a_scaled_constant_changes_choices_and_is_put_back() -> None:
    task = KernelTask.of("fwd", CATALOGUE[0].problem, gpu("h200"))
    before = propose(task, top=5)
    value = time.OVERLAP_NORM
    with scaled({"time.OVERLAP_NORM": 0.25}):
        assert value / 4 == time.OVERLAP_NORM
    assert value == time.OVERLAP_NORM
    with scaled({"rates.latency_seconds": 8.0}):
        assert propose(task, top=5)[0].estimate.seconds > before[0].estimate.seconds
    assert propose(task, top=5) == before


@pytest.mark.parametrize("group, name", [("rates", "step_clk"), ("instructions", "score")])
def test_rates_are_scaled_wherever_they_are_read(group: str, name: str) -> None:
    read = getattr(time, "rates_of" if group == "rates" else group)
    argument = "sm_90" if group == "rates" else KERNELS["fwd"]
    value = getattr(read(argument), name)
    with scaled({f"{group}.{name}": 2.0}):
        read = getattr(time, "rates_of" if group == "rates" else group)
        assert getattr(read(argument), name) == 2 * value
