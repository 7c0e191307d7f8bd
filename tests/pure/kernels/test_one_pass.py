"""The backward in one pass: proposed for no GPU; its programs by the model; its tiles for CPUs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.problems import tiled
from tests.support.records import H200
from tilegen.choose.families import (
    family,
    kernels_of,
    kernels_used,
    ranked_families,
    why_not_ranked,
)
from tilegen.choose.on_cpu import space
from tilegen.choose.ranker import propose
from tilegen.choose.search_space import all_configs
from tilegen.cpu.choice import config_by_rule
from tilegen.cpu.tile_table import MOST_BYTES, share_of
from tilegen.cpus.spec import cpu
from tilegen.errors import Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import BACKWARD, check_config, family_among, family_with, grid_of
from tilegen.model.launches import launches
from tilegen.model.splits import splits_of
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

PARSE = AttentionProblem.parse
NAME = "bwd_one_pass"


@pytest.mark.parametrize(
    "text",
    ["hq16 hkv16 q4096 kv77 d64 bf16", "hq32 hkv8 q4096 d128 bf16 causal", "hq2 q2048 d320 fp32"],
)
def test_it_is_neither_ranked_nor_proposed_for_a_gpu(text: str) -> None:
    problem = PARSE(text)
    assert why_not_ranked(BACKWARD["one_pass"], problem, H200) == "nobody has timed it on a GPU"
    assert "one_pass" not in dict(ranked_families(problem, H200, "backward"))
    assert family(problem, H200, "backward") != "one_pass"
    assert NAME not in kernels_of(problem, H200)


def test_records_of_its_kernels_do_not_choose_it() -> None:
    """Kernels of two passes were measured, too, and were slower."""
    names, problem = BACKWARD["one_pass"].names, PARSE("hq32 hkv8 q4096 d128 bf16 causal")
    records: Any = SimpleNamespace(
        problem=problem,
        device=H200,
        agreed=lambda kernel: kernel in names,
        seconds=lambda kernel: 1.0 if kernel in names else 2.0,
    )
    assert kernels_used(records, "backward") == BACKWARD["two_pass"].names


def test_launches_of_its_kernels_make_up_the_family() -> None:
    names = BACKWARD["one_pass"].names
    assert family_among(names, "backward") is BACKWARD["one_pass"]
    assert family_with(NAME) is BACKWARD["one_pass"]
    assert family_with("bwd_dq_sum") is not BACKWARD["one_pass"], "what GPUs take comes first"


def test_programs_steps_and_rows_of_shares() -> None:
    """1024 keys are 16 tiles of 64 keys, so that each of 4 shares has 4 tiles. Under a causal mask
    the first share has the most query tiles."""
    config = TileConfig.parse("m64n64k256w4s2")
    full = PARSE("b2 hq4 hkv1 q1024 kv1024 d64 bf16 full")
    splits = splits_of(tiled(NAME, full, config))
    assert (splits.count, splits.programs, splits.rows, splits.longest) == (4, 4, 4 * 1024, 4 * 16)
    run = launches(Tiled.of(NAME, full, H200, config))
    assert (run.programs, run.steps, run.longest) == (8, 2 * 4 * 256, 4 * 64)
    causal = PARSE("b2 hq4 hkv1 q1024 kv1024 d64 bf16 causal")
    run = launches(Tiled.of(NAME, causal, H200, config))
    assert (run.programs, run.steps, run.longest) == (8, 2 * 4 * 136, 4 * (16 + 12 + 8 + 4))
    joined = tiled("bwd_dq_sum", causal, TileConfig.parse("m4n2w4s1"), joined=config, follows=NAME)
    assert splits_of(joined) == splits_of(tiled(NAME, causal, config))


def test_configs() -> None:
    problem = PARSE("hq2 q2048 d64 bf16")
    every = all_configs(KernelTask.of(NAME, problem, H200))
    for item in every:
        check_config(item, NAME)
    assert {item.split_kv for item in every} == {128, 256, 512, 1024, 2048}, "of 2048 keys"
    config = TileConfig.parse("m64n128k1024w4s2")
    assert grid_of(NAME, config, 4) == (*(("seqlen_kv", 1024), ("num_heads_kv", 1), ("batch", 1)),)
    assert propose(KernelTask.of(NAME, problem, H200), top=1), "for those who ask for it by name"
    for key, error in (("m16n64w4s2", "shares of bwd_one_pass hold whole tiles of 64 keys"),
                       ("m16n64k32w4s2", "whole tiles of 64 keys"),
                       ("m16h2n64k64w4s2", "holds one head; remove h")):  # fmt: skip
        with pytest.raises(Unsupported, match=error):
            check_config(TileConfig.parse(key), NAME)


@pytest.mark.parametrize(
    "text, keys",
    [
        ("b1 hq8 hkv8 q512 kv512 d64 fp32 full", 512),
        ("b1 hq8 hkv8 q2048 kv2048 d128 bf16 causal", 2048),
        ("b1 hq4 hkv4 q2048 kv2048 d64 bf16 full", 1024),
        ("b1 hq1 hkv1 q4096 kv4096 d64 bf16 full", 512),
        ("b1 hq1 hkv1 q1024 kv1024 d64 bf16 full", 256),
        ("b1 hq3 hkv3 q100 kv5000 d64 bf16 full", 4096),
        ("b2 hq8 hkv1 q900 kv900 d64 bf16 causal", 256),
        ("b8 hq1 hkv1 q64 kv200000 d64 bf16 full", 262144),
        ("b8 hq1 hkv1 q64 kv7 d64 bf16 full", 64),
    ],
)
def test_shares_on_cpus(text: str, keys: int) -> None:
    """Shares follow from batch, heads and keys alone: 8 programs at most, unless heads are more."""
    problem = PARSE(text)
    assert share_of(problem) == keys
    assert share_of(replace(problem, seqlen_q=7 * problem.seqlen_q)) == keys
    for config in (
        config_by_rule(problem, NAME),
        *space(KernelTask.of(NAME, problem, cpu("zen5"))),
    ):
        check_config(config, NAME)
    check_config(config_by_rule(problem, "bwd_dq_sum"), "bwd_dq_sum")


@pytest.mark.parametrize("seqlen", [2**n for n in range(10, 23, 2)])
def test_dq_of_all_shares_grows_with_the_length_alone(seqlen: int) -> None:
    """More shares than fit into MOST_BYTES would make a backward's memory grow with the square."""
    problem = PARSE(f"hq2 q{seqlen} d64 fp32 window(1023,0)")
    config = config_by_rule(problem, NAME)
    shares, one_dq = -(-seqlen // config.split_kv), 4 * 2 * seqlen * 64
    assert shares * one_dq <= max(MOST_BYTES, one_dq)
