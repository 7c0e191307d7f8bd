"""The benchmark of kernels compiled for the CPU: its rows, and that a stopped run goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks import cpu_calls, cpu_peak
from benchmarks.arithmetic import flops
from benchmarks.environment import RESULTS
from benchmarks.rows import read
from tilegen.problem import AttentionProblem

PASSES = "forward", "backward"
ROOT = Path(__file__).parents[2]
SMALL = AttentionProblem.parse("hq2 q64 d16 fp32 causal")


@pytest.fixture(autouse=True)
def _one_small_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_calls, "cases", lambda: iter([SMALL]))
    monkeypatch.setattr(cpu_calls, "peak_gflops", lambda _: 100.0)


@pytest.mark.slow
def test_rows_of_a_case_and_a_run_that_goes_on(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    out = tmp_path / "calls.csv"
    try:
        for _ in range(2):  # the second run has nothing left to measure
            cpu_calls.main(out=out, minutes=5.0, seconds=0.001, threads="1")
    finally:
        torch.set_num_threads(before)
    rows = read(out)
    measured = [(row["direction"], row["provider"]) for row in rows]
    providers = ("tilegen", "sdpa", "sdpa math", "standard")
    assert measured == [(way, who) for way in ("forward", "backward") for who in providers]
    flops = 2 * 2 * 2 * 16 * 64 * 65 / 2  # products x 2 x heads x dim x kept pairs
    for row in rows:
        products = flops if row["direction"] == "forward" else 2.5 * flops
        gflops = products / float(row["median_ms"]) / 1e6
        assert float(row["gflops"]) == pytest.approx(gflops, rel=1e-3)
        assert float(row["peak_fraction"]) == pytest.approx(gflops / 100, rel=1e-3)
    assert [float(row["tilegen_speedup"]) for row in rows if row["provider"] == "tilegen"] == [1, 1]


def test_the_cases_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    problems = list(cpu_calls.cases())
    assert len(problems) >= 80
    for wanted in ("fp32", "bf16", "d64", "d512", "q512", "q8192", "full", "window", "documents"):
        assert any(wanted in problem.key for problem in problems)
    full, documents = (
        flops(AttentionProblem.parse(f"hq1 q512 d64 fp32 {mask}"), "forward")
        for mask in ("full", "documents(@q:64)")
    )
    assert full == 8 * documents


def test_the_peak_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some number above 0: what it is depends on the machine."""
    monkeypatch.setattr(cpu_peak, "STEPS", 1000)
    monkeypatch.setattr(cpu_peak, "ROUNDS", 2)
    assert cpu_peak.peak_gflops(2) > 0


def test_the_pages_have_the_summary_of_the_result_file() -> None:
    rows = read(RESULTS / "cpu" / "calls.csv")
    summary = list(cpu_calls.summary(rows))
    table = summary[: summary.index("")]
    assert len(table) == 2 + 2 * 2 * 2
    assert "\n".join(table) in (ROOT / "benchmarks" / "README.md").read_text()
    on_zen5 = list(cpu_calls.summary(read(RESULTS / "cpu" / "calls_zen5.csv")))
    assert (
        "\n".join(on_zen5[: on_zen5.index("")]) in (ROOT / "benchmarks" / "README.md").read_text()
    )
    assert not [line for line in on_zen5 if line.startswith("slower")], "README says that none is"
    text = (ROOT / "README.md").read_text()
    assert cpu_calls.readme_table(rows) in text
    (fast, best), (backward, best_backward) = (
        re.findall(r"in (\d+)", line) for line in summary if line.partition(":")[0] in PASSES
    )
    cases = summary[summary.index("") + 1].partition(" of ")[2].partition(",")[0]
    assert f"Of {cases} cases" in text
    assert f"the forward is faster in {fast} and the backward in {backward};" in text
    assert f"back ends in {best} and {best_backward}." in text
