"""Bounds: regimes, constants, masks, and that no kernel beats them."""

from __future__ import annotations

import math

import pytest
import sympy as sp

from tests.support.problems import PROBLEMS, tiled
from tilegen.gpus.spec import catalogue, gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.kernels.spec import Direction
from tilegen.model import mask_size as mask_size_module
from tilegen.model.bounds import (
    bounds_of,
    largest_subgrid,
    lower_bound_bytes,
    partition_bound,
    product_bound,
)
from tilegen.model.mask_size import mask_size
from tilegen.model.symbols import (
    H_kv,
    M,
    N,
    N_kv,
    N_q,
    P,
    alpha,
    d,
    d_qk,
    d_v,
    e,
    g,
    kappa,
    n_kv,
    n_q,
    nnz,
    u,
    w,
    w_b,
    x,
)
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask
from tilegen.theory.optimum import crossover, leading_words
from tilegen.theory.regimes import (
    critical_head_dim,
    large_cache_complexity,
    small_cache_complexity,
)

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
ONE_DENSE_HEAD = {H_kv: 1, g: 1, P: 1, nnz: N**2, w: N, n_q: N, n_kv: N, N_q: N, N_kv: N} | {
    d_qk: d,
    d_v: d,
    u: N / 2,
    w_b: 2 * N - 1,
}


def least_words(direction: Direction) -> sp.Expr:
    """Return the largest bound in words: all words are of fp32 if elements have four bytes."""
    return sp.Max(*(bound.subs(e, 4) / 4 for bound in bounds_of(direction).values()))


def elasticity(expression: sp.Expr, symbol: sp.Symbol) -> sp.Expr:
    return sp.simplify(symbol * sp.diff(expression, symbol) / expression)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_regimes_meet_at_d_squared(direction: Direction) -> None:
    large, small = large_cache_complexity(direction), small_cache_complexity(direction)
    assert sp.simplify((large - small).subs(M, d**2)) == 0
    assert (
        sp.simplify(large.subs(M, d**2) - (N**2 + (N * d if direction == "backward" else 0))) == 0
    )
    # each is the smaller one on its side
    assert (large < small).subs({N: 4096, d: 128, M: 2 * 128**2})
    assert (small < large).subs({N: 4096, d: 128, M: 128**2 / 2})


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_growth_of_the_complexities(direction: Direction) -> None:
    assert elasticity(large_cache_complexity(direction), M) == -1
    assert elasticity(small_cache_complexity(direction), M) == sp.Rational(-1, 2)
    for regime in (large_cache_complexity, small_cache_complexity):
        assert sp.limit(elasticity(regime(direction), N), N, sp.oo) == 2


def test_partition_bound_of_one_dense_head() -> None:
    dense = partition_bound().subs({H_kv: 1, g: 1, P: 1, nnz: N**2, d_qk: d})
    unmasked = dense.replace(sp.Min, lambda *args: next(a for a in args if not a.has(w)))
    assert sp.simplify(unmasked - (N**2 * d**2 / (M + 4 * d**2) - M)) == 0


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("mask", ["full", "causal", "window(0,0)", "window(2,0)", "window(1,2)"])
def test_largest_subgrid_against_brute_force(mask: str, group: int) -> None:
    """All choices of query rows (of a whole group) and key rows of a 5 x 5 mask."""
    small = AttentionProblem.parse(f"hq1 q1 d64 bf16 {mask}").mask
    length, width = 5, mask_size(small, 5, 5).degree
    pairs = small.pairs(length, length).tolist()
    rows = [sum(pair << j for j, pair in enumerate(row)) for row in pairs] * group
    most = [0] * (length * (group + 1) + 1)
    for chosen in range(1 << length):  # key rows; the best query rows are those that see most
        seen = sorted(((row & chosen).bit_count() for row in rows), reverse=True)
        for count in range(len(rows) + 1):
            total = chosen.bit_count() + count
            most[total] = max(most[total], sum(seen[:count]))
    bound = sp.lambdify((M, d_qk, w, g), largest_subgrid(), "math")
    limits = [bound(total / 2, 1, width, group) for total in range(len(most))]
    assert all(found <= limit for found, limit in zip(most, limits, strict=True))
    # and it is no looser than rounding makes it, where rows and columns are plenty
    if mask == "full":
        assert most[4] == limits[4] == 4
    if mask == "window(0,0)" and group == 1:
        assert most[6] == limits[6] == 3


def test_product_bound_of_one_dense_head() -> None:
    dense = product_bound().subs({H_kv: 1, g: 1, P: 1, nnz: N**2, d_qk: d})
    assert sp.simplify(dense - (2 * N**2 * d / sp.sqrt(M) - N**2 - 2 * M)) == 0


@pytest.mark.parametrize(
    "words_per_square_dim, ratio",
    [(1 / 64, 2.2), (1 / 4, 3.0), (1, 4.0), (4, 8.0), (16, 5.0), (256, 4.06)],
)
def test_distance_between_bounds_and_schedules(words_per_square_dim: float, ratio: float) -> None:
    """The gap to the best known schedule is at most eightfold, and largest at M = 4 d^2."""
    at = 1 / math.sqrt(words_per_square_dim)
    best = min(
        float(leading_words(schedule).subs({alpha: 1, x: at}))
        for schedule in ("fwd_q_stationary", "fwd_small_cache")
    )
    n, dim = 2**40, 128
    bound = least_words("forward").subs(ONE_DENSE_HEAD).subs({N: n, d: dim, M: dim**2 / at**2})
    assert best / float(bound / n**2) == pytest.approx(ratio, rel=0.02)


@pytest.mark.slow
def test_floors() -> None:
    """Forward 4Nd + N; backward 8Nd + N: all inputs once, all outputs once."""
    for direction, expected in (("forward", 4 * N * d + N), ("backward", 8 * N * d + N)):
        floor = least_words(direction).subs(ONE_DENSE_HEAD)
        assert (floor - expected).subs({M: 10**30, N: 8192, d: 128}) == 0


@pytest.mark.parametrize(
    "large, small, values, expected",
    [
        ("fwd_q_stationary", "fwd_small_cache", {alpha: 1}, (1 + math.sqrt(2)) / 2),
        ("fwd_q_stationary", "fwd_small_cache", {alpha: 2}, 1.095),
        ("bwd_two_pass", "bwd_small_cache", {alpha: 1}, 1 / math.sqrt(1.127)),
        ("bwd_two_pass", "bwd_small_cache", {alpha: 2}, 0.878),
        ("bwd_fused", "bwd_small_cache", {alpha: 1, kappa: 2}, 1 / math.sqrt(1.395)),
        ("bwd_fused", "bwd_small_cache", {alpha: 1, kappa: 1}, 1 / math.sqrt(0.878)),
        ("bwd_fused", "bwd_small_cache", {alpha: 2, kappa: 1}, 0.755),
    ],
)
def test_dividing_points(large: str, small: str, values: dict, expected: float) -> None:
    at = crossover(large, small).subs(values)
    assert float(at) == pytest.approx(expected, rel=1e-3)
    gap = (leading_words(large) - leading_words(small)).subs(values)
    assert float(gap.subs(x, at)) == pytest.approx(0, abs=1e-9)
    assert gap.subs(x, at * 0.9) < 0 < gap.subs(x, at * 1.1)


@pytest.mark.parametrize(
    "schedule, values, expected",
    [
        ("fwd_q_stationary", {alpha: 1}, 4),
        ("fwd_q_stationary", {alpha: 2}, 6),
        ("bwd_two_pass", {alpha: 1}, 14),
        ("bwd_two_pass", {alpha: 2}, 20),
        ("bwd_fused", {alpha: 1, kappa: 2}, 16),
        ("bwd_fused", {alpha: 1, kappa: 1}, 12),
        ("bwd_fused", {alpha: 2, kappa: 1}, 24),
    ],
)
def test_constants_of_the_large_cache_schedules(schedule: str, values: dict, expected: int) -> None:
    assert sp.expand(leading_words(schedule).subs(values)) == expected * x**2


@pytest.mark.parametrize(
    "name, forward, backward",
    [
        ("t4", 443, 355),
        ("v100", 465, 373),
        ("a100", 507, 407),
        ("rtx4090", 467, 374),
        ("rtx5090", 467, 374),
        ("h100", 545, 437),
        ("h200", 545, 437),
        ("b200", 674, 540),
        ("mi300x", 595, 477),
    ],
)
def test_critical_head_dims(name: str, forward: int, backward: int) -> None:
    assert critical_head_dim(gpu(name), "forward") == pytest.approx(forward, abs=0.6)
    assert critical_head_dim(gpu(name), "backward") == pytest.approx(backward, abs=0.6)


def test_every_head_dim_up_to_256_is_large_cache() -> None:
    assert all(critical_head_dim(spec, "backward") > 256 for spec in catalogue())


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_mask_size_equals_a_count(problem: AttentionProblem) -> None:
    q, kv = problem.seqlen_q, problem.seqlen_kv
    matrix = problem.mask.pairs(q, kv).tolist()
    rows, columns = (
        [sum(row) for row in matrix],
        [sum(column) for column in zip(*matrix, strict=True)],
    )
    size = mask_size(problem.mask, q, kv)
    assert (size.entries, size.rows, size.columns, size.degree) == (
        sum(rows),
        sum(map(bool, rows)),
        sum(map(bool, columns)),
        max(*rows, *columns),
    )


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_mask_size_in_bands_is_on_the_safe_side(
    problem: AttentionProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask, q, kv = problem.mask, problem.seqlen_q, problem.seqlen_kv
    exact = mask_size(mask, q, kv)
    monkeypatch.setattr(mask_size_module, "_MAX_BANDS", 12)
    banded = mask_size(mask, q, kv)
    assert banded.entries <= exact.entries
    assert banded.rows <= exact.rows
    assert banded.columns <= exact.columns
    assert banded.degree >= exact.degree


@pytest.mark.parametrize("kernel", LARGE_CACHE)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_no_kernel_beats_the_bound(problem: AttentionProblem, kernel: Kernel) -> None:
    for spec in (gpu("h200"), gpu("t4"), gpu("h200", fast_memory=4096)):
        bound = lower_bound_bytes(KernelTask.of(kernel, problem, spec))
        assert bound > 0
        for block in (16, 128):
            moved = traffic_of(tiled(kernel, problem, TileConfig(block_m=block, block_n=block)))
            assert bound <= moved.read_bytes + moved.write_bytes


@pytest.mark.parametrize("mask", ["full", "causal", "window(511,0)"])
@pytest.mark.parametrize("fast_memory", [4096, 65536, None])
def test_no_long_problem_beats_the_bound(mask: str, fast_memory: int | None) -> None:
    problem = AttentionProblem.parse(f"b1 hq32 hkv4 q131072 d128 bf16 {mask}")
    spec = gpu("h200", fast_memory=fast_memory)
    moved = traffic_of(tiled("fwd", problem, TileConfig(block_m=256, block_n=16)))
    bound = lower_bound_bytes(KernelTask.of("fwd", problem, spec))
    assert bound <= moved.read_bytes + moved.write_bytes
    assert bound > 0.9 * 131072 * (2 * 4 + 2 * 32) * 128 * 2


def test_a_window_lowers_the_bound_to_the_floor() -> None:
    """Where a band is narrower than M / d, tiles of any size read everything about once."""
    text = "b1 hq32 hkv32 q131072 d128 bf16 "
    full, window = (
        lower_bound_bytes(KernelTask.of("fwd", AttentionProblem.parse(text + mask), gpu("h200")))
        for mask in ("full", "window(127,0)")
    )
    floor = 131072 * 32 * (4 * 128 * 2 + 4)
    assert window == pytest.approx(floor, rel=0.01)
    assert full > 5 * window


def test_more_memory_never_raises_the_bound() -> None:
    problem = AttentionProblem.parse("b1 hq32 hkv32 q65536 d256 bf16 causal")
    sizes = [2**power for power in range(12, 24)]
    values = [
        lower_bound_bytes(KernelTask.of("fwd", problem, gpu("h200", fast_memory=size)))
        for size in sizes
    ]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]
