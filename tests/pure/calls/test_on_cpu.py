"""The choice for processors: what it depends on, and what the committed sweeps say of it."""

from __future__ import annotations

import csv
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tilegen
from benchmarks import cpu_regret
from benchmarks.recordings import Recording, read
from tilegen import pipeline
from tilegen.choose.on_cpu import (
    candidates,
    chosen_config,
    family_on_cpu,
    may_tune,
    ranked,
    space,
    tuned_space,
)
from tilegen.cpus.spec import catalogue, cpu
from tilegen.errors import Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import KERNELS, check_config
from tilegen.model.cpu_time import TERMS, idle_factor, seconds_of, weighted
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask

ZEN5 = cpu("zen5")
RESULTS = Path(__file__).parents[3] / "benchmarks/results"


def swept(processor: str) -> list[Path]:
    return sorted((RESULTS / processor / "exhaustive").glob("*/*"))


def was_whole(path: Path) -> bool:
    """Check whether no product stops within a tile."""
    mask = read(path).session.problem.mask
    return mask.is_full or mask.window is None


SWEPT = swept("zen5")
"""Sweeps on the kind of processor to which the weights are fitted."""


def task(text: str, kernel: str = "fwd", device: str = "zen5") -> KernelTask:
    return KernelTask.of(kernel, AttentionProblem.parse(text), cpu(device))


def task_of(recording: Recording) -> KernelTask:
    session = recording.session
    return KernelTask.of(session.kernel, session.problem, cpu(session.gpu))


@pytest.mark.parametrize("path", SWEPT, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_choices_lose_little_in_the_sweeps(path: Path) -> None:
    recording = read(path)
    times = recording.times()
    chosen = chosen_config(task_of(recording))
    # Splits are not for the model: their tiles are those of a rule.
    most = 0.15 if recording.session.kernel == "fwd_split" else 0.1
    assert times[chosen] <= (1 + most) * min(times.values())
    assert set(space(task_of(recording))) == set(recording.trials)


def test_the_median_regret_is_below_two_per_cent() -> None:
    regrets: list[float] = []
    for path in SWEPT:
        recording = read(path)
        times = recording.times()
        regrets.append(times[chosen_config(task_of(recording))] / min(times.values()) - 1)
    assert len(regrets) == 36
    assert statistics.median(regrets) < 0.02


def test_choices_on_a_processor_without_a_share_in_the_weights() -> None:
    """Sweeps on a Zen 3, of the tiles that stop at a mask's edge among others. Without that in the
    model the mean regret of causal masks is above 8 %, the worst 23 %."""
    regrets: dict[bool, list[float]] = {True: [], False: []}
    for path in swept("zen3"):
        recording = read(path)
        times = recording.times()
        chosen = chosen_config(task_of(recording))
        if recording.session.kernel != "fwd_split" and chosen in times:
            regrets[was_whole(path)].append(times[chosen] / min(times.values()) - 1)
    assert statistics.mean(regrets[False]) < 0.06
    assert max(regrets[False]) < 0.1
    assert max(regrets[True]) < 0.2


@pytest.mark.slow
def test_committed_regrets_between_processors(capsys: pytest.CaptureFixture[str]) -> None:
    cpu_regret.cross()
    assert capsys.readouterr().out == (RESULTS / "cpu/cross.csv").read_text()


def test_predicted_times_are_near_those_of_the_sweeps() -> None:
    """Beside each other; all times together may be those of a faster machine of the kind."""
    errors: list[float] = []
    for path in SWEPT:
        recording = read(path)
        if recording.session.kernel == "fwd_split":
            continue
        ratios = [
            1e6 * seconds_of(task_of(recording).tiled(config)) / us
            for config, us in recording.times().items()
        ]
        usual = statistics.median(ratios)
        assert 0.9 < usual < 1.3
        errors += [abs(ratio / usual - 1) for ratio in ratios]
    assert statistics.mean(errors) < 0.05
    assert max(errors) < 0.45


def test_a_choice_does_not_depend_on_threads() -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv2 q1024 kv1024 d64 fp32 causal")
    chosen: list[dict[str, TileConfig]] = []
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        choices = pipeline.choose(problem, ZEN5, deterministic=True)
        chosen.append({kernel: choice.config for kernel, choice in choices.items()})
    torch.set_num_threads(threads)
    assert chosen[0] == chosen[1] == chosen[2]


def test_problems_of_a_bucket_share_a_choice() -> None:
    left, other = (
        task(f"b1 hq2 hkv2 q{length} kv{length} d64 fp32 causal") for length in (1000, 1024)
    )
    assert chosen_config(left) == chosen_config(other)
    assert ranked(left) == ranked(other)


@pytest.mark.parametrize("device", [spec.name for spec in catalogue()])
def test_every_processor_has_a_choice(device: str) -> None:
    for kernel in ("fwd", "bwd_one_pass", "bwd_preprocess", "bwd_dq_sum", "fwd_split"):
        for dtype in ("fp32", "bf16", "fp16"):
            kernel_task = task(f"b1 hq4 hkv2 q2048 kv2048 d128 {dtype} causal", kernel, device)
            check_config(chosen_config(kernel_task), kernel)
            assert 0 < seconds_of(kernel_task.tiled(chosen_config(kernel_task))) < 1
            assert candidates(kernel_task)[0].config == chosen_config(kernel_task)
            assert chosen_config(kernel_task) in space(kernel_task)


@pytest.mark.parametrize("dim", [16, 24, 72, 80, 96, 112, 160, 192, 320])
def test_decoding_has_a_legal_tile_for_every_head_dim(dim: int) -> None:
    for heads, queries in ((8, 1), (2, 3)):
        for dtype in ("fp32", "bf16"):
            text = f"b1 hq{heads} hkv2 q{queries} kv2048 d{dim} {dtype} full"
            check_config(chosen_config(task(text, "fwd_split")), "fwd_split")


@pytest.mark.parametrize(
    "text, family",
    [
        ("hq32 hkv8 q16 kv4096 d128 bf16 full", "split_kv"),
        ("hq32 hkv8 q32 kv4096 d64 fp32 full", "split_kv"),
        ("hq32 hkv8 q64 kv4096 d64 fp32 full", "q_stationary"),
        ("hq8 hkv8 q16 kv4096 d128 bf16 full", "q_stationary"),  # no group
        ("hq32 hkv8 q16 kv512 d128 bf16 full", "q_stationary"),  # few keys
        ("hq32 hkv8 q16 kv4096 d128 bf16 causal", "q_stationary"),  # a query sees at most 16 keys
    ],
)
def test_heads_of_a_group_share_keys_if_queries_are_few_and_keys_many(
    text: str, family: str
) -> None:
    problem = AttentionProblem.parse(text)
    assert family_on_cpu(problem, "forward").name == family


@pytest.mark.parametrize(
    "text, tile",
    [
        ("hq8 q1 kv16 d64 fp32 full", (1, 16)),
        ("hq8 q1 kv400 d64 fp32 full", (1, 64)),
        ("hq8 q3 kv200 d64 fp32 causal", (4, 32)),
    ],
)
def test_a_tile_of_few_queries_on_few_keys_has_no_other_rows(
    text: str, tile: tuple[int, int]
) -> None:
    few = task(text)
    assert family_on_cpu(few.problem, "forward").name == "q_stationary"
    assert chosen_config(few) == TileConfig(block_m=tile[0], block_n=tile[1])
    assert {config.block_m for config in space(few)} == {chosen_config(few).block_m}


@pytest.mark.parametrize("kernel", [name for name, one in KERNELS.items() if not one.specialised])
@pytest.mark.parametrize("mask", ["causal", "keep(k<0)"])
def test_every_kernel_has_a_tile_or_a_reason(kernel: str, mask: str) -> None:
    problem = f"hq2 hkv1 q64 d320 bf16 {mask}"
    if KERNELS[kernel].sliced or kernel in ("bwd_dkdv_split", "bwd_dq_split", "bwd_dkdv_sum"):
        with pytest.raises(Unsupported, match="no call on a processor launches "):
            tilegen.propose(problem, "cpu", kernel=kernel)
    else:
        assert tilegen.propose(problem, "cpu", kernel=kernel)


def test_few_programs_leave_threads_idle() -> None:
    assert [idle_factor(programs) for programs in (1, 2, 8, 16)] == pytest.approx(
        [5 / 1.9375, 3 / 1.9375, 2 / 1.9375, 1]
    )
    alone = chosen_config(task("b1 hq1 hkv1 q512 kv512 d64 fp32 full"))
    many = chosen_config(task("b8 hq8 hkv8 q512 kv512 d64 fp32 full"))
    assert alone.block_m < many.block_m


def test_a_tuner_tries_no_tiles_that_leave_more_threads_idle() -> None:
    kernel_task = task("b1 hq1 hkv1 q512 kv512 d64 fp32 full")
    tried = tuned_space(kernel_task)
    assert chosen_config(kernel_task) in tried
    assert (
        max(config.block_m for config in tried) <= 64 < max(c.block_m for c in space(kernel_task))
    )
    many = task("b8 hq8 hkv8 q512 kv512 d64 fp32 full")
    assert tuned_space(many) == space(many)
    assert may_tune(many)
    assert not may_tune(task("b8 hq8 hkv8 q512 kv512 d64 fp32 full", "bwd_preprocess"))


def test_rates_move_times_as_they_should() -> None:
    kernel_task = task("b1 hq1 hkv1 q4096 kv4096 d512 fp32 full")
    small = replace(ZEN5, name="small", l1_bytes=2**12, l2_bytes=2**15, l2_bandwidth=1e10)
    tile, now = (
        chosen_config(kernel_task),
        seconds_of(kernel_task.tiled(chosen_config(kernel_task))),
    )
    assert seconds_of(replace(kernel_task, device=small).tiled(tile)) > 1.05 * now
    slow = replace(ZEN5, name="slow", product_flops_32=ZEN5.product_flops_32 / 4)
    assert 3 < seconds_of(replace(kernel_task, device=slow).tiled(tile)) / now < 4.01


def test_candidates_say_why() -> None:
    kernel_task = task("b1 hq2 hkv2 q1024 kv1024 d64 fp32 causal")
    first, *others = candidates(kernel_task)
    assert first.config == chosen_config(kernel_task)
    assert {candidate.config for candidate in others} == set(space(kernel_task)) - {first.config}
    cost = first.estimate
    assert [name for name, _ in cost.terms] == list(TERMS)
    assert dict(cost.terms) == weighted(kernel_task.tiled(first.config))
    assert "to and from caches" in first.reason
    assert TERMS[cost.limit] in first.reason


def test_predicted_times_of_decoding_are_near_the_measured_times() -> None:
    text = (Path(__file__).parents[3] / "benchmarks/results/cpu/decode.csv").read_text()
    rows = [
        row
        for row in csv.DictReader(text.splitlines())
        if (row["provider"], row["threads"]) == ("tilegen", "1")
    ]
    assert len(rows) >= 20
    for row in rows:
        problem = AttentionProblem.parse(row["problem"]).normal()
        chosen = pipeline.choose(problem, ZEN5, "forward")
        before, *_ = (KernelTask.of(kernel, problem, ZEN5) for kernel in chosen)
        predicted = seconds_of(before.tiled(chosen[before.kernel].config))
        ratio = 1e3 * predicted / float(row["median_ms"])
        assert 0.6 < ratio < 1.5, (row["problem"], ratio)
