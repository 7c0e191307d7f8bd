"""Rates of this processor that times of tuned kernels contradict, by times that tests give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tilegen.choose.on_cpu import chosen_config, estimate
from tilegen.cpus import rates
from tilegen.cpus.host import current_cpu
from tilegen.cpus.rates import RATES, Kept
from tilegen.device import Device
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask
from tilegen.tuning import bench, in_turns
from tilegen.tuning.judged_rates import FACTOR, IMPOSSIBLE, RUNS, judge
from tilegen.tuning.measure import Measurement

TASK = KernelTask.of(
    "fwd", AttentionProblem.parse("b1 hq4 q1024 d64 fp32 causal").bucket, current_cpu()
)
CONFIG = chosen_config(TASK)
PREDICTED = estimate(TASK.tiled(CONFIG)).seconds
RATES_OF_CATALOGUE = {name: getattr(current_cpu(), name) for name in RATES}


class Measured:
    """Takes the place of `rates.measure`; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.factor = 1.0
        """Speed of the machine, beside the rates of the catalogue."""

    def __call__(self, spec: Device) -> dict[str, float]:
        self.calls += 1
        return {name: self.factor * rate for name, rate in RATES_OF_CATALOGUE.items()}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    """A machine with the sizes of the catalogue, whose kept rates are the catalogue's."""
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(rates, "with_own_sizes", lambda spec: spec)
    measure = Measured()
    monkeypatch.setattr(rates, "measure", measure)
    rates.keep(Kept(RATES_OF_CATALOGUE))
    rates.measured_cpu.cache_clear()
    return measure


def judge_all(ratios: Sequence[float]) -> None:
    for ratio in ratios:
        judge(TASK, CONFIG, ratio * PREDICTED)


def kept_ratios() -> tuple[float, ...]:
    kept = rates.read_kept()
    assert kept is not None
    return kept.ratios


def product_rate() -> float:
    """The rate of products that a new process reads, over the catalogue's."""
    rates.measured_cpu.cache_clear()
    return rates.measured_cpu().product_flops_32 / current_cpu().product_flops_32


def test_times_near_the_predicted_ones_are_kept_only(measured: Measured) -> None:
    judge_all([1.1, 0.9, 1.2, 1.0, 0.85, 1.05])
    assert measured.calls == 0
    assert kept_ratios() == pytest.approx([0.9, 1.2, 1.0, 0.85, 1.05])
    judge_all([2.0] * (RUNS - 1))  # the ratio before them agrees with the rates
    assert measured.calls == 0


def test_kernels_that_are_slow_in_a_row_have_new_rates(measured: Measured) -> None:
    measured.factor = 0.5
    judge_all([1.01 * FACTOR] * (RUNS - 1))
    assert (measured.calls, product_rate()) == (0, 1.0)
    assert rates.measured_cpu().product_flops_32 == current_cpu().product_flops_32
    judge(TASK, CONFIG, 3.0 * PREDICTED)
    assert measured.calls == 1
    assert rates.measured_cpu().product_flops_32 == 0.5 * current_cpu().product_flops_32
    assert kept_ratios() == ()
    judge(TASK, CONFIG, 2.0 * PREDICTED)  # as the new rates predict
    assert kept_ratios()[0] == pytest.approx(1.0, abs=0.05)


def test_kernels_that_are_fast_in_a_row_never_lower_a_rate(measured: Measured) -> None:
    measured.factor = 0.5  # the machine is busy again
    judge_all([0.99 / FACTOR] * RUNS)
    assert (measured.calls, product_rate()) == (1, 1.0)
    measured.factor = 2.0
    judge_all([0.99 / FACTOR] * RUNS)
    assert (measured.calls, product_rate()) == (2, 2.0)


def test_a_mixed_row_says_nothing(measured: Measured) -> None:
    judge_all([0.7, 1.5] * RUNS)
    assert measured.calls == 0


def test_a_kernel_faster_than_its_products_is_enough(measured: Measured) -> None:
    flops = estimate(TASK.tiled(CONFIG)).flops
    least = flops / current_cpu().product_flops_32
    judge(TASK, CONFIG, 1.01 * IMPOSSIBLE * least)
    assert measured.calls == 0
    measured.factor = 2.0
    judge(TASK, CONFIG, 0.99 * IMPOSSIBLE * least)
    assert (measured.calls, product_rate()) == (1, 2.0)


def test_nothing_is_measured_where_nothing_is_kept(measured: Measured, tmp_path: Path) -> None:
    (file,) = (tmp_path / "cpus").iterdir()
    file.unlink()
    judge_all([9.0] * RUNS)
    assert measured.calls == 0
    assert not file.exists()


def test_a_kernel_that_the_model_does_not_predict_says_nothing(measured: Measured) -> None:
    problem = AttentionProblem.parse("hq8 q1 kv4096 d64 fp32 full").bucket
    task = KernelTask.of("fwd_split", problem, current_cpu())
    for _ in range(RUNS):
        judge(task, chosen_config(task), 9.0)
    assert (measured.calls, kept_ratios()) == (0, ())


@pytest.mark.parametrize("ratios", [[0.0], ["x"], [float("inf")], None])
def test_a_damaged_file_is_measured_again(
    measured: Measured, tmp_path: Path, ratios: object
) -> None:
    (file,) = (tmp_path / "cpus").iterdir()
    values = json.loads(file.read_bytes())
    file.write_text(json.dumps({**values, "ratios": ratios}), encoding="utf-8")
    assert rates.read_kept() is None
    rates.measured_cpu.cache_clear()
    assert rates.measured_cpu().measured
    assert measured.calls == 1


def test_tuning_judges_the_rates_by_the_config_in_hand(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CPU", "kernels")
    seconds = 1.1 * PREDICTED
    timing = Measurement(status="ok", median_us=1e6 * seconds, repeats=5)
    monkeypatch.setattr(in_turns.InTurns, "measure", lambda *_: timing)
    on_cpu = bench.cpu_bench(TASK)
    other = TileConfig.parse("m16n16w4s2")
    assert other != on_cpu.in_hand
    assert on_cpu.measure(other) == timing
    assert kept_ratios() == ()
    assert on_cpu.measure(CONFIG) == timing
    assert kept_ratios() == pytest.approx([1.1])
