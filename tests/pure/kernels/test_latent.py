"""Values that are the first columns of keys: the model's counts, and the emitted text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilegen
from tests.support.problems import task, tiled
from tilegen.choose.families import family, kernels_of, passes_of
from tilegen.choose.ranker import estimate, propose
from tilegen.choose.search_space import all_configs
from tilegen.emit.render import render
from tilegen.errors import Unsupported
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig, shares_columns
from tilegen.kernels.registry import KERNELS, tile_heads
from tilegen.masks.grouping import heads_of_tiles
from tilegen.model.bounds import lower_bound_bytes
from tilegen.model.footprint import footprint
from tilegen.model.splits import splits_of
from tilegen.model.traffic import terms_of, traffic_of
from tilegen.problem import AttentionProblem
from tilegen.runtime.call import values_in_keys
from tilegen.task import KernelTask, Tiled

H200 = gpu("h200")
DECODE = AttentionProblem.parse("b1 hq64 hkv1 q1 kv131072 d576/512 bf16 latent")
APART = replace(DECODE, latent=False)


@pytest.mark.parametrize(
    "qk, v, expected",
    [
        (576, 512, True),
        (512, 512, True),
        (192, 128, True),
        (40, 40, True),  # padded, but so are the keys
        (48, 32, True),
        (576, 256, False),  # keys come in tiles of 512 and 64 columns
        (24, 16, False),  # one tile of 32
        (64, 128, False),
        (96, 80, False),
    ],
)
def test_tiles_of_values_are_tiles_of_keys(qk: int, v: int, expected: bool) -> None:
    assert shares_columns(qk, v) == expected
    k = torch.zeros(1, 1, 4, max(qk, v))[..., :qk]
    values = torch.as_strided(k, (1, 1, 4, v), k.stride())
    assert values_in_keys(torch.zeros(1, 4, 2, qk), k, values) == expected
    assert not values_in_keys(torch.zeros(1, 1, 2, qk), k, values)  # a head of its own


def test_notation() -> None:
    assert DECODE.latent
    assert DECODE.key == "b1 hq64 hkv1 q1 kv131072 d576/512 bf16 full latent"
    assert AttentionProblem.parse(DECODE.key) == DECODE
    with pytest.raises(Unsupported, match="whose tiles are the first of those of keys"):
        replace(DECODE, head_dim_v=256)
    with pytest.raises(Unsupported, match="several query heads on one key-value head"):
        replace(DECODE, num_heads_kv=2)


def test_gradients_are_those_of_values_apart() -> None:
    assert passes_of(DECODE) == ("forward",)
    backward = kernels_of(APART, H200, "backward")
    assert not any(KERNELS[name].values_in_keys(DECODE) for name in backward)


def test_half_of_the_traffic_is_gone() -> None:
    config = TileConfig.parse("m1h64n64k1024w8s1")
    together, apart = (traffic_of(tiled("fwd_split", one, config)) for one in (DECODE, APART))
    values = 131072 * 512 * 2
    assert apart.read_bytes - together.read_bytes == values
    assert apart.write_bytes == together.write_bytes
    # Floors hold the keys, or keys and values; the rest is small here.
    bounds = [lower_bound_bytes(KernelTask.of("fwd_split", one, H200)) for one in (DECODE, APART)]
    assert bounds[1] - bounds[0] == values
    assert {one.tensor for one in terms_of("fwd", values_in_keys=True)} == {
        *("q", "k", "out", "lse")
    }
    seconds = [propose(KernelTask.of("fwd_split", one, H200), top=1)[0] for one in (DECODE, APART)]
    assert seconds[0].estimate.seconds < 0.85 * seconds[1].estimate.seconds
    assert seconds[0].estimate.dram_bytes < 0.6 * seconds[1].estimate.dram_bytes


def test_a_program_holds_one_tile_for_both() -> None:
    config = TileConfig.parse("m1h64n64k1024w8s2")
    together, apart = (
        footprint(tiled("fwd_split", one, config, "sm_90")) for one in (DECODE, APART)
    )
    assert apart.smem_bytes - together.smem_bytes >= 2 * 64 * 512 * 2


@pytest.mark.parametrize(
    "heads, expected",
    [
        ("hq128 hkv1", (16, 32, 64, 128)),
        ("hq64 hkv1", (16, 32, 64)),
        ("hq48 hkv1", (16, 64)),  # 32 does not divide a group of 48
        ("hq8 hkv1", (8,)),
        ("hq2 hkv1", (2,)),
    ],
)
def test_a_tile_may_hold_a_part_of_a_group(heads: str, expected: tuple[int, ...]) -> None:
    problem = AttentionProblem.parse(f"{heads} q1 kv4096 d512 bf16 latent")
    assert heads_of_tiles(problem) == expected
    assert {item.heads for item in all_configs(task("fwd_split", problem))} == set(expected)
    for item in expected:
        config = TileConfig(block_m=max(1, 16 // item), block_n=64, heads=item, split_kv=512)
        held = tile_heads(config, problem.group_size)
        assert (
            splits_of(tiled("fwd_split", problem, config)).tiles_of_group * held
            == problem.group_size
        )


def test_tiles_of_other_heads_are_ranked_by_their_own_traffic() -> None:
    """A tile of 64 heads loads keys once; four of 16 heads load them four times."""
    all_, part = (
        estimate(Tiled.of("fwd_split", DECODE, H200, TileConfig.parse(f"m1h{heads}n64k1024w8s2")))
        for heads in (64, 16)
    )
    assert part.read_bytes > 3.5 * all_.read_bytes
    ranked = {
        item.config.key: item
        for item in propose(KernelTask.of("fwd_split", DECODE, H200), top=5000)
    }
    for item in (all_, part):
        if item.config.key in ranked:
            assert ranked[item.config.key].estimate.read_bytes == item.read_bytes
    assert sum(item.config.heads == 16 for item in ranked.values()) > 0
    for key, item in ranked.items():
        expected = traffic_of(tiled("fwd_split", DECODE, TileConfig.parse(key)))
        assert item.estimate.read_bytes == expected.read_bytes


@pytest.mark.parametrize(
    "text, chosen, most",
    [
        # The goal of each: published times of values apart, and what the model says of ours.
        ("b1 hq64 hkv1 q1 kv131072 d576/512 bf16 latent", "split_kv", 100e-6),
        ("b1 hq64 hkv1 q1 kv131072 d512 bf16 latent", "split_kv", 100e-6),
        ("b1 hq128 hkv1 q1 kv131072 d576/512 bf16 latent", "split_kv", 200e-6),
    ],
)
def test_predicted_times_of_decoding(text: str, chosen: str, most: float) -> None:
    problem = AttentionProblem.parse(text)
    assert family(problem, H200, "forward") == chosen
    kernels = kernels_of(problem, H200, "forward")
    each = [propose(KernelTask.of(name, problem, H200), top=1)[0] for name in kernels]
    assert sum(one.estimate.seconds for one in each) < most


EMITTED = {
    "fwd": ("hq8 hkv1 q512 kv512 d192/128 bf16 causal latent", "m64n64w4s2"),
    "fwd_split": (
        "hq128 hkv1 q2 kv4096 d576/512 bf16 causal(bottom_right) latent",
        "m1h64n64k1024w8s1t",
    ),
    "fwd_paged": ("hq64 hkv1 q1 kv4096 d576/512 bf16 full page64 latent", "m1h64n32k1024w8s2"),
}


@pytest.mark.parametrize("kernel", EMITTED)
def test_emitted_kernels_have_no_values(kernel: str) -> None:
    text, config = EMITTED[kernel]
    source = render(AttentionProblem.parse(text), TileConfig.parse(config), kernel).source
    assert "v_ptr" not in source
    assert "stride_v" not in source


def test_calls_on_a_cpu() -> None:
    q, k = torch.randn(1, 4, 3, 48), torch.randn(1, 1, 9, 48)
    out = tilegen.attention(q, k, k[..., :32])
    torch.testing.assert_close(out, tilegen.attention(q, k, k[..., :32].clone()))
