"""Lower bounds from the pattern of a mask: the entries that a part of the computation can span.

A mask is a bipartite graph G of query and key-value rows. `e_G(k)` is the largest number of its
entries in any sub-grid of I rows and J columns with I + J <= k. Saha and Ye's Lemma 3.3
(arXiv 2402.07443) counts complete entries of S in a part of the computation. With `e_G` instead of
I J, its bound depends on the mask's shape and not only on its density: a mask saves transfers only
if it has dense sub-grids as large as fast memory can hold.
"""

from __future__ import annotations

from typing import Literal

import sympy as sp

from tilegen.model.bounds import partitioned
from tilegen.model.symbols import (
    M,
    N,
    b,
    d_qk,
    k,
    s,
    w,
)

MaskPattern = Literal["dense", "causal", "window", "block_diagonal", "unstructured", "degree"]


def spanned(pattern: MaskPattern) -> sp.Expr:
    """Return `e_G(k)` of one head (g = 1) as an expression of k; N, w, b and s describe the mask.

    dense: I and J as equal as possible. causal, N x N: the last rows and the first columns, minus
    the triangle above the diagonal. window (row i keeps the w columns up to i): a rectangle fits if
    k <= w + 1; otherwise two equal triangles stick out. Intervals are best by the discrete
    rearrangement inequality of Riesz (Hardy, Littlewood and Polya, Theorem 371). block_diagonal:
    whole blocks first, since floor(k^2 / 4) is convex. These four are exact if the mask is large
    enough, and upper bounds otherwise.

    unstructured: s k^2 / 4, the entries of a mean sub-grid. The densest has more: see
    `unstructured_limit`. degree: any mask with at most w entries in a row or column.
    """
    rectangle = sp.floor(k**2 / 4)
    match pattern:
        case "dense":
            return rectangle
        case "causal":
            return rectangle - _triangle(sp.Max(0, k - N - 1))
        case "window":
            outside = sp.Max(0, k - 1 - w)
            return rectangle - _triangle(sp.floor(outside / 2)) - _triangle(sp.ceiling(outside / 2))
        case "block_diagonal":
            whole = sp.floor(k / (2 * b))
            return whole * b**2 + sp.floor((k - 2 * b * whole) ** 2 / 4)
        case "unstructured":
            return s * k**2 / 4
        case "degree":
            return sp.Min(rectangle, sp.floor(w * k / 2))


def unstructured_limit(doubt: float = 1e-3) -> sp.Expr:
    """Return an `e_G(k)` that holds with probability 1 - `doubt` for N x N masks of random entries.

    It follows from Hoeffding's inequality for each of fewer than (e N / I)^I (e N / J)^J k
    sub-grids: at most s k^2 / 4 + sqrt(k^2 / 4 * log(count / doubt) / 2) entries.
    """
    cells = k**2 / 4
    count = k * (1 + sp.log(2 * N / k)) + sp.log(k / sp.Float(doubt))
    return sp.Min(cells, s * cells + sp.sqrt(cells * count / 2))


def pattern_bound(pattern: MaskPattern) -> sp.Expr:
    """Return the pattern-aware bound in words, for H_kv heads (g = 1) on P processors of M words.

    Q >= M (nnz / (e_G(floor(2M / d)) + 4M) - 1): a part of the computation that touches 2M words
    completes at most e_G entries and reaches 4M more. For `dense` this is LB1. Raises ValueError
    for `unstructured`, whose `e_G` is a mean: pass `unstructured_limit` to `bound_of` instead.
    """
    if pattern == "unstructured":
        raise ValueError("the mean of unstructured masks bounds nothing; use unstructured_limit")
    return bound_of(spanned(pattern))


def bound_of(entries: sp.Expr) -> sp.Expr:
    """Return the bound in words that follows from an `e_G(k)`."""
    return partitioned(entries.subs(k, sp.floor(2 * M / d_qk)))


def kept_entries(pattern: Literal["dense", "causal", "window", "block_diagonal"]) -> sp.Expr:
    """Return nnz of an N x N mask; w <= N, and b divides N."""
    return {
        "dense": N**2,
        "causal": _triangle(N),
        "window": w * N - _triangle(w - 1),
        "block_diagonal": b * N,
    }[pattern]


def _triangle(side: sp.Expr) -> sp.Expr:
    return side * (side + 1) / 2
