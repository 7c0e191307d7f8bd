"""Two levels: the wave model of L2 against a simulated LRU cache."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import sympy as sp

from tests.support.problems import tiled
from tilegen.errors import Unsupported
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.masks.tiles.tile_ranges import tile_ranges
from tilegen.model.dram import (
    Order,
    dram_bytes,
    levels,
    live_heads,
    sweeps,
    touches,
)
from tilegen.model.symbols import C, F, Gcd, H_kv, T_h, n_w
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem
from tilegen.task import Tiled

ORDERS: tuple[Order, ...] = ("head_major", "interleaved")
ARGUMENTS = (H_kv, T_h, n_w, C, F)
TILES = 24
"""Streamed tiles of a head in the simulation."""


@cache
def function(expression: sp.Expr) -> Callable[..., float]:
    return sp.lambdify(ARGUMENTS, expression, modules=[{"Gcd": math.gcd}, "math"])


def evaluate(
    expression: sp.Expr, heads: int, each: int, wave: int, capacity: float = 1, part: float = 1
) -> float:
    return float(function(expression)(heads, each, wave, capacity, part))


def programs(heads: int, each: int, order: Order) -> list[int]:
    """The head of every program."""
    if order == "head_major":
        return [at // each for at in range(heads * each)]
    return [at % heads for at in range(heads * each)]


def waves(heads: int, each: int, in_flight: int, order: Order) -> list[list[int]]:
    all_programs = programs(heads, each, order)
    return [all_programs[at : at + in_flight] for at in range(0, len(all_programs), in_flight)]


class LruCache:
    """Holds `capacity` tiles and counts those that it fetches."""

    def __init__(self, capacity: float) -> None:
        self.fetched = 0
        self._capacity = capacity
        self._tiles: OrderedDict[tuple[int, int], None] = OrderedDict()

    def read(self, tile: tuple[int, int]) -> None:
        if tile in self._tiles:
            self._tiles.move_to_end(tile)
            return
        self.fetched += 1
        self._tiles[tile] = None
        if len(self._tiles) > self._capacity:
            self._tiles.popitem(last=False)


def misses(
    heads: int, each: int, in_flight: int, capacity: float, order: Order, skew: int = 0
) -> float:
    """Tiles that an LRU cache of `capacity` heads fetches, over the tiles of all heads.

    Programs of a wave step through the tiles together, or up to `skew` tiles apart.
    """
    held = LruCache(int(capacity * TILES))
    late = np.random.default_rng(5)
    for wave in waves(heads, each, in_flight, order):
        delays = late.integers(0, skew + 1, len(wave))
        for step in range(TILES + skew):
            for head, delay in zip(wave, delays, strict=True):
                tile = (head, step - int(delay))
                if not 0 <= tile[1] < TILES:
                    continue
                held.read(tile)
    return held.fetched / (heads * TILES)


GRID = list(itertools.product((1, 2, 5, 12), (1, 2, 6, 15), (1, 3, 4, 10, 33)))


@pytest.mark.parametrize("order", ORDERS)
def test_touches_and_live_heads_equal_a_count(order: Order) -> None:
    for heads, each, in_flight in GRID:
        sets = [set(wave) for wave in waves(heads, each, in_flight, order)]
        assert evaluate(touches(order), heads, each, in_flight) == sum(map(len, sets))
        most = max(map(len, sets))
        assert most <= evaluate(live_heads(order), heads, each, in_flight) <= most + 1


@pytest.mark.parametrize("each", [6, 16, 40])
@pytest.mark.parametrize("in_flight", [6, 10, 16, 33, 48])
def test_head_major_sweeps_against_a_simulated_cache(each: int, in_flight: int) -> None:
    """From a cache of half a head to one of six."""
    heads = 16
    rho = sweeps("head_major")
    for capacity in (0.5, 1, 1.25, 1.5, 2, 2.5, 3, 4, 6):
        actual = evaluate(rho, heads, each, in_flight, capacity)
        expected = misses(heads, each, in_flight, capacity, "head_major")
        assert actual == pytest.approx(expected, rel=0.06), capacity


@pytest.mark.parametrize("each", [4, 16])
@pytest.mark.parametrize("in_flight", [3, 6, 10, 16, 33])
def test_interleaved_sweeps_against_a_simulated_cache(each: int, in_flight: int) -> None:
    heads = 12
    rho = sweeps("interleaved")
    for capacity in (0.5, 2, 5, 10.5, 11.5, 12, 20):
        actual = evaluate(rho, heads, each, in_flight, capacity)
        expected = misses(heads, each, in_flight, capacity, "interleaved")
        assert actual == pytest.approx(expected, rel=0.08), capacity


def test_the_wave_model_is_exact_where_heads_and_waves_divide() -> None:
    for each, in_flight in ((16, 4), (16, 8), (8, 32), (16, 16)):
        for capacity in (0.5, 1, 2, 4):
            actual = evaluate(sweeps("head_major"), 8, each, in_flight, capacity)
            assert actual == misses(8, each, in_flight, capacity, "head_major")


def test_programs_slightly_apart_change_little() -> None:
    """While L2 holds half of what one head streams; far less of it, and every program reads."""
    for capacity in (0.5, 1, 2, 4):
        together = evaluate(sweeps("head_major"), 8, 16, 12, capacity)
        apart = misses(8, 16, 12, capacity, "head_major", skew=4)
        assert apart == pytest.approx(together, rel=0.08)
    assert misses(8, 16, 12, 0.1, "head_major", skew=4) > 2 * evaluate(
        sweeps("head_major"), 8, 16, 12, 0.1
    )


def test_interleaving_heads_can_cost_a_sweep_per_program() -> None:
    """64 heads of 16 programs, 64 in flight: each wave reads all heads, or 4 of them."""
    at = 64, 16, 64, 8.0
    assert evaluate(sweeps("head_major"), *at) == 1
    assert evaluate(sweeps("interleaved"), *at) == 16


@pytest.mark.parametrize("order", ORDERS)
def test_a_larger_l2_never_reads_more(order: Order) -> None:
    rho = sweeps(order)
    for heads, each, in_flight in GRID:
        values = [
            evaluate(rho, heads, each, in_flight, capacity)
            for capacity in (0, 0.5, 1, 1.5, 2, 3, 5, 11, 12, 100)
        ]
        assert values == sorted(values, reverse=True)
        assert values[0] == evaluate(touches(order), heads, each, in_flight) / heads
        assert values[-1] == 1


def test_divisors_wait_for_numbers() -> None:
    assert Gcd(T_h, n_w).subs({T_h: 12, n_w: 18}) == 6
    assert Gcd(T_h, n_w).has(T_h)


PARSE = AttentionProblem.parse
TILE = TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)


@pytest.mark.parametrize("kernel", ["fwd", "bwd_dkdv", "bwd_dq", "bwd_preprocess"])
@pytest.mark.parametrize("order", ORDERS)
def test_levels_of_a_problem(kernel: str, order: Order) -> None:
    problem = PARSE("b2 hq32 hkv8 q4096 kv4096 d128 bf16 causal")
    dram = levels(Tiled.of(kernel, problem, gpu("h200"), TILE), order=order)  # type: ignore[arg-type]
    moved = traffic_of(tiled(kernel, problem, TILE))  # type: ignore[arg-type]
    assert dram.l2_bytes == moved.read_bytes + moved.write_bytes
    assert dram.dram_bound_bytes <= dram.dram_bytes <= dram.l2_bytes
    assert dram.sweeps >= 1
    assert dram.live_heads <= 16


def test_numbers_are_those_of_the_formula() -> None:
    """The function for problems evaluates the printed expressions."""
    problem = PARSE("b1 hq24 hkv6 q3000 kv5000 d64 bf16 full")
    spec = replace(gpu("h200"), l2_bytes=12 * 5000 * 128 * 2 // 5, num_sms=50)
    for order in ORDERS:
        dram = levels(Tiled.of("fwd", problem, spec, TILE), order=order)
        at = 6, 4 * 47, dram.in_flight, dram.heads_in_l2, dram.part_of_head
        assert dram.part_of_head == 1
        assert dram.heads_in_l2 == pytest.approx(2.4)
        assert dram.sweeps == pytest.approx(evaluate(sweeps(order), *at))
        assert dram.live_heads == evaluate(live_heads(order), *at[:3])
        rows = 24 * 3000 * (2 * 64 * 2 + 4)
        streamed = math.floor(dram.sweeps * 6 * 5000 * 128 * 2)
        assert dram.dram_bytes == rows + streamed
        assert dram.dram_bytes == dram_bytes(
            Tiled.of("fwd", problem, spec, TILE), in_flight=dram.in_flight, order=order
        )


def delivered_rows(
    ranges: list[tuple[int, int]], heads: int, in_flight: int, capacity: float, order: Order
) -> int:
    """Tiles that an LRU cache of `capacity` tiles fetches when program i of a head streams
    `ranges[i]`."""
    index = {head: 0 for head in range(heads)}
    held = LruCache(capacity)
    for wave in waves(heads, len(ranges), in_flight, order):
        mine: list[tuple[int, int, int]] = []
        for head in wave:
            mine.append((head, *ranges[index[head]]))
            index[head] += 1
        for step in range(max(hi - lo for _, lo, hi in mine)):
            for head, lo, hi in mine:
                if lo + step >= hi:
                    continue
                tile = (head, lo + step)
                held.read(tile)
    return held.fetched


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mask", ["full", "causal", "window(255,0)", "window(1023,0)"])
@pytest.mark.parametrize("l2_heads", [0.2, 1.5, 3, 20])
def test_masks_against_a_simulated_cache(mask: str, l2_heads: float, order: Order) -> None:
    """A wave of 10 of the 64 programs of a head reads what its own rows need.

    Right next to the threshold where heads begin to fit, means say little; these sizes are not.
    """
    problem = PARSE(f"b1 hq8 hkv8 q4096 kv4096 d64 bf16 {mask}")
    once = 4096 * 128 * 2
    spec = replace(gpu("h200"), l2_bytes=int(l2_heads * once))
    tiled_kernel = dram_bytes(Tiled.of("fwd", problem, spec, TILE), in_flight=10, order=order)
    tiled_kernel -= 8 * 4096 * (2 * 64 * 2 + 4)
    tiles = tile_ranges(problem.mask, "rows", seqlen_q=4096, seqlen_kv=4096, block_m=64, block_n=64)
    ends = [(lo, hi) for part in tiles.pieces for lo, hi in part]
    ranges = [
        (
            min(int(lo.flat[i]) for lo, hi in ends if lo.flat[i] < hi.flat[i]),
            max(int(hi.flat[i]) for lo, hi in ends if lo.flat[i] < hi.flat[i]),
        )
        for i in range(tiles.visited.size)
    ]
    fetched = delivered_rows(ranges, 8, 10, l2_heads * 64, order)
    assert tiled_kernel / (64 * 128 * 2) == pytest.approx(fetched, rel=0.25)


def test_interleaving_is_never_better_than_head_major_on_a_small_l2() -> None:
    problem = PARSE("b4 hq32 hkv32 q4096 kv8192 d128 bf16 full")
    spec = replace(gpu("h200"), l2_bytes=8 * 2**20)
    ordered, mixed = (levels(Tiled.of("fwd", problem, spec, TILE), order=order) for order in ORDERS)
    assert mixed.dram_bytes > 4 * ordered.dram_bytes


def test_a_mask_leaves_each_program_less_than_a_sweep() -> None:
    """One program after the other, and no L2: DRAM delivers what crosses to the SMs, no more."""
    problem = PARSE("b1 hq4 hkv4 q4096 kv4096 d256 bf16 window(127,0)")
    spec = replace(gpu("h200"), num_sms=1, l2_bytes=2**16)
    dram = levels(Tiled.of("fwd", problem, spec, TILE))
    assert 1.5 < dram.sweeps < 4
    assert dram.part_of_head < 0.1
    assert dram.dram_bytes <= dram.l2_bytes


def test_kernels_that_stream_in_another_way_are_refused() -> None:
    problem = PARSE("b1 hq4 hkv4 q64 kv64 d64 bf16 full")
    with pytest.raises(Unsupported, match="fwd_scores takes head dims in slices"):
        levels(Tiled.of("fwd_scores", problem, gpu("h200"), TILE))
