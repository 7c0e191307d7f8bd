"""Derived tiles against exhaustive search, with every small term and every rounding up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sympy as sp

from tilegen.model.symbols import (
    UNMASKED,
    B_c,
    B_d,
    B_e,
    B_k,
    B_p,
    B_r,
    M,
    N_kv,
    N_q,
    alpha,
    c,
    d_qk,
    d_v,
    g,
    kappa,
    n,
    nnz,
    s,
    x,
)
from tilegen.theory.optimum import crossover, exact_tiles, leading_words, narrow_words
from tilegen.theory.schedules import SCHEDULES

LENGTH, WIDTH = 65536, 128


def constants(length: int, width: int) -> dict[sp.Symbol, float]:
    ones = dict.fromkeys((g, n, B_d, B_k, alpha, kappa, c), 1)
    return ones | {N_q: length, N_kv: length, d_qk: width, d_v: width}


def searched(
    schedule: str,
    memory: float,
    *,
    length: int = LENGTH,
    width: int = WIDTH,
    density: float = 1,
    sides: np.ndarray | None = None,
) -> tuple[float, dict[sp.Symbol, int]]:
    """Fewest words / N^2 over all tiles of `sides`, and the tiles; phases are independent."""
    every = np.arange(1, 1201) if sides is None else sides
    allowed = dict.fromkeys((B_r, B_c, B_p), every) | {B_e: every[every <= width]}
    numbers = constants(length, width) | {nnz: density * length**2, s: density}
    record = SCHEDULES[schedule]
    words = sp.expand(record.weighted_words().subs(UNMASKED).subs(numbers))
    total, tiles = 0.0, {}
    for phase in record.weighted_phases():
        held = phase.subs(numbers)
        own = [side for side in allowed if held.has(side)]
        part = sp.Add(*(term for term in sp.Add.make_args(words) if term.has(*own)))
        words -= part
        grid = np.ix_(*(allowed[side] for side in own))
        moved = np.asarray(sp.lambdify(own, part, "numpy")(*grid), dtype=float)
        fits = sp.lambdify(own, held, "numpy")(*grid) <= memory
        moved = np.where(fits, moved, np.inf)
        at = np.unravel_index(moved.argmin(), moved.shape)
        total += float(moved[at])
        tiles |= {side: int(allowed[side][index]) for side, index in zip(own, at, strict=True)}
    return (total + float(words)) / length**2, tiles


@pytest.mark.parametrize(
    "schedule, ratio, number, leading",
    [
        ("fwd_q_stationary", 0.25, 18.293, 16),
        ("fwd_q_stationary", 1, 4.137, 4),
        ("fwd_q_stationary", 4, 1.0235, 1),
        ("fwd_q_stationary", 16, 0.2578, 0.25),
        ("fwd_small_cache", 0.25, 9.234, 9),
        ("fwd_small_cache", 1, 5.061, 5),
        ("fwd_small_cache", 4, 3.268, 3),
        ("bwd_dkdv", 1, 8.334, 8),
        ("bwd_dq", 1, 6.252, 6),
        ("bwd_small_cache", 0.25, 23.404, 23),
        ("bwd_small_cache", 1, 13.109, 13),
        ("bwd_small_cache", 4, 8.783, 8),
    ],
)
def test_constants_equal_those_of_a_search(
    schedule: str, ratio: float, number: float, leading: float
) -> None:
    """From above: M = ratio * d^2 words, d = 128, N = 65536."""
    words, tiles = searched(schedule, ratio * WIDTH**2)
    at = {alpha: 1, x: 1 / math.sqrt(ratio)}
    assert float(leading_words(schedule).subs(at)) == pytest.approx(leading)
    assert words == pytest.approx(number, rel=5e-4)
    assert words >= leading
    if B_e in tiles and ratio > 1:
        narrow = float(narrow_words(schedule)[0].subs(at))
        assert narrow <= words < 1.02 * narrow


@pytest.mark.parametrize(
    "schedule", ["fwd_q_stationary", "fwd_kv_stationary", "bwd_dq", "bwd_dkdv"]
)
@pytest.mark.parametrize(
    "length, width, memory", [(65536, 128, 16384), (4096, 64, 58000), (1000, 72, 9000)]
)
def test_exact_tiles_are_those_of_a_search(
    schedule: str, length: int, width: int, memory: int
) -> None:
    """Rounded down; where fewer rows give the same count of tiles, the search takes fewer."""
    _, tiles = searched(schedule, memory, length=length, width=width)
    values = constants(length, width) | {M: memory}
    for side, value in exact_tiles(schedule).items():
        derived = int(value.subs(values))
        assert tiles[side] <= derived
        assert math.ceil(length / tiles[side]) == math.ceil(length / derived)


@pytest.mark.parametrize("density", [1, 1 / 4, 1 / 16, 1 / 64])
@pytest.mark.parametrize("ratio", [0.5, 1.5, 4, 20, 60])
def test_which_schedule_wins_on_masks_without_structure(density: float, ratio: float) -> None:
    """Storing kept entries moves less if and only if M < 0.686 d^2 / s."""
    sides = np.unique(np.geomspace(1, 16384, 600).astype(int))
    stored, visited = (
        searched(name, ratio * WIDTH**2, density=density, sides=sides)[0]
        for name in ("fwd_sparse_small_cache", "fwd_q_stationary")
    )
    at = crossover("fwd_q_stationary", "fwd_sparse_small_cache").subs({alpha: 1, s: density})
    assert (stored < visited) == (ratio < float(1 / at**2))
