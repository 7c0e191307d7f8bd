"""Proposals: legal, ranked, explained, quick, for every GPU and every kind of problem."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

import tilegen
from tests.support.problems import task, tiled
from tilegen.choose.ranker import by_lower_bound, estimate, propose, search_space
from tilegen.choose.search_space import all_configs
from tilegen.cli.candidates import table
from tilegen.disk import say_once
from tilegen.errors import Unsupported
from tilegen.gpus.spec import GpuSpec, catalogue, gpu
from tilegen.kernels.config import BLOCK_SIZES, Kernel, TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.masks.tiles import tile_ranges
from tilegen.masks.tiles.spans import visit
from tilegen.model import visits
from tilegen.model.footprint import footprint
from tilegen.model.rates import rates_of
from tilegen.pipeline import choose
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

PARSE = AttentionProblem.parse
LLAMA = PARSE("b1 hq32 hkv8 q8192 kv8192 d128 bf16 causal")
PROBLEMS = [
    PARSE(text)
    for text in (
        "b8 hq12 hkv12 q1024 d64 fp16 causal",
        "b16 hq16 hkv16 q512 d64 bf16 full",
        "b1 hq32 hkv8 q8192 d128 bf16 causal",
        "b1 hq32 hkv8 q32768 d128 bf16 causal&window(4095,0)",
        "b1 hq16 hkv8 q8192 d256 bf16 causal",
        "b1 hq64 hkv8 q8192 d64 bf16 causal&window(127,0)",
        "b1 hq128 hkv128 q4096 d192/128 bf16 causal",
        "b32 hq16 hkv16 q577 d80 fp16 full",
        "b8 hq16 hkv16 q257 d72 fp32 full",
        "b1 hq24 hkv24 q16384 d96 bf16 full",
        "b1 hq8 hkv1 q256 kv131072 d128 bf16 causal(bottom_right)",
        "b64 hq32 hkv8 q1 kv4096 d128 bf16 full",
        "b1 hq8 hkv8 q1 kv1 d160 fp32 full",
        "b2 hq8 hkv8 q2048 d256 fp32 causal",
        "b1 hq2 hkv2 q64 kv200 d32 fp16 causal",
        "b1 hq2 hkv2 q256 kv64 d64 fp32 causal(bottom_right)",  # rows that keep nothing
    )
]


@pytest.mark.parametrize("spec", catalogue(), ids=lambda spec: spec.name)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_every_problem_on_every_gpu(problem: AttentionProblem, spec: GpuSpec) -> None:
    """For one kernel a pair, so that each kernel meets every problem and every GPU."""
    for kernel in LARGE_CACHE[(PROBLEMS.index(problem) + catalogue().index(spec)) % 4 :: 4]:
        candidates = propose(KernelTask.of(kernel, problem, spec))
        assert 1 <= len(candidates) <= 10
        seconds = [candidate.estimate.seconds for candidate in candidates]
        assert seconds == sorted(seconds)
        assert len({candidate.config for candidate in candidates}) == len(candidates)
        spilling = {
            footprint(tiled(kernel, problem, c.config, spec.arch)).surely_spills for c in candidates
        }
        assert len(spilling) == 1  # either none does, or there was nothing better
        for candidate in candidates:
            cost = candidate.estimate
            assert (candidate.kernel, cost.kernel, cost.config) == (
                kernel,
                kernel,
                candidate.config,
            )
            assert cost.smem_bytes <= 1.1 * spec.smem_per_block
            assert cost.lower_bound_bytes <= cost.read_bytes + cost.write_bytes
            assert 0 < cost.dram_bytes <= cost.read_bytes + cost.write_bytes
            assert 0 < cost.seconds < 100


@pytest.mark.parametrize("kernel", LARGE_CACHE)
def test_reasons_are_one_sentence_with_numbers(kernel: Kernel) -> None:
    for candidate in propose(KernelTask.of(kernel, LLAMA, gpu("h200"))):
        assert "\n" not in candidate.reason
        assert "times the lower bound; waits for " in candidate.reason
        block = candidate.config.block_n if kernel == "bwd_dkdv" else candidate.config.block_m
        assert candidate.reason.startswith(f"{block} ")
        assert f"{candidate.estimate.registers} registers" in candidate.reason


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, "1024/512"])
def test_masks_that_keep_no_pair(head_dim: int | str) -> None:
    problem = PARSE(f"b2 hq4 hkv2 q1024 kv1024 d{head_dim} bf16 keep(k<0)")
    explanation = tilegen.explain(problem, "h200", by_model=True)
    bounds = [facts["bound"] for facts in explanation.values]
    assert all(bound["ratio"]["value"] >= 1 for bound in bounds if "ratio" in bound)
    assert "times the bound, by these tiles" in explanation.text("pass")
    for kernel, item in choose(problem, gpu("h200")).items():
        assert item.ranked.candidates[0].reason, kernel


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["fwd_scores", "bwd_scores"])
def test_kernels_of_intermediates_have_no_bound_if_no_pair_is_kept(kernel: Kernel) -> None:
    problem, spec = PARSE("b2 hq4 hkv2 q1024 kv1024 d320 bf16 keep(k<0)"), gpu("h200")
    explanation = tilegen.explain(problem, spec, kernel=kernel, by_model=True)
    (told,) = explanation.values
    assert told["bound"]["bound"]["value"] == 0
    assert "ratio" not in told["bound"]
    assert "the lower bound is 0" in explanation.text("all")
    header, row, *_ = table(propose(KernelTask.of(kernel, problem, spec))[:1])
    assert row[: header.index("x bound") + 7].endswith(" -")


def test_less_fast_memory_means_smaller_tiles() -> None:
    normal, small = gpu("h200"), gpu("h200", fast_memory=48 * 1024)
    for kernel in ("fwd", "bwd_dkdv", "bwd_dq"):
        before, after = (propose(KernelTask.of(kernel, LLAMA, spec))[0] for spec in (normal, small))
        assert after.estimate.smem_bytes <= 48 * 1024 < before.estimate.smem_bytes
        assert after.config != before.config
        assert after.estimate.seconds >= before.estimate.seconds
    assert propose(KernelTask.of("fwd", LLAMA, small))[0].estimate.lower_bound_bytes >= (
        propose(KernelTask.of("fwd", LLAMA, normal))[0].estimate.lower_bound_bytes
    )


def test_top_limits_the_list_and_keeps_the_order() -> None:
    ten, three = (
        propose(KernelTask.of("fwd", LLAMA, gpu("a100"))),
        propose(KernelTask.of("fwd", LLAMA, gpu("a100")), top=3),
    )
    assert len(ten) == 10
    assert ten[:3] == three


@pytest.mark.parametrize("top", [0, -1, True, 2.5])
def test_top_must_be_a_count(top: object) -> None:
    with pytest.raises(Unsupported, match="top must be an int of at least 1"):
        propose(KernelTask.of("fwd", LLAMA, gpu("h200")), top=top)  # type: ignore[arg-type]


def test_nothing_fits() -> None:
    problem = PARSE("b1 hq8 hkv8 q2048 d256 fp32 full")
    with pytest.raises(
        Unsupported, match=r"expected a bwd_dq tile within 4096 bytes.*smallest needs"
    ):
        propose(KernelTask.of("bwd_dq", problem, gpu("h200", fast_memory=4096)))


@pytest.mark.parametrize("kernel", LARGE_CACHE)
def test_search_space_holds_the_proposals_and_more(kernel: Kernel) -> None:
    spec = gpu("h200")
    space = search_space(KernelTask.of(kernel, LLAMA, spec))
    proposed = [
        candidate.config for candidate in propose(KernelTask.of(kernel, LLAMA, spec), top=1000)
    ]
    assert set(proposed) <= set(space)
    assert len(space) == len(set(space))
    assert all(
        footprint(tiled(kernel, LLAMA, config, spec.arch)).smem_bytes <= 1.1 * spec.smem_per_block
        for config in space
    )


def test_tiles_are_not_larger_than_the_problem() -> None:
    decode = PARSE("b64 hq32 hkv8 q1 kv40 d128 bf16 full")
    assert {config.block_m for config in all_configs(task("fwd", decode))} == {16}
    assert {config.block_n for config in all_configs(task("fwd", decode))} == {16, 32, 64}
    assert {config.block_m for config in all_configs(task("bwd_dq", LLAMA))} == set(BLOCK_SIZES)


def test_preprocess_has_no_second_side() -> None:
    configs = all_configs(task("bwd_preprocess", LLAMA))
    assert {(config.block_n, config.num_stages) for config in configs} == {(16, 1)}
    assert len(configs) == len(BLOCK_SIZES) * 2


def test_estimate_takes_any_config() -> None:
    """What would happen beyond the limits is a fair question."""
    cost = estimate(Tiled.of("fwd", LLAMA, gpu("t4"), TileConfig.parse("m256n256w8s4")))
    assert cost.smem_bytes > gpu("t4").smem_per_block


def test_lengths_of_2_to_the_28_are_fine() -> None:
    problem = PARSE("b1 hq1 hkv1 q1 kv268435456 d128 bf16 full")
    assert propose(KernelTask.of("fwd", problem, gpu("b200")), top=1)[0].estimate.read_bytes > 2**36


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem, kernel",  # two kernels of each problem
    [(one, kernel) for i, one in enumerate(PROBLEMS) for kernel in LARGE_CACHE[i // 2 % 2 :: 2]],
    ids=str,
)
def test_all_configs_at_once_are_predicted_as_each_alone(
    problem: AttentionProblem, kernel: Kernel
) -> None:
    # Units of an H200 overlap by a rule, those of an RTX 3090 by queues.
    spec = gpu(("h200", "rtx3090")[PROBLEMS.index(problem) % 2])
    ranked = propose(KernelTask.of(kernel, problem, spec), top=2**16)
    order: list[Any] = []
    for candidate in ranked[:: 1 + len(ranked) // 8]:
        actual = candidate.estimate
        alone = estimate(Tiled.of(kernel, problem, spec, candidate.config))
        assert dict(alone.terms) == pytest.approx(dict(actual.terms))
        assert (alone.cost, alone.seconds) == pytest.approx((actual.cost, actual.seconds))
        floats = {"terms": (), "cost": 0.0, "seconds": 0.0}
        assert replace(alone, **floats) == replace(actual, **floats)
        order.append((actual.cost, not candidate.config.descriptors))
    assert sorted(order) == order


def test_tiles_are_counted_once_for_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Any] = []

    def noting(mask: Any, side: Any, **sizes: int) -> Any:
        counted.append((side, sizes["block_m"], sizes["block_n"]))
        return tile_ranges.tile_ranges(mask, side, **sizes)

    monkeypatch.setattr(visits, "tile_ranges", noting)
    problem = PARSE("b1 hq32 hkv8 q4091 d128 bf16 causal")  # that no other test proposes for
    for kernel in ("fwd", "bwd_dq", "fwd"):
        propose(KernelTask.of(kernel, problem, gpu("h200")))
    assert 0 < len(counted) == len(set(counted)) <= 25


def test_a_choice_needs_no_sympy() -> None:
    text = f"""
import sys
from tilegen.gpus.spec import gpu
from tilegen.pipeline import choose
from tilegen.problem import AttentionProblem
choose(AttentionProblem.parse({LLAMA.key!r}), gpu("h200"))
assert "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", text], check=True)


def test_windows_of_other_widths_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which saves 30 ms each; `test_masks` has their tiles."""
    solved: list[object] = []

    def noting(*arguments: Any) -> Any:
        solved.append(arguments)
        return visit(*arguments)

    monkeypatch.setattr(tile_ranges, "visit", noting)
    kind = "hq8 q4000 d64 bf16 prefix_lm(7)&"  # that no other test proposes for
    propose(KernelTask.of("fwd", PARSE(f"{kind}window(100,7)"), gpu("h200")))
    assert solved
    solved.clear()
    propose(KernelTask.of("fwd", PARSE(f"{kind}window(333,12)"), gpu("h200")))
    assert not solved


@pytest.mark.parametrize("name", ["v100", "t4"])
def test_bf16_without_tensor_cores_is_ranked_by_multiply_adds_and_said(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    say_once.cache_clear()
    spec = gpu(name)
    for text, kernel in (("d128", "fwd"), ("d512", "fwd_streamed"), ("d512", "fwd_scores")):
        half, brain = (PARSE(f"hq8 q2048 {text} {dtype} causal") for dtype in ("fp16", "bf16"))
        (best,) = propose(KernelTask.of(kernel, brain, spec), top=1)
        fast = estimate(Tiled.of(kernel, half, spec, best.config))
        rates = rates_of(spec.arch)
        peak = spec.vector_flops_32 * rates.vector_efficiency
        assert dict(best.estimate.terms)["tensor"] == pytest.approx(best.estimate.flops / peak)
        assert best.estimate.seconds > 2 * fast.seconds
        assert "waits for fp32 multiply-adds" in best.reason
    (said,) = [one.message for one in caplog.records if "no tensor cores for bf16" in one.message]
    assert said.startswith(f"{spec.title} ({spec.arch}) has no tensor cores for bf16")


def test_a_compiling_call_warns_of_bf16_too(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    by_lower_bound(KernelTask.of("fwd", PARSE("hq8 q2048 d128 bf16 causal"), gpu("v100")), top=3)
    assert "no tensor cores for bf16" in caplog.text


def test_other_gpus_and_dtypes_are_ranked_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    for name, dtype in (("t4", "fp16"), ("t4", "fp32"), ("a100", "bf16"), ("mi300x", "bf16")):
        propose(KernelTask.of("fwd", PARSE(f"hq8 q2048 d128 {dtype} causal"), gpu(name)), top=1)
    assert not caplog.records
