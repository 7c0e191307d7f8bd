"""Keys split over programs: when that is chosen, how many keys a split has, what tiles hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.problems import task, tiled
from tilegen.choose.families import family, kernels_of, ranked_families
from tilegen.choose.ranker import estimate, propose
from tilegen.choose.search_space import all_configs
from tilegen.emit.render import render
from tilegen.errors import Unsupported
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import KERNELS, check_config, grid_of
from tilegen.masks import predicate
from tilegen.masks.grouping import packed_heads
from tilegen.masks.score import softcap
from tilegen.model.launches import launches
from tilegen.model.splits import splits_of
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

H200 = gpu("h200")
DECODE = AttentionProblem.parse("b1 hq64 hkv8 q1 kv8192 d128 bf16")
VERIFY = AttentionProblem.parse("b1 hq16 hkv2 q8 kv131072 d128 bf16 causal(bottom_right)")


@pytest.mark.parametrize(
    "text, expected",
    [
        (DECODE.key, "split_kv"),
        (VERIFY.key, "split_kv"),
        ("b8 hq64 hkv8 q1 kv8192 d128 bf16", "split_kv"),  # heads of a group read keys once
        ("b64 hq64 hkv8 q1 kv8192 d128 bf16", "split_kv"),
        ("b1 hq8 hkv1 q256 kv131072 d128 bf16 causal(bottom_right)", "split_kv"),
        ("b4 hq32 hkv8 q8192 d128 bf16 causal", "q_stationary"),
        ("b64 hq32 hkv32 q512 d64 fp16", "q_stationary"),
        ("b1 hq16 hkv16 q2048 d128 bf16 causal", "q_stationary"),
    ],
)
def test_it_is_chosen_where_programs_or_queries_are_few(text: str, expected: str) -> None:
    assert family(AttentionProblem.parse(text), H200, "forward") == expected


def test_hopeless_families_are_not_ranked() -> None:
    many = AttentionProblem.parse("b4 hq32 hkv8 q8192 d128 bf16 causal")
    assert [name for name, _ in ranked_families(many, H200, "forward")] == ["q_stationary"]
    names = {name for name, _ in ranked_families(DECODE, H200, "forward")}
    assert names == {"split_kv", "q_stationary"}


def test_dropout_is_left_to_others() -> None:
    assert kernels_of(replace(DECODE, dropout=True), H200, "forward") == ("fwd",)


def test_splits_fill_the_gpu() -> None:
    """One program for each SM or more, and fewer keys a split where there are fewer heads."""
    few = AttentionProblem.parse("b1 hq16 hkv2 q1 kv8192 d128 bf16")
    most, least = (
        propose(KernelTask.of("fwd_split", item, H200), top=1)[0] for item in (DECODE, few)
    )
    for item, problem in ((most, DECODE), (least, few)):
        run = launches(Tiled.of("fwd_split", problem, H200, item.config))
        finest = item.config.split_kv == KERNELS["fwd_split"].knobs.split_kv[0]
        assert finest or run.programs >= 0.9 * H200.num_sms
    assert least.config.split_kv < most.config.split_kv


def test_partial_results_count_in_the_ranking_of_splits() -> None:
    """A kernel of small splits is as fast by itself, but its results are read again."""
    small, large = (
        estimate(Tiled.of("fwd_split", VERIFY, H200, TileConfig.parse(f"m8h8n64k{keys}w4s3")))
        for keys in (256, 2048)
    )
    assert small.cost - small.seconds > 5 * (large.cost - large.seconds) > 0
    assert small.cost > large.cost
    candidates = propose(KernelTask.of("fwd_split", VERIFY, H200), top=30)
    costs = [one.estimate.cost for one in candidates]
    assert costs == sorted(costs)


def test_a_tile_holds_a_whole_group_where_nothing_tells_its_heads_apart() -> None:
    assert packed_heads(DECODE) == 8
    assert packed_heads(AttentionProblem.parse("hq10 hkv2 q1 kv64 d64 bf16")) == 8
    assert packed_heads(AttentionProblem.parse("hq4 hkv4 q1 kv64 d64 bf16")) == 1
    assert packed_heads(AttentionProblem.parse("hq256 hkv1 q1 kv64 d64 bf16")) == 1
    assert packed_heads(replace(DECODE, score=softcap(5.0).form)) == 8
    by_head = predicate(lambda b, h, q, k: k <= q + h)
    assert packed_heads(replace(DECODE, mask=by_head)) == 1
    for all_config in all_configs(task("fwd_split", DECODE)):
        assert all_config.heads == 8
        assert all_config.rows >= 16
        assert all_config.split_kv % all_config.block_n == 0


def test_empty_splits_have_no_programs() -> None:
    """A window over the last 1000 of 131072 keys visits two splits of 1024, whatever the rest."""
    problem = replace(
        VERIFY, mask=AttentionProblem.parse("hq1 q9 d16 fp16 window(999,0,bottom_right)").mask
    )
    config = TileConfig.parse("m8h8n64k1024w4s3")
    splits = splits_of(tiled("fwd_split", problem, config))
    assert (splits.count, splits.programs, splits.tiles_of_group) == (128, 1, 1)
    wide = splits_of(tiled("fwd_split", VERIFY, config))
    assert wide.programs == wide.count == 128


def test_the_grid_has_a_program_for_each_split_and_group() -> None:
    config = TileConfig.parse("m8h8n64k1024w4s3")
    assert grid_of("fwd_split", config, 8) == (
        ("seqlen_q", 8),
        ("num_heads_q", 8),
        ("batch", 1),
        ("seqlen_kv", 1024),
    )
    alone = TileConfig.parse("m16n64k1024w4s3")
    assert dict(grid_of("fwd_split", alone, 8))["num_heads_q"] == 1


@pytest.mark.parametrize(
    "key, kernel, error",
    [
        ("m16n64w4s2", "fwd_split", "expected a k that is a multiple"),
        ("m16n64k32w4s2", "fwd_split", "whole tiles of 64 keys"),
        ("m8h64n64k256w4s2", "fwd_split", "block_m of fwd_split must be one of"),
        ("m16n64k256w4s2", "fwd", "does not split"),
        ("m2h8n64w4s2", "bwd_dq", "does not split"),
        ("m8n64w4s2", "bwd_dq", "block_m of bwd_dq must be one of"),
        ("m2n16w4s1", "fwd_combine", "block_m of fwd_combine must be one of"),
    ],
)
def test_configs_of_other_kernels_are_refused(key: str, kernel: str, error: str) -> None:
    with pytest.raises(Unsupported, match=error):
        check_config(TileConfig.parse(key), kernel)


def test_heads_of_a_tile_are_those_of_a_group() -> None:
    with pytest.raises(Unsupported, match="use h8 or no h in m4h4n16k32w4s2"):
        render(DECODE, TileConfig.parse("m4h4n16k32w4s2"), "fwd_split")


def test_configs_round_trip() -> None:
    config = TileConfig.parse("m2h8n64k1024w4s3t")
    assert (config.heads, config.split_kv, config.rows, config.descriptors) == (8, 1024, 16, True)
    assert config.key == "m2h8n64k1024w4s3t"
    assert eval(repr(config)) == config
    assert TileConfig(**config.values) == config
    assert set(TileConfig.parse("m64n64w4s2").values) == {
        *("block_m", "block_n", "num_warps", "num_stages"),
    }
