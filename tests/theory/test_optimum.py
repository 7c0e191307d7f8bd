"""Best tiles: every constant of the papers and ours, derived; and against exhaustive search."""

from __future__ import annotations

import pytest
import sympy as sp

from tilegen.model.symbols import (
    UNMASKED,
    B_c,
    B_e,
    B_p,
    B_r,
    M,
    N_kv,
    N_q,
    alpha,
    c,
    d,
    d_qk,
    d_v,
    g,
    kappa,
    n,
    s,
    x,
)
from tilegen.theory.optimum import (
    crossover,
    exact_tiles,
    leading_tiles,
    leading_words,
    narrow_words,
    optimal_tiles,
    product_tiles,
)
from tilegen.theory.schedules import SCHEDULES, smooth

SQRT_S, ROOT = sp.sqrt(s), sp.sqrt(alpha)

WORDS = [
    # all words equal, as in the papers
    ("fwd_q_stationary", {alpha: 1}, 4 * x**2),
    ("fwd_split_kv", {alpha: 1}, 4 * x**2),
    ("fwd_q_stationary_mla", {alpha: 1}, 2 * x**2),
    ("fwd_kv_stationary", {alpha: 1}, 6 * x**2),
    ("fwd_kv_stationary_fa1", {alpha: 1}, 6 * x**2),
    ("fwd_s_stationary", {alpha: 1}, 2 * sp.sqrt(6) * x),
    ("fwd_o_stationary", {alpha: 1}, 2 * x**2 + 2 * sp.sqrt(2) * x),
    ("fwd_v_split", {alpha: 1}, 4 * x**2),
    ("fwd_small_cache", {alpha: 1}, 1 + 4 * x),
    ("fwd_small_cache_fp32", {alpha: 1}, 1 + 4 * x),
    ("fwd_sparse_small_cache", {alpha: 1}, s + 4 * x * SQRT_S),
    ("fwd_saha_ye", {alpha: 1}, 1 + 4 * sp.sqrt(3) * x),
    ("bwd_dkdv", {alpha: 1}, 8 * x**2),
    ("bwd_dq", {alpha: 1}, 6 * x**2),
    ("bwd_two_pass", {alpha: 1}, 14 * x**2),
    ("bwd_fused", {alpha: 1, kappa: 2}, 16 * x**2),
    ("bwd_fused", {alpha: 1, kappa: 1}, 12 * x**2),
    ("bwd_fused_q_stationary", {alpha: 1, kappa: 2}, 18 * x**2),
    ("bwd_fused_q_stationary", {alpha: 1, kappa: 1}, 12 * x**2),
    ("bwd_small_cache", {alpha: 1}, 3 + 10 * x),
    # accumulators of alpha words
    ("fwd_q_stationary", {}, 2 * (1 + alpha) * x**2),
    ("fwd_q_stationary", {alpha: 2}, 6 * x**2),
    ("fwd_small_cache", {}, 1 + 4 * ROOT * x),
    ("fwd_small_cache_fp32", {}, alpha + 2 * (ROOT + alpha) * x),
    ("fwd_s_stationary", {alpha: 2}, 4 * sp.sqrt(5) * x),
    ("bwd_dkdv", {}, (4 + 4 * alpha) * x**2),
    ("bwd_dq", {}, (4 + 2 * alpha) * x**2),
    ("bwd_two_pass", {alpha: 2}, 20 * x**2),
    ("bwd_fused", {}, (2 + alpha * kappa) * (2 + 2 * alpha) * x**2),
    ("bwd_fused", {alpha: 2, kappa: 1}, 24 * x**2),
    ("bwd_small_cache", {}, 3 + 10 * ROOT * x),
]


@pytest.mark.parametrize("schedule, values, expected", WORDS)
def test_words_at_the_best_tiles(schedule: str, values: dict, expected: sp.Expr) -> None:
    assert sp.simplify(leading_words(schedule).subs(values) - expected) == 0


@pytest.mark.parametrize(
    "large, small, values, expected",
    [
        ("fwd_q_stationary", "fwd_small_cache", {alpha: 1}, 0.6863),
        ("bwd_fused", "bwd_small_cache", {alpha: 1, kappa: 2}, 1.395),
        ("bwd_two_pass", "bwd_small_cache", {alpha: 1}, 1.127),
        ("bwd_fused", "bwd_small_cache", {alpha: 1, kappa: 1}, 0.878),
    ],
)
def test_crossovers_in_words(large: str, small: str, values: dict, expected: float) -> None:
    """M / d^2 below which the small-cache schedule moves less."""
    assert float(1 / crossover(large, small).subs(values) ** 2) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize(
    "large, small, values, expected",
    [
        ("fwd_q_stationary", "fwd_small_cache", {}, 1.095),
        ("bwd_two_pass", "bwd_small_cache", {}, 0.878),
        ("bwd_fused", "bwd_small_cache", {kappa: 1}, 0.755),
    ],
)
def test_crossovers_with_two_byte_inputs(
    large: str, small: str, values: dict, expected: float
) -> None:
    at = crossover(large, small).subs({alpha: 2} | values)
    assert float(at) == pytest.approx(expected, abs=5e-4)


def test_exact_crossover_of_the_forward() -> None:
    at = crossover("fwd_q_stationary", "fwd_small_cache").subs(alpha, 1)
    assert sp.simplify(at - (1 + sp.sqrt(2)) / 2) == 0
    # at that point the S-stationary forward is close behind both: 5.91 against 5.83
    values = {alpha: 1, x: at}
    assert float(leading_words("fwd_q_stationary").subs(values)) == pytest.approx(5.83, abs=5e-3)
    assert float(leading_words("fwd_s_stationary").subs(values)) == pytest.approx(5.91, abs=5e-3)


def test_sparse_crossover_is_the_dense_one_over_the_density() -> None:
    dense = crossover("fwd_q_stationary", "fwd_small_cache").subs(alpha, 1)
    sparse = crossover("fwd_q_stationary", "fwd_sparse_small_cache").subs(alpha, 1)
    assert sp.simplify(sparse - dense * SQRT_S) == 0
    assert float(1 / sparse.subs(s, 0.01) ** 2) == pytest.approx(68.6, abs=0.05)


def test_memory_belongs_to_block_m() -> None:
    """P1: B_c sits at its bound, and B_r takes what one K and V tile and S leave."""
    tiles = exact_tiles("fwd_q_stationary")
    assert tiles[B_c] == c
    expected = (M - n * c * (d_qk + d_v)) / (d_qk + d_v + 2 + c)
    assert sp.simplify(tiles[B_r].subs(alpha, 1) - expected) == 0


def test_words_at_block_m() -> None:
    """P1: W* = R N_kv (d_qk + d_v) / B_r* + R (d_qk + d_v + 1)."""
    tiles = exact_tiles("fwd_q_stationary")
    words = smooth(SCHEDULES["fwd_q_stationary"].words().subs(UNMASKED)).subs(tiles)
    width, rows = d_qk + d_v, g * N_q
    assert sp.simplify(words - (rows * N_kv * width / tiles[B_r] + rows * (width + 1))) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule, side",
    [
        ("fwd_q_stationary", B_r),
        ("fwd_q_stationary_mla", B_r),
        ("fwd_split_kv", B_r),
        ("fwd_kv_stationary", B_c),
        ("bwd_dkdv", B_c),
        ("bwd_dq", B_r),
        ("bwd_fused", B_c),
        ("bwd_fused_q_stationary", B_r),
        ("bwd_fa1", B_c),
    ],
)
def test_leading_words_are_the_limit_at_the_exact_tiles(schedule: str, side: sp.Symbol) -> None:
    """M to infinity with d = x sqrt(M): the small terms that `leading_words` drops do vanish."""
    root = sp.Symbol("root_M", positive=True)
    tiles = exact_tiles(schedule)
    assert all(tiles[other] == c for other in tiles if other != side)
    words = SCHEDULES[schedule].per_score().subs(tiles)
    words = words.subs({d_qk: d, d_v: d}).subs({d: x * root, M: root**2})
    assert sp.simplify(sp.limit(sp.together(words), root, sp.oo) - leading_words(schedule)) == 0


def test_memory_belongs_to_block_n_where_keys_stay() -> None:
    """P2: the same with the roles exchanged, B_c = M / 2d."""
    tiles = exact_tiles("fwd_kv_stationary")
    assert tiles[B_r] == c
    expected = (M - n * c * (d_qk + d_v + 2)) / (d_qk + d_v + c)
    assert sp.simplify(tiles[B_c].subs(alpha, 1) - expected) == 0
    assert leading_tiles("fwd_kv_stationary") == {B_c: 1 / (2 * x)}


def test_the_printed_tiles_of_fa1_do_not_fit() -> None:
    """B_c = M / 4d and B_r = min(M / 4d, d) take M (1 + M / 16 d^2) words while M <= 4 d^2."""
    held = SCHEDULES["fwd_kv_stationary_fa1"].footprint.subs({d_qk: d, d_v: d, n: 1})
    side = M / (4 * d)
    assert sp.expand(held.subs({B_c: side, B_r: side})).coeff(M, 2) == 1 / (16 * d**2)
    at = held.subs({B_c: side, B_r: side, M: 4 * d**2, d: 128}) / (4 * 128**2)
    assert float(at) == pytest.approx(1.26, abs=0.01)
    for ratio in (8, 16, 64):
        room = held.subs({B_c: side, B_r: d, M: ratio * d**2, d: 128}) / (ratio * 128**2)
        assert 0.5 < float(room) <= 1.01


def test_product_tiles_are_square() -> None:
    """P3: B_r = B_c = sqrt(M + c^2) - c, so W = 2 N_q N_kv d / (sqrt(M + c^2) - c)."""
    for side in (B_r, B_c):
        assert sp.simplify(product_tiles()[side] - (sp.sqrt(M + c**2) - c)) == 0
    words = N_q * N_kv * d * (1 / B_r + 1 / B_c)
    at = words.subs(product_tiles()).subs(c, 1)
    assert sp.limit(at * sp.sqrt(M), M, sp.oo) == 2 * N_q * N_kv * d


def test_square_chunks_give_a_third_of_memory() -> None:
    """Three blocks of side B, as Saha and Ye print them: B = sqrt(M / 3)."""
    assert leading_tiles("fwd_saha_ye").popitem()[1].subs(alpha, 1) == 1 / sp.sqrt(3)


@pytest.mark.slow
def test_s_stationary_tiles() -> None:
    """P4: B_r = sqrt(M (d_qk + d_v) / (d_qk + 2 d_v))."""
    words = (d_qk + 2 * d_v) / B_c + (d_qk + d_v) / B_r
    best = optimal_tiles(words, [B_r * B_c], (B_r, B_c))
    assert sp.simplify(best.tiles[B_r] - sp.sqrt(M * (d_qk + d_v) / (d_qk + 2 * d_v))) == 0
    expected = 2 * sp.sqrt((d_qk + d_v) * (d_qk + 2 * d_v) / M)
    assert sp.simplify((words.subs(best.tiles) / expected) ** 2) == 1
    equal = sp.sqrt(sp.Rational(2, 3))
    assert sp.simplify(leading_tiles("fwd_s_stationary")[B_r].subs(alpha, 1) - equal) == 0


def test_o_stationary_tiles() -> None:
    """P5: B_c = sqrt(M / 2)."""
    assert leading_tiles("fwd_o_stationary")[B_c].subs(alpha, 1) == 1 / sp.sqrt(2)


def test_sparse_tiles() -> None:
    """Phase 1: sqrt(M / s) square; phase 2: B_e = sqrt(s M), which is at most d iff M <= d^2/s."""
    tiles = {k: v.subs(alpha, 1) for k, v in leading_tiles("fwd_sparse_small_cache").items()}
    assert tiles == {B_r: 1 / SQRT_S, B_c: 1 / SQRT_S, B_p: 1 / SQRT_S, B_e: SQRT_S}
    assert narrow_words("fwd_sparse_small_cache")[1].subs(alpha, 1) == SQRT_S


def test_narrow_tiles_move_a_little_more() -> None:
    """Where M > d^2 an output tile as wide as the head dim is all there is."""
    for schedule, expected in (
        ("fwd_small_cache", 2 + 2 * x + x**2),
        ("bwd_small_cache", 6 + 4 * x + 3 * x**2),
    ):
        words, below = (value.subs(alpha, 1) for value in narrow_words(schedule))
        assert below == 1
        assert sp.expand(words - expected) == 0
        wide = leading_words(schedule).subs(alpha, 1)
        assert sp.simplify((words - wide).subs(x, 1)) == 0
        assert (words - wide).subs(x, 0.8) > 0
    with pytest.raises(ValueError, match="no free B_e"):
        narrow_words("fwd_q_stationary")


def test_crossovers_with_tiles_no_wider_than_the_head_dim() -> None:
    """Backward they lie where M > d^2, so B_e = d: 1.383 and 1.126, not 1.395 and 1.127."""
    for large, cost, expected in (("bwd_fused", 2, 1.383), ("bwd_two_pass", 1, 1.126)):
        at = crossover(large, "bwd_small_cache", narrow=True).subs({alpha: 1, kappa: cost})
        assert float(1 / at**2) == pytest.approx(expected, abs=5e-4)
        assert at < narrow_words("bwd_small_cache")[1].subs(alpha, 1)


@pytest.mark.slow
def test_multipliers_are_the_value_of_memory() -> None:
    """The multiplier of the constraint is -dW*/dM."""
    words = N_q * N_kv * d_qk * (1 / B_r + 1 / B_c)
    best = optimal_tiles(words, [B_r * B_c + c * (B_r + B_c)], (B_r, B_c))
    assert sp.simplify(best.prices[0] + sp.diff(words.subs(best.tiles), M)) == 0


def test_a_problem_without_a_positive_solution_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one positive solution"):
        optimal_tiles(1 / B_r, [B_r + M], (B_r,))
    with pytest.raises(ValueError, match="one phase"):
        exact_tiles("fwd_small_cache")


KNOWN = {
    "fwd_q_stationary": 2 * (1 + alpha) * x**2,
    "fwd_small_cache": 1 + 4 * sp.sqrt(alpha) * x,
    "bwd_two_pass": (8 + 6 * alpha) * x**2,
    "bwd_fused": (2 + alpha * kappa) * (2 + 2 * alpha) * x**2,
    "bwd_small_cache": 3 + 10 * sp.sqrt(alpha) * x,
}
"""Words / N^2 worked out by hand: FlashAttention-2 (backward in two passes, or fused with dQ in
slow memory), Saha and Ye's Algorithm 1 with rectangular tiles, a backward of five products."""


@pytest.mark.parametrize("name", KNOWN)
def test_leading_words_are_those_worked_out_by_hand(name: str) -> None:
    assert sp.simplify(leading_words(name) - KNOWN[name]) == 0
