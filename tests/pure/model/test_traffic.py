"""Traffic: the terms against a count over a boolean matrix, and how they grow."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import sympy as sp
from numpy.typing import NDArray

from tests.support.problems import PROBLEMS, task, tiled
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.model.symbols import (
    UNMASKED,
    B_c,
    B_r,
    M,
    N,
    N_kv,
    N_q,
    V_kv,
    V_q,
    alpha,
    c,
    d,
    d_qk,
    d_v,
    g,
    n,
)
from tilegen.model.traffic import (
    Traffic,
    terms_of,
    total_bytes,
    total_words,
    traffic_of,
)
from tilegen.model.visits import visits_of
from tilegen.problem import AttentionProblem
from tilegen.theory.optimum import exact_tiles

TILES = [(16, 16), (64, 32), (32, 128), (128, 64)]


@cache
def kept(problem: AttentionProblem) -> NDArray[np.bool_]:
    """The mask as a matrix, from its definition alone."""
    q, kv = problem.seqlen_q, problem.seqlen_kv
    return problem.mask.pairs(q, kv)


def streamed_lengths(
    problem: AttentionProblem, block_m: int, block_n: int, kernel: Kernel
) -> list[list[int]]:
    """For each stationary tile: how long the streamed tiles from its first to its last kept are."""
    matrix = kept(problem)
    if kernel == "bwd_dkdv":
        matrix = matrix.T
        block_m, block_n = block_n, block_m
    length = len(matrix[0])
    result: list[list[int]] = []
    for first in range(0, len(matrix), block_m):
        (live,) = matrix[first : first + block_m].any(axis=0).nonzero()
        tiles = range(live[0] // block_n, live[-1] // block_n + 1) if live.size else range(0)
        result.append([min(block_n, length - tile * block_n) for tile in tiles])
    return result


def counted(
    problem: AttentionProblem, block_m: int, block_n: int, kernel: Kernel
) -> tuple[int, int]:
    """Bytes read and written, summed tile by tile as the kernels load and store them."""
    p, size = problem, problem.element_bytes
    width = (p.head_dim_qk + p.head_dim_v) * size
    rows = p.batch * p.num_heads_q * p.seqlen_q
    kv_rows = p.batch * p.num_heads_kv * p.seqlen_kv
    if kernel == "bwd_preprocess":
        return 2 * rows * p.head_dim_v * size, 4 * rows
    streamed = sum(map(sum, streamed_lengths(p, block_m, block_n, kernel)))
    streamed *= p.batch * p.num_heads_q
    if kernel == "fwd":
        read = rows * p.head_dim_qk * size + streamed * width
        return read, rows * (p.head_dim_v * size + 4)
    if kernel == "bwd_dkdv":
        return kv_rows * width + streamed * (width + 8), kv_rows * width
    return rows * (width + 8) + streamed * width, rows * p.head_dim_qk * size


@pytest.mark.parametrize("kernel", LARGE_CACHE)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_traffic_equals_a_count_over_the_matrix(problem: AttentionProblem, kernel: Kernel) -> None:
    for block_m, block_n in TILES:
        read, written = counted(problem, block_m, block_n, kernel)
        config = TileConfig(block_m=block_m, block_n=block_n)
        assert traffic_of(tiled(kernel, problem, config)) == Traffic(
            read_bytes=read, write_bytes=written
        )


@pytest.mark.parametrize("kernel", ["fwd", "bwd_dkdv", "bwd_dq"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_visits_equal_a_count_over_the_matrix(problem: AttentionProblem, kernel: Kernel) -> None:
    for block_m, block_n in TILES:
        lengths = streamed_lengths(problem, block_m, block_n, kernel)
        actual = visits_of(task(kernel, problem), block_m, block_n)
        assert actual.programs == len(lengths)
        assert actual.tiles == sum(map(len, lengths))
        assert actual.longest == max(map(len, lengths))
        assert actual.rows == sum(map(sum, lengths))
        assert 0 <= actual.partial_tiles <= actual.tiles


def test_a_worked_example() -> None:
    """One causal bf16 head of 8192 x 128: 64 query tiles visit 1 + 2 + ... + 64 KV tiles of 128."""
    problem = AttentionProblem.parse("b1 hq1 hkv1 q8192 kv8192 d128 bf16 causal")
    moved = traffic_of(tiled("fwd", problem, TileConfig(block_m=128, block_n=128)))
    assert moved.read_bytes == 8192 * 256 + (64 * 65 // 2) * 128 * 2 * 256
    assert moved.write_bytes == 8192 * 256 + 8192 * 4
    assert visits_of(task("fwd", problem), 128, 128).partial_tiles == 64


def test_full_attention_example() -> None:
    """64 sweeps over K and V of 8192 rows, and Q once: 270.5 MB."""
    problem = AttentionProblem.parse("b1 hq1 hkv1 q8192 kv8192 d128 bf16 full")
    moved = traffic_of(tiled("fwd", problem, TileConfig(block_m=128, block_n=64)))
    assert moved.read_bytes == 64 * 8192 * 256 * 2 + 8192 * 256
    assert round(moved.read_bytes / 1e6, 1) == 270.5


def test_heads_and_batches_multiply() -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv2 q200 kv200 d64 bf16 causal")
    many = AttentionProblem.parse("b3 hq8 hkv8 q200 kv200 d64 bf16 causal")
    config = TileConfig(block_m=64, block_n=32)
    for kernel in LARGE_CACHE:
        single, all_heads = (
            traffic_of(tiled(kernel, problem, config)),
            traffic_of(tiled(kernel, many, config)),
        )
        assert all_heads.read_bytes == 12 * single.read_bytes
        assert all_heads.write_bytes == 12 * single.write_bytes


def test_a_group_shares_gradients_but_not_loads() -> None:
    """dK and dV are written once per KV head; the forward streams K and V for each query head."""
    mha = AttentionProblem.parse("b1 hq8 hkv8 q256 d64 bf16 full")
    gqa = AttentionProblem.parse("b1 hq8 hkv2 q256 d64 bf16 full")
    config = TileConfig(block_m=64, block_n=64)
    assert traffic_of(tiled("fwd", mha, config)) == traffic_of(tiled("fwd", gqa, config))
    assert (
        traffic_of(tiled("bwd_dkdv", mha, config)).write_bytes
        == 4 * traffic_of(tiled("bwd_dkdv", gqa, config)).write_bytes
    )


def test_counts_beyond_64_bits_stay_exact() -> None:
    problem = AttentionProblem.parse("b1048576 hq1024 hkv1024 q16384 kv16384 d256 fp32 full")
    moved = traffic_of(tiled("fwd", problem, TileConfig(block_m=16, block_n=16)))
    assert moved.read_bytes == 2**20 * 2**10 * (16384 * 256 + 1024 * 16384 * 512) * 4 > 2**63


def elasticity(expression: sp.Expr, symbol: sp.Symbol) -> sp.Expr:
    return sp.simplify(symbol * sp.diff(expression, symbol) / expression)


def leading(kernel: Kernel, block: sp.Expr) -> sp.Expr:
    """Words of the streamed tensors, one head, equal lengths and head dims, without rounding up."""
    smooth = {V_kv: N_q * N_kv / block, V_q: N_q * N_kv / block}
    words = total_words(term for term in terms_of(kernel) if term.words.has(V_kv, V_q))
    return sp.simplify(words.subs(smooth).subs({N_q: N, N_kv: N, d_qk: d, d_v: d}))


@pytest.mark.parametrize("kernel", ["fwd", "bwd_dq"])
def test_growth_of_query_stationary_traffic(kernel: Kernel) -> None:
    """Q and O fill M, so B_r = M / 2d: 4 N^2 d^2 / M words, as FlashAttention, Theorem 2."""
    words = leading(kernel, M / (2 * d))
    assert sp.simplify(words - 4 * g * N**2 * d**2 / M) == 0
    assert [elasticity(words, symbol) for symbol in (M, N, d, g)] == [-1, 2, 2, 1]


def test_growth_of_key_stationary_traffic() -> None:
    """K, V and their gradients fill M, so B_c = M / 4d: 8 N^2 d^2 / M words, and lse and delta."""
    words = leading("bwd_dkdv", M / (4 * d))
    tensors = sp.limit(words / d**2, d, sp.oo)
    assert sp.simplify(tensors - 8 * g * N**2 / M) == 0
    assert [elasticity(words, symbol) for symbol in (M, N)] == [-1, 2]


def test_best_tiles_give_all_of_m_to_the_queries() -> None:
    """At the B_r that fills M, words times M over N^2 d^2 tend to the constant 4, whatever B_c."""
    for streamed in (1, 16, 64):
        rows = exact_tiles("fwd_q_stationary")[B_r].subs({alpha: 1, n: 1, c: streamed})
        rows = rows.subs({d_qk: d, d_v: d})
        words = leading("fwd", rows).subs(g, 1)
        assert sp.limit(words * M / (N**2 * d**2), M, sp.oo).subs(d, 10**9) == pytest.approx(
            4, rel=1e-6
        )
        assert elasticity(words, N) == 2


def test_forward_traffic_does_not_depend_on_the_streamed_tile() -> None:
    words = total_words(terms_of("fwd")).subs(UNMASKED)
    assert sp.diff(words, B_c) == 0
    assert words.has(B_r)


def test_unmasked_terms_are_those_of_the_papers() -> None:
    """R d_qk + T_r N_kv (d_qk + d_v) read, R (d_v + 1) written, per KV head."""
    tiles = g * sp.ceiling(N_q / B_r)
    read = sum(t.words for t in terms_of("fwd") if t.direction == "read").subs(UNMASKED)
    written = sum(t.words for t in terms_of("fwd") if t.direction == "write")
    assert sp.expand(read - (g * N_q * d_qk + tiles * N_kv * (d_qk + d_v))) == 0
    assert sp.expand(written - g * N_q * (d_v + 1)) == 0


@pytest.mark.parametrize("kernel", LARGE_CACHE)
def test_symbols_and_numbers_agree(kernel: Kernel) -> None:
    """The terms people read, evaluated by substitution, against `traffic`."""
    problem = AttentionProblem.parse("b2 hq6 hkv2 q200 kv333 d96/40 bf16 full")
    config = TileConfig(block_m=64, block_n=32)
    values = {
        **{g: 3, N_q: 200, N_kv: 333, d_qk: 96, d_v: 40, B_r: 64, B_c: 32},
        sp.Symbol("e", positive=True): 2,
    }
    total = total_bytes(terms_of(kernel)).subs(UNMASKED).subs(values) * 4
    moved = traffic_of(tiled(kernel, problem, config))
    assert total == moved.read_bytes + moved.write_bytes
    assert math.gcd(moved.read_bytes, 2) == 2


def test_bytes_that_64_bits_do_not_hold_are_exact() -> None:
    heads, length, tiles = 2**40, 2**20, 2**13
    problem = AttentionProblem.parse("b1048576 hq1048576 q1048576 d128 bf16 full")
    moved = traffic_of(tiled("fwd", problem, TileConfig.parse("m128n64w4s2")))
    assert moved.read_bytes == heads * 2 * 128 * (length + 2 * tiles * length) > 2**64
    assert moved.write_bytes == heads * length * (2 * 128 + 4)
