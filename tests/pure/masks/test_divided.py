"""Keys of requests divided over the splits of a grid: how many splits and tiles the model counts,
what partial results may take, and what short requests cost in a grid for long ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

import tilegen
from tests.support.problems import task, tiled
from tilegen.choose.ranker import best_of, estimate, propose
from tilegen.choose.search_space import MOST_LEFT, all_configs
from tilegen.explaining.explained import explain
from tilegen.explaining.facts import values_of
from tilegen.explaining.tiles import tile_facts
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.kernels.split_kv import FILLING, usual_tiles
from tilegen.model.launches import launches
from tilegen.model.splits import divided_splits, splits_of
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

H200 = gpu("h200")
SPLIT = TileConfig.parse("m2h8n128k8192w4s2")
ENDS = tilegen.predicate(lambda b, h, q, k: (k < 9) | (k >= 130_000))


@pytest.mark.parametrize(
    "mask, programs, longest",
    [
        ("full", 16, 64),
        ("window(4096,0,bottom_right)", 11, 3),  # of 33 tiles
        (ENDS, 2, 64),  # several ranges: splits share all tiles
        ("full invariant", 16, 64),
        ("window(4096,0,bottom_right) invariant", 1, 64),  # of which the window leaves 33
    ],
    ids=["full", "window", "several ranges", "invariant", "invariant window"],
)
def test_splits_share_the_tiles_that_a_mask_leaves(
    mask: str | tilegen.Mask, programs: int, longest: int
) -> None:
    text = f"b1 hq8 hkv1 q1 kv131072 d128 bf16 {mask if isinstance(mask, str) else 'full'} page16"
    problem = AttentionProblem.parse(text)
    problem = problem if isinstance(mask, str) else replace(problem, mask=mask)
    splits = splits_of(tiled("fwd_paged", problem, SPLIT))
    assert (splits.count, splits.programs, splits.longest) == (16, programs, longest)
    joined = splits_of(tiled("fwd_combine", problem, TileConfig.parse("m1n16w4s1"), joined=SPLIT))
    assert joined == splits


def test_splits_are_equal_if_lengths_are_no_multiple() -> None:
    """Of 71 tiles, one program has 36 and the other 35, where fixed splits would have 64 and 7."""
    problem = AttentionProblem.parse("b1 hq8 hkv1 q1 kv9000 d128 bf16 full page16")
    for invariant, longest in ((False, 36), (True, 64)):
        changed = replace(problem, invariant=invariant)
        run = launches(Tiled.of("fwd_paged", changed, H200, SPLIT))
        assert (run.programs, run.steps, run.longest) == (2, 71, longest)


def test_results_of_a_split_are_small_beside_its_keys() -> None:
    """Rows of 128 values in fp32, written and read again, 32 times smaller than keys and values;
    where values are columns of the keys, these are read once."""
    for text, config, tiles in (
        ("hq8 hkv1 q1 d128 bf16 full page16", "m2h8n128k8192w4s2", 8),
        ("hq8 hkv1 q1 d128 bf16 full page16", "m16h8n128k8192w8s2", 64),
        ("hq8 hkv1 q1 d128 bf16 full page16", "m2h8n128k512w4s2", 4),  # the largest split
        ("hq16 hkv1 q1 d576/512 bf16 full page16 latent", "m1h16n64k8192w4s2", 29),
    ):
        problem, actual = AttentionProblem.parse(text), TileConfig.parse(config)
        assert usual_tiles(problem, actual) == tiles
        width = 576 if problem.latent else 256
        left, read = 2 * 4 * actual.rows * problem.head_dim_v, 2 * actual.block_n * width
        assert (
            tiles * actual.block_n == actual.split_kv
            or 32 * left <= tiles * read < 32 * left + read
        )


@pytest.mark.parametrize(
    "text, least, most",
    [
        # Partial results of 16 splits are 128 MiB, and of 32 the bound.
        ("b256 hq64 hkv8 q1 kv131072 d128 bf16 full page16", 4096, 8192),
        ("b1 hq64 hkv8 q1 kv131072 d128 bf16 full page16", 128, 8192),
        ("b256 hq128 hkv1 q1 kv131072 d576/512 bf16 full page64 latent", 32768, 32768),
        ("b256 hq64 hkv8 q4 kv131072 d128 bf16 causal(bottom_right) page16", 16384, 16384),
        ("b1 hq64 hkv8 q8192 kv131072 d128 bf16 causal(bottom_right) page16", 65536, 65536),
        ("b256 hq64 hkv8 q4 kv131072 d128 bf16 causal(bottom_right) invariant page16", 128, 8192),
        ("b256 hq64 hkv8 q4 kv16 d128 bf16 causal(bottom_right) page16", 128, 128),
    ],
)
def test_partial_results_take_a_bounded_room(text: str, least: int, most: int) -> None:
    problem = AttentionProblem.parse(text)
    splits = {one.split_kv for one in all_configs(task("fwd_paged", problem))}
    assert (min(splits), max(splits)) == (least, most)
    rows = problem.batch * problem.num_heads_q * problem.seqlen_q
    bytes_left = rows * -(-problem.seqlen_kv // least) * problem.head_dim_v * 4
    assert bytes_left <= MOST_LEFT or problem.invariant or least == 65536
    assert propose(KernelTask.of("fwd_paged", problem, H200), top=1)[0].config.split_kv in splits


def test_an_explanation_says_that_keys_are_divided() -> None:
    problem = AttentionProblem.parse("b8 hq64 hkv8 q1 kv131072 d128 bf16 full page16")

    def splits(task: KernelTask) -> str:
        return values_of(tile_facts(explain(task, SPLIT)))["splits"]["value"]

    assert splits(KernelTask.of("fwd_paged", problem, H200)) == (
        "16 of at most 8192 keys, over which the keys of each request are divided, in tiles of 2 "
        "queries of 8 heads: 1024 programs that find keys to visit, for 132 SMs"
    )
    task = KernelTask.of("fwd_paged", replace(problem, invariant=True), H200)
    alike = splits(task)
    assert alike.startswith("16 of 8192 keys, in tiles of 2 queries of 8 heads: 1024 programs")


# --------------------------------------------------------------------------------------------------
# Requests of 4k keys in a grid for 128k

SERVED = {
    "Llama 3 70B": "b{batch} hq64 hkv8 q1 kv{keys} d128 bf16 full page16",
    "DeepSeek V3": "b{batch} hq128 hkv1 q1 kv{keys} d576/512 bf16 full page64 latent",
}


def in_a_long_grid(model: str, batch: int) -> tuple[TileConfig, int, Tiled, Tiled]:
    """Return the config and the splits of the grid, then the kernel of the short requests with
    splits of a fixed number of keys, and with their keys divided over the splits."""
    long, short = (
        AttentionProblem.parse(SERVED[model].format(batch=batch, keys=keys))
        for keys in (131072, 4096)
    )
    config = best_of(KernelTask.of("fwd_paged", long, H200)).config
    grid = splits_of(Tiled.of("fwd_paged", long, H200, config))
    tiles = divided_splits(short, config, grid.count, grid.tiles_of_group).longest
    divided = replace(config, split_kv=tiles * config.block_n)
    fixed_and_divided = (Tiled.of("fwd_paged", short, H200, one) for one in (config, divided))
    return (config, grid.count, *fixed_and_divided)


def programs(tiled: Tiled) -> int:
    splits = splits_of(tiled)
    problem = tiled.problem
    return int(problem.batch * problem.num_heads_kv * splits.tiles_of_group * splits.programs)


def test_splits_of_short_requests_are_those_of_the_kernel() -> None:
    """By hand: 4096 keys are 32 tiles of 128, 64 of 64."""
    for model, batch, fixed_splits, tiles in (
        ("Llama 3 70B", 1, 1, 2),  # a 16th, as the grid has 16 splits
        ("Llama 3 70B", 8, 1, 8),  # a quarter gives 256 programs, and is the usual split
        ("Llama 3 70B", 256, 1, 8),
        ("DeepSeek V3", 1, 2, 1),  # of 64 splits
        ("DeepSeek V3", 8, 1, 4),  # a 16th, which gives 256 programs
        ("DeepSeek V3", 256, 1, 64),  # 512 programs without splits: the usual split is larger
    ):
        config, splits, fixed, divided = in_a_long_grid(model, batch)
        groups = programs(fixed) // fixed_splits
        assert groups == batch * (8 if model == "Llama 3 70B" else 2)
        every = 4096 // config.block_n
        assert programs(divided) == groups * -(-every // tiles)
        to_fill = -(-FILLING // groups)
        usual = usual_tiles(fixed.problem, config)
        assert tiles == max(min(usual, -(-every // to_fill)), -(-every // splits))


def test_short_requests_win_where_programs_are_few_and_lose_little_elsewhere() -> None:
    for model, batch in product(SERVED, (1, 8, 32, 256)):
        _, splits, fixed, divided = in_a_long_grid(model, batch)
        assert programs(divided) >= programs(fixed)
        before, after = (estimate(one).seconds for one in (fixed, divided))
        assert after < 1.01 * before
        if programs(fixed) < H200.num_sms / 2:
            assert after < 0.85 * before
        problem = fixed.problem
        partials = batch * problem.num_heads_q * splits * problem.head_dim_v * 4
        assert partials <= MOST_LEFT
