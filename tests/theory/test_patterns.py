"""Sub-grids of masks: formulas against all choices of rows and columns of small masks."""

from __future__ import annotations

from functools import cache
from typing import get_args

import numpy as np
import pytest
import sympy as sp
from numpy.typing import NDArray

from tilegen.model.bounds import partition_bound
from tilegen.model.mask_size import mask_size
from tilegen.model.symbols import H_kv, M, N, P, b, d_qk, g, k, nnz, s, w
from tilegen.problem import AttentionProblem
from tilegen.theory.patterns import (
    MaskPattern,
    bound_of,
    kept_entries,
    pattern_bound,
    spanned,
    unstructured_limit,
)

SIDE = 12


def small_mask(name: str, parameter: int, side: int = SIDE) -> NDArray[np.bool_]:
    i, j = np.arange(side)[:, None], np.arange(side)[None, :]
    match name:
        case "causal":
            return j <= i
        case "window":
            return (j <= i) & (i - j < parameter)
        case "ring":  # the window without its cut-off corner
            return (i - j) % side < parameter
        case "block_diagonal":
            return i // parameter == j // parameter
        case "random":
            return np.random.default_rng(parameter).random((side, side)) < parameter / side
        case _:
            return np.ones((side, side), dtype=bool)


@cache
def most_spanned(name: str, parameter: int, side: int = SIDE) -> list[int]:
    """e_G(k) for k = 0..2 side, over all sub-grids."""
    mask = small_mask(name, parameter, side)
    rows = [sum(int(kept) << at for at, kept in enumerate(row)) for row in mask]
    most = [0] * (2 * side + 1)
    for chosen in range(1 << side):  # columns; the best rows are those that see most of them
        seen = sorted(((row & chosen).bit_count() for row in rows), reverse=True)
        total = 0
        for count, more in enumerate([0, *seen]):
            total += more
            at = chosen.bit_count() + count
            most[at] = max(most[at], total)
    return most


def values(expression: sp.Expr, numbers: dict[sp.Symbol, float]) -> list[float]:
    return [float(expression.subs(numbers).subs(k, at)) for at in range(1, 2 * SIDE + 1)]


@pytest.mark.parametrize(
    "pattern, name, parameter",
    [
        ("dense", "full", 0),
        ("causal", "causal", 0),
        *(("window", "window", width) for width in (1, 2, 3, 4, 5, 8)),
        *(("block_diagonal", "block_diagonal", side) for side in (1, 2, 3, 4, 6)),
    ],
)
def test_spanned_entries_are_exact(pattern: MaskPattern, name: str, parameter: int) -> None:
    """Equal for every k up to what the 12 x 12 mask can show; never below."""
    numbers = {N: SIDE, w: parameter, b: parameter}
    value = values(spanned(pattern), numbers)
    exact = most_spanned(name, parameter)[1:]
    assert all(limit >= most for limit, most in zip(value, exact, strict=True))
    # a window ends at the corner: rows and columns run out there
    shown = 2 * SIDE - 2 * parameter if name == "window" else 2 * SIDE
    assert value[:shown] == exact[:shown]


@pytest.mark.parametrize("pattern", ["dense", "causal", "window", "block_diagonal"])
def test_patterns_are_at_most_the_bound_by_degrees(pattern: MaskPattern) -> None:
    degree = {"dense": SIDE, "causal": SIDE, "window": 3, "block_diagonal": 3}[pattern]
    numbers = {N: SIDE, w: 3, b: 3}
    by_degree = values(spanned("degree"), {w: degree})
    value = values(spanned(pattern), numbers)
    assert all(a <= most for a, most in zip(value, by_degree, strict=True))


@pytest.mark.parametrize("name", ["full", "causal", "window", "ring", "block_diagonal", "random"])
@pytest.mark.parametrize("parameter", [2, 3, 4])
def test_degrees_bound_every_mask(name: str, parameter: int) -> None:
    mask = small_mask(name, parameter)
    degree = int(max(mask.sum(axis=0).max(), mask.sum(axis=1).max()))
    limits = values(spanned("degree"), {w: degree})
    exact = most_spanned(name, parameter)[1:]
    assert all(most <= limit for most, limit in zip(exact, limits, strict=True))


@pytest.mark.parametrize("parameter", [1, 2, 4, 6])
def test_random_masks_stay_below_their_limit(parameter: int) -> None:
    numbers = {s: parameter / SIDE, N: SIDE}
    limits = values(unstructured_limit(), numbers)
    means = values(spanned("unstructured"), {s: parameter / SIDE})
    exact = most_spanned("random", parameter)[1:]
    assert all(most <= limit for most, limit in zip(exact, limits, strict=True))
    assert any(most > mean for most, mean in zip(exact, means, strict=True))


def test_limit_of_random_masks_tends_to_the_mean() -> None:
    """With many rows on chip the best sub-grid is hardly better than any."""
    for at, ratio in ((2**10, 3.1), (2**18, 1.1)):
        numbers = {s: 1 / 16, N: 2**20, k: at}
        mean, limit = (e.subs(numbers) for e in (spanned("unstructured"), unstructured_limit()))
        assert 1 < float(limit / mean) < ratio


@pytest.mark.parametrize("pattern", ["dense", "causal", "window", "block_diagonal"])
def test_kept_entries(pattern: MaskPattern) -> None:
    name = "full" if pattern == "dense" else pattern
    kept = kept_entries(pattern).subs({N: SIDE, w: 4, b: 4})  # type: ignore[arg-type]
    assert kept == small_mask(name, 4).sum()


def test_dense_pattern_is_the_partition_bound() -> None:
    ours = pattern_bound("dense").subs({g: 1, nnz: N**2})
    theirs = partition_bound().subs({g: 1, nnz: N**2, w: N})
    for memory in (2.0**12, 2.0**16):  # 2M / d is even: no rounding
        at = {H_kv: 3, P: 2, N: 2**20, d_qk: 128, M: memory}
        assert float(ours.subs(at)) == pytest.approx(float(theirs.subs(at)), rel=1e-12)


def test_shapes_matter_and_not_density() -> None:
    """The same density as blocks, as a window and at random: what must move differs."""
    at = {H_kv: 1, g: 1, P: 1, N: 2**20, d_qk: 128, M: 2**16, nnz: 2**20 * 512, w: 512, b: 512}
    blocks, window, dense = (
        float(pattern_bound(pattern).subs(at)) for pattern in ("block_diagonal", "window", "dense")
    )
    scattered = float(bound_of(unstructured_limit()).subs(at | {s: 2.0**-11}))
    assert blocks < window
    assert dense < window  # the dense e_G holds for any mask, so it is the weakest bound
    assert scattered > window


def test_a_mean_is_no_bound() -> None:
    with pytest.raises(ValueError, match="unstructured_limit"):
        pattern_bound("unstructured")
    assert set(get_args(MaskPattern)) >= {"dense", "causal", "window", "block_diagonal", "degree"}


def test_pattern_bounds_hold_for_the_masks_of_the_compiler() -> None:
    """The window formula needs no more entries than the mask has, and its degree is the width."""
    mask = AttentionProblem.parse("hq1 q1 d64 bf16 window(99,0)").mask
    size = mask_size(mask, 4096, 4096)
    assert size.entries == kept_entries("window").subs({N: 4096, w: 100})
    assert size.degree == 100
