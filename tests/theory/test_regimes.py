"""Regimes: sparse results of the papers, dividing points, and the device table."""

from __future__ import annotations

import math

import pytest
import sympy as sp

from tilegen.gpus.spec import catalogue, gpu
from tilegen.kernels.spec import Direction
from tilegen.model.symbols import (
    Z_A,
    Z_AX,
    Z_S,
    Z_X,
    M,
    N,
    N_kv,
    N_q,
    V_kv,
    Z,
    alpha,
    b,
    d,
    d_qk,
    d_v,
    g,
    kappa,
    s,
    w,
    x,
)
from tilegen.theory.optimum import leading_words
from tilegen.theory.patterns import kept_entries
from tilegen.theory.regimes import (
    LARGE_CACHE,
    SMALL_CACHE,
    device_regimes,
    dividing_bytes,
    dividing_memory,
    large_cache_complexity,
    small_cache_complexity,
    worst_case_over_instances,
)
from tilegen.theory.schedules import SCHEDULES


def test_the_sparse_theorem_contains_the_dense_one() -> None:
    dense = {Z: N * d, Z_A: N * d, Z_X: d**2, Z_AX: N * d, Z_S: N**2}
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        terms = [sp.powdenest(t.subs(dense)) for t in worst_case_over_instances(direction).args]
        for complexity in (large_cache_complexity(direction), small_cache_complexity(direction)):
            assert any(sp.simplify(term - complexity) == 0 for term in terms)


LENGTH, WIDTH, BLOCK, MEMORY = 65536, 128, 128, 33408
TILES = LENGTH // BLOCK


def window(width: int) -> tuple[float, float]:
    across = 1 + math.ceil((width - 1) / BLOCK)
    tiles = sum(min(t + 1, across) for t in range(TILES))
    return float(tiles), float(kept_entries("window").subs({N: LENGTH, w: width}))


def blocks(side: int) -> tuple[float, float]:
    kept = float(kept_entries("block_diagonal").subs({N: LENGTH, b: side}))
    return kept / BLOCK**2, kept


@pytest.mark.parametrize(
    "tiles, entries, ratio",
    [
        (TILES**2, LENGTH**2, 1.43),
        (
            TILES * (TILES + 1) / 2,
            float(kept_entries("causal").subs(N, LENGTH)),
            1.02,
        ),
        (*window(4096), 0.37),
        (*window(512), 0.19),
        (*blocks(128), 0.13),
        (*blocks(2048), 0.27),
        (TILES**2 / 16, LENGTH**2 / 16, 0.37),  # random blocks
        (TILES**2, LENGTH**2 / 16, 5.7),  # random entries: every tile is visited
        (TILES**2, LENGTH**2 / 1024, 46),
    ],
)
def test_the_sparse_theorem_is_no_bound_for_one_mask(
    tiles: float, entries: float, ratio: float
) -> None:
    """What block-sparse FlashAttention-2 moves, over the formula: far below 1 for some masks."""
    numbers = {g: 1, N_q: LENGTH, N_kv: LENGTH, d_qk: WIDTH, d_v: WIDTH, V_kv: tiles * BLOCK}
    moved = float(SCHEDULES["fwd_q_stationary"].words().subs(numbers))
    values = {Z: 2 * LENGTH * WIDTH, Z_S: entries, M: MEMORY}
    formula = float(worst_case_over_instances("forward").subs(values))
    assert moved / formula == pytest.approx(ratio, rel=0.04)


def test_dividing_points_in_words() -> None:
    forward = dividing_memory("fwd_q_stationary", "fwd_small_cache").subs(alpha, 1)
    assert float(forward / d**2) == pytest.approx(0.6863, abs=1e-4)
    sparse = dividing_memory("fwd_q_stationary", "fwd_sparse_small_cache").subs(alpha, 1)
    assert sp.simplify(sparse - forward / s) == 0
    backward = dividing_memory("bwd_fused", "bwd_small_cache").subs({alpha: 1, kappa: 2})
    assert float(backward / d**2) == pytest.approx(1.395, abs=1e-3)


def test_dividing_points_in_bytes_depend_on_the_dtype() -> None:
    """Wider words: more bytes; and accumulators weigh less beside them."""
    pair = "fwd_q_stationary", "fwd_small_cache"
    half = dividing_bytes(*pair, head_dim=128, element_bytes=2)
    single = dividing_bytes(*pair, head_dim=128, element_bytes=4)
    assert half == pytest.approx(2 * 128**2 / 1.0947**2, rel=1e-3)
    assert single == pytest.approx(4 * 128**2 * 0.6863, rel=1e-3)
    sparse = dividing_bytes(
        "fwd_q_stationary", "fwd_sparse_small_cache", head_dim=128, element_bytes=2, density=0.25
    )
    assert sparse == pytest.approx(4 * half)
    fused = "bwd_fused", "bwd_small_cache"
    once, twice = (
        dividing_bytes(*fused, head_dim=64, element_bytes=2, kappa_cost=cost) for cost in (1, 2)
    )
    assert once == pytest.approx(2 * 64**2 / 0.755**2, rel=2e-3)
    assert twice > once


HEAD_DIMS = [  # sqrt(M) of shared memory and of everything; dividing points of both directions
    ("v100", 221, 338, 465, 373),
    ("t4", 181, 313, 443, 355),
    ("a100", 288, 385, 507, 407),
    ("rtx3090", 225, 340, 467, 374),
    ("l4", 225, 340, 467, 374),
    ("rtx4090", 225, 340, 467, 374),
    ("h100-pcie", 340, 426, 545, 437),
    ("h100", 340, 426, 545, 437),
    ("h200", 340, 426, 545, 437),
    ("b200", 340, 497, 674, 540),
    ("rtx5090", 225, 340, 467, 374),
    ("mi300x", 181, 404, 595, 477),
    ("mi350x", 286, 461, 642, 515),
]


@pytest.mark.parametrize("name, smem, on_chip, forward, backward", HEAD_DIMS)
def test_device_table_with_two_byte_inputs(
    name: str, smem: int, on_chip: int, forward: int, backward: int
) -> None:
    (row,) = device_regimes((2,), (gpu(name),))
    assert row.head_dim_smem == pytest.approx(smem, abs=1)
    assert row.head_dim_on_chip == pytest.approx(on_chip, abs=1.1)
    assert row.dividing_head_dims["forward"] == pytest.approx(forward, abs=0.6)
    assert row.dividing_head_dims["backward"] == pytest.approx(backward, abs=0.6)


def test_device_table_covers_the_catalogue() -> None:
    rows = device_regimes()
    assert [(row.gpu, row.element_bytes) for row in rows] == [
        (spec.name, size) for spec in catalogue() for size in (2, 4)
    ]
    for row in rows:
        for direction, head_dim in row.dividing_head_dims.items():
            spec = gpu(row.gpu)
            at = head_dim / (spec.on_chip_bytes / row.element_bytes) ** 0.5
            large, small = (
                float(leading_words(names[direction]).subs({alpha: 4 / row.element_bytes, x: at}))
                for names in (LARGE_CACHE, SMALL_CACHE)
            )
            assert large == pytest.approx(small)
    half, single = rows[0], rows[1]
    assert half.smem_words == 2 * single.smem_words
    assert half.on_chip_words == 2 * single.on_chip_words


def test_head_dim_512_is_small_cache_backward_nearly_everywhere() -> None:
    large = {r.gpu for r in device_regimes((2,)) if r.dividing_head_dims["backward"] > 512}
    assert large == {"b200", "mi350x"}
    wide = {r.gpu for r in device_regimes((2,)) if r.dividing_head_dims["forward"] > 512}
    assert wide >= {"h100", "h200", "b200", "mi300x"}
    assert not wide & {"v100", "t4", "a100", "l4", "rtx3090", "rtx4090", "rtx5090"}


def test_the_authors_example_depends_on_the_dtype() -> None:
    """GTX 1060, 48 KB, d = 128: the papers' M = d^2 makes it small cache in fp32 only."""
    words = {size: 48 * 1024 / size for size in (2, 4)}
    assert words[4] < 128**2 < words[2]
    assert math.sqrt(words[2]) > 128
