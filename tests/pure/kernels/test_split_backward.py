"""Backwards that split streamed rows over programs: when they are chosen, and the model's
numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.problems import task, tiled
from tilegen.choose.families import (
    family,
    kernels_of,
    ranked_families,
    why_not_ranked,
)
from tilegen.choose.ranker import estimate, joining, propose
from tilegen.choose.search_space import all_configs
from tilegen.errors import Unsupported
from tilegen.explaining.costs import traffic_facts
from tilegen.explaining.explained import ExplainedPass, explain
from tilegen.explaining.facts import values_of
from tilegen.explaining.tiles import tile_facts
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import BACKWARD, check_config, grid_of
from tilegen.kernels.split_backward import WORTH_SPLITTING
from tilegen.masks import predicate
from tilegen.model.launches import launches
from tilegen.model.splits import splits_of
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

H200 = gpu("h200")
CROSS = AttentionProblem.parse("b1 hq16 hkv16 q4096 kv77 d64 bf16")
SUFFIX = AttentionProblem.parse("b1 hq32 hkv8 q64 kv131072 d128 bf16 causal(bottom_right)")
SPLIT = ("split_dkdv", "split_dq", "split_backward")


@pytest.mark.parametrize(
    "text, expected",
    [
        (CROSS.key, "split_dkdv"),
        ("b1 hq1 hkv1 q65536 kv77 d128 bf16", "split_dkdv"),
        ("b1 hq20 hkv20 q4096 kv256 d128 bf16", "split_dkdv"),
        ("b1 hq4 hkv1 q8192 kv8192 d128 bf16 causal", "split_dkdv"),  # a group shares its keys
        (SUFFIX.key, "split_dq"),
        ("b1 hq2 hkv2 q2048 kv2048 d128 bf16 causal", "split_backward"),
        ("b1 hq16 hkv16 q2048 kv2048 d128 bf16 causal", "two_pass"),
        ("b4 hq32 hkv8 q8192 d128 bf16 causal", "two_pass"),
        ("b16 hq16 hkv16 q4096 kv77 d64 bf16", "two_pass"),  # 256 programs for dK and dV
    ],
)
def test_it_is_chosen_where_one_kernel_alone_leaves_sms_idle(text: str, expected: str) -> None:
    assert family(AttentionProblem.parse(text), H200, "backward") == expected


def test_each_kernel_is_split_without_the_other() -> None:
    """Those with tiles enough for all SMs are not even ranked."""
    assert kernels_of(CROSS, H200, "backward") == (
        *("bwd_preprocess", "bwd_dkdv_split", "bwd_dkdv_sum", "bwd_dq"),
    )
    assert kernels_of(SUFFIX, H200, "backward") == (
        *("bwd_preprocess", "bwd_dkdv", "bwd_dq_split", "bwd_dq_sum"),
    )
    for problem, item in ((CROSS, "split_dkdv"), (SUFFIX, "split_dq")):
        names = {name for name, _ in ranked_families(problem, H200, "backward")}
        assert names == {"two_pass", item}
    reason = why_not_ranked(BACKWARD["split_dq"], CROSS, H200)
    assert reason == "512 tiles of 128 rows keep 132 SMs busy"
    large = AttentionProblem.parse("b4 hq32 hkv8 q8192 d128 bf16 causal")
    assert [name for name, _ in ranked_families(large, H200, "backward")] == ["two_pass"]


def test_a_batch_invariant_forward_does_not_hinder_the_backward() -> None:
    large = AttentionProblem.parse("b4 hq32 hkv8 q8192 d128 bf16 causal invariant")
    assert all(why_not_ranked(BACKWARD[name], large, H200) for name in SPLIT)
    assert family(large, H200, "backward") == "two_pass"


@pytest.mark.parametrize(
    "problem, kernel", [(CROSS, "bwd_dkdv_split"), (SUFFIX, "bwd_dq_split")], ids=str
)
def test_splits_fill_the_gpu(problem: AttentionProblem, kernel: str) -> None:
    plain = kernel.removesuffix("_split")
    best, alone = (
        propose(KernelTask.of(item, problem, H200), top=1)[0] for item in (kernel, plain)
    )
    programs: list[int] = []
    for item in (best, alone):
        programs.append(launches(Tiled.of(item.kernel, problem, H200, item.config)).programs)
    assert max(programs[1] + 1, 0.9 * H200.num_sms) <= programs[0]
    assert best.estimate.seconds < 0.5 * alone.estimate.seconds


def test_programs_steps_and_rows_of_splits() -> None:
    """Of 4096 queries in 8 splits, each of 2 tiles of 64 keys has a program; under a causal mask
    those that see nothing have none, and the others have less."""
    config = TileConfig.parse("m64n64k512w4s2")
    splits = splits_of(tiled("bwd_dkdv_split", CROSS, config))
    assert (splits.count, splits.programs, splits.rows, splits.tiles_of_group) == (8, 16, 8 * 77, 1)
    run = launches(Tiled.of("bwd_dkdv_split", CROSS, H200, config))
    assert (run.programs, run.steps, run.longest) == (256, 16 * 2 * 64, 8)
    causal = AttentionProblem.parse("b1 hq4 hkv1 q1024 kv1024 d64 bf16 causal")
    splits = splits_of(tiled("bwd_dkdv_split", causal, config))
    assert (splits.count, splits.programs, splits.rows) == (2, 16 + 8, 64 * (16 + 8))
    run = launches(Tiled.of("bwd_dkdv_split", causal, H200, config))
    assert (run.programs, run.steps, run.longest) == (24, 4 * 136, 4 * 8)
    splits = splits_of(tiled("bwd_dq_split", causal, config))
    assert (splits.count, splits.programs, splits.tiles_of_group) == (2, 16 + 8, 4)


def test_no_split_is_left_out_where_heads_visit_different_tiles() -> None:
    by_head = predicate(lambda b, h, q, k: k <= q - 300 * h)
    problem = AttentionProblem.parse("b1 hq4 hkv1 q1024 kv1024 d64 bf16 full")
    problem = replace(problem, mask=by_head)
    splits = splits_of(tiled("bwd_dkdv_split", problem, TileConfig.parse("m64n64k512w4s2")))
    assert (splits.programs, splits.rows) == (2 * 16, 2 * 1024)


def test_sums_are_of_the_splits_that_the_model_proposes() -> None:
    for problem, kernel in ((CROSS, "bwd_dkdv"), (SUFFIX, "bwd_dq")):
        split = propose(KernelTask.of(f"{kernel}_split", problem, H200), top=1)[0].config
        assert joining(KernelTask.of(f"{kernel}_sum", problem, H200)).joined == split
        assert joining(KernelTask.of(kernel, problem, H200)).joined is None
        of = explain(KernelTask.of(f"{kernel}_sum", problem, H200))
        values = values_of(traffic_facts(of))["with"]["value"]
        count = splits_of(tiled(f"{kernel}_split", problem, split)).count
        assert values["n_s"] == count > 1


def test_fewer_splits_a_step_take_longer() -> None:
    """A step waits for the splits that it loads."""
    long = AttentionProblem.parse("b1 hq1 hkv1 q65536 kv77 d128 bf16")
    few, many = (
        estimate(Tiled.of("bwd_dkdv_sum", long, H200, TileConfig.parse(f"m1n{n}w4s1"))).seconds
        for n in (2, 16)
    )
    assert few > 2 * many


def test_configs() -> None:
    for kernel in ("bwd_dkdv_split", "bwd_dq_split"):
        for all_config in all_configs(task(kernel, SUFFIX)):
            check_config(all_config, kernel)
            assert all_config.heads == 1
    longest = max(all_config.split_kv for all_config in all_configs(task("bwd_dkdv_split", CROSS)))
    assert longest == 4096, "no longer than the queries, which are split"
    assert (
        max(all_config.split_kv for all_config in all_configs(task("bwd_dq_split", CROSS))) == 128
    )
    config = TileConfig.parse("m64n128k512w4s2")
    assert grid_of("bwd_dkdv_split", config, 4) == (
        *(("seqlen_kv", 128), ("num_heads_kv", 1), ("batch", 1), ("seqlen_q", 512)),
    )


@pytest.mark.parametrize(
    "key, kernel, error",
    [
        ("m64n64w4s2", "bwd_dkdv_split", "whole tiles of 64 queries, expected a k"),
        ("m128n16k64w4s2", "bwd_dkdv_split", "whole tiles of 128 queries"),
        ("m16n128k64w4s2", "bwd_dq_split", "whole tiles of 128 keys"),
        ("m8h2n16k64w4s2", "bwd_dq_split", "holds one head; remove h"),
        ("m64n64k128w4s2", "bwd_dq", "does not split"),
        ("m3n4w4s1", "bwd_dq_sum", "block_m must be one of"),
        ("m32n1w4s1", "bwd_dq_sum", "block_n of bwd_dq_sum must be one of"),
        ("m64n4w4s2", "bwd_dq", "block_n of bwd_dq must be one of"),
    ],
)
def test_configs_of_other_kernels_are_refused(key: str, kernel: str, error: str) -> None:
    with pytest.raises(Unsupported, match=error):
        check_config(TileConfig.parse(key), kernel)


def test_an_explanation_says_how_it_is_split() -> None:
    def splits(kernel: str, problem: AttentionProblem, config: str) -> str:
        of = explain(KernelTask.of(kernel, problem, H200), TileConfig.parse(config))
        return values_of(tile_facts(of))["splits"]["value"]

    assert splits("bwd_dkdv_split", CROSS, "m64n64k512w4s2") == (
        "8 of 512 queries, for tiles of 64 keys: 256 programs that find queries to visit, "
        "for 132 SMs"
    )
    of_rows = splits("bwd_dq_split", SUFFIX, "m64n64k8192w4s2")
    assert of_rows.startswith("16 of 8192 keys, in tiles of 64 queries of 1 head: 512 ")


def test_a_split_that_wins_little_is_not_taken() -> None:
    """A part of what a model may err by; explain says so."""
    problem = AttentionProblem.parse("hq32 hkv8 q4096 d128 bf16 causal")
    ranked = dict(ranked_families(problem, H200, "backward"))
    assert ranked["split_dkdv"] < ranked["two_pass"] < WORTH_SPLITTING * ranked["split_dkdv"]
    assert family(problem, H200, "backward") == "two_pass"
    because = ExplainedPass("backward", problem, H200).because
    assert "split_dkdv is predicted to be faster, which counts from 1.1 times on" in because
