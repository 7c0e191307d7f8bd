"""Bound the number of score entries in a sub-grid of I query and J key-value rows.

The mask is a bipartite graph G, and `e_G(k)` the largest number of its entries in a sub-grid with
I + J <= k. A launch has H_kv times the same graph, in which g query heads share the columns of a
key-value head. Lower bounds on traffic follow from any upper bound of `e_G(k)`. Here it is the
smallest of three, each proved where it is defined:

    k^2 / 4       no sub-grid has more than I J entries
    u k           on average each row and column has at most u entries
    band(k)       the mask keeps w_b differences of query and key-value row, and no others

A sub-grid of many heads, or of many documents, with k_1, ..., k_n rows and columns in each, has
`e(k_1) + ... + e(k_n) <= k max e(k_i) / k_i` entries. So a bound for one head holds for all
together if the bound divided by k does not fall with k, as for the first two. The same is true of
band(k) from k = 2 nu on, where it is less than the first, unless nu^2 < g / 4. But then it exceeds
nu k, which follows from the degrees within the band.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tilegen.masks.form import WINDOW
from tilegen.masks.mask import Mask
from tilegen.masks.remembered import by_mask
from tilegen.masks.usual import PREFIX_LM
from tilegen.model.formulas import computed, expression
from tilegen.model.mask_size import Bands, Numbers, bands, mask_size

if TYPE_CHECKING:
    import sympy as sp

PRECISION = 1e-6
"""Relative amount by which a density found by iteration is rounded up, so that it is a bound."""
MAX_PARTS = 256
"""Most parts of a mask that are examined one by one; a mask with more parts is taken as a whole."""


WITHIN_BAND = "k**2/4 - Max(0, k/2 - g*w_b/(g + 1))**2 + g/4"
SPANNED = f"Min(k**2/4, u*k, {WITHIN_BAND})"
STAIRCASE = "(N + 1)*g*(g + 1 - sqrt(2*g))/(g**2 + 1)"


def spanned_by_all_heads() -> sp.Expr:
    """Return an upper bound of `e_G(k)`, with `u` and `w_b` of the mask."""
    return expression(SPANNED)


def within_band() -> sp.Expr:
    """Return `k^2 / 4 - max(0, k / 2 - nu)^2 + g / 4` with `nu = g w_b / (g + 1)`.

    I rows of a head and J columns have at most W(I, J) pairs whose difference is one of w_b
    consecutive ones. By the discrete rearrangement inequality of Riesz (Hardy, Littlewood and
    Polya, Theorem 371) intervals with a common centre have most. If I + J - 1 > w_b, two corners
    are cut off, triangles with at least ((I + J - w_b)^2 - 1) / 4 pairs together, so

        W(I, J) <= I J - max(0, I + J - w_b)^2 / 4 + 1 / 4    for |I - J| <= w_b,
        W(I, J) <= w_b min(I, J)                              otherwise.

    Both bounds together are a concave function of I, with J fixed. So of g heads that share J
    columns, all have equally many rows at the maximum. With g I + J = k the first bound is largest
    at J - I = w_b (g - 1) / (g + 1), where g times it is nu (k - nu) + g / 4 once k > 2 nu. The
    second is nowhere larger, and neither is I J with I + J <= w_b.
    """
    return expression(WITHIN_BAND)


# --------------------------------------------------------------------------------------------------
# u in closed form


def by_degrees(of_row: Any, of_column: Any, group: Any) -> Any:
    """Return `u` if a row of the mask has at most `of_row` entries and a column `of_column`.

    I rows and J columns have at most min(I of_row, J g of_column) entries. That is largest if the
    two are equal.
    """
    return group * of_row * of_column / (of_row + group * of_column)


def of_staircase() -> sp.Expr:
    """Return `u` of an N x N causal mask: `(N + 1) g (g + 1 - sqrt(2 g)) / (g^2 + 1)`.

    The last I rows of each head and the first J columns have most entries: I J, minus the triangle
    above the diagonal with side I + J - N - 1. So they have at most g h with
    `h = I J - max(0, I + J - (N + 1))^2 / 2`. If the triangle is empty, more rows or columns raise
    g h / (g I + J). Elsewhere h is concave (second derivatives -1, -1 and 0), and so is
    g h - u (g I + J). The maximum of the latter is 0 for the u looked for. It is reached at
    I = (N + 1) (1 - s), J = (N + 1) (1 - t) with s = u / (N + 1), t = s / g, and is 0 if
    1 + s^2 + t^2 = 2 s + 2 t. The smaller solution gives u.
    """
    return expression(STAIRCASE)


OF_PREFIX = {
    "staircase": STAIRCASE,
    "t": "(g + 1)*(N + 1) - sqrt((g + 1)**2*(N + 1)**2 - (N + 1)**2 - p**2)",
    "u": "where(staircase >= p, staircase, where(N + 1 - t >= p, g*t, by_degrees(p, N + 1, g)))",
}


def of_prefix() -> sp.Expr:
    """Return `u` of an N x N causal mask whose first p columns all rows keep.

    Rows keep max(i, p) columns, no more than rows at i to i + 1 of a continuous mask with N + 1
    instead of N. For that mask, u is reached by the sub-grids that `densest_nested` examines: rows
    with u entries or more, and the columns that u of them still reach. If `of_staircase` is at
    least p, those are rows beyond the prefix, and it is u. Otherwise they are all rows, with
    J = N + 1 - u / g columns, or with the p columns of the prefix if that is less. With t = u / g,
    the former means t^2 - 2 (g + 1) (N + 1) t + (N + 1)^2 + p^2 = 0.
    """
    return _read(OF_PREFIX)


def _read(formulas: dict[str, str]) -> sp.Expr:
    *before, (_, last) = formulas.items()
    return expression(last, dict(before), by_degrees=by_degrees)


MaskFamily = Literal["full", "causal", "window", "prefix"]
"""Families of masks whose `u` has a closed form."""


CLOSED: dict[MaskFamily, dict[str, str]] = {
    "full": {"u": "by_degrees(N_kv, N_q, g)"},
    "causal": {"N": "N_q", "u": f"Min({STAIRCASE}, N*g/(g + 1))"},
    "window": {"u": "by_degrees(Min(w_b, N_kv), Min(w_b, N_q), g)"},
    "prefix": {"N": "N_q"} | OF_PREFIX,
}


def closed_form(family: MaskFamily) -> sp.Expr:
    """Return `u` of a family as an expression of lengths, `w_b`, `p` and `g`. Causal masks, with or
    without a prefix, must have equal lengths."""
    return _read(CLOSED[family])


def family_of(mask: Mask, seqlen_q: int, seqlen_kv: int) -> MaskFamily | None:
    """Return the family of a mask; None if `u` must be counted from its rows and columns."""
    if mask.is_full:
        return "full"
    if mask.is_causal and seqlen_q == seqlen_kv:
        return "causal"
    if mask.form is WINDOW and None not in mask.args and not mask.tables:
        return "window"
    if mask.form is PREFIX_LM and not mask.tables and seqlen_q == seqlen_kv:
        return "prefix"
    return None


# --------------------------------------------------------------------------------------------------
# u from rows and columns


@dataclass(frozen=True)
class Subgrids:
    """Numbers that bound the entries of a mask's sub-grids."""

    per_row: float
    """`u`: most entries per row and column of any sub-grid."""
    width: int
    """`w_b`: number of consecutive differences of query and key-value row that include all kept
    pairs."""
    family: MaskFamily | None = None
    """The family whose closed form gives `per_row`; None if it is counted from the mask's rows and
    columns."""


@by_mask(512)
def subgrids(mask: Mask, seqlen_q: int, seqlen_kv: int, group: int) -> Subgrids:
    """Compute the numbers of a mask whose columns are shared by `group` query heads.

    For a mask whose tiles have no closed form they follow from its largest degree alone.
    """
    degree, width = mask_size(mask, seqlen_q, seqlen_kv).degree, seqlen_q + seqlen_kv - 1
    most: float = by_degrees(degree, degree, group)
    if (family := family_of(mask, seqlen_q, seqlen_kv)) is not None:
        prefix = 0
        if family == "window":
            width = min(width, mask.args[0] + mask.args[1] + 1)
        elif family == "prefix":
            prefix = min(mask.args[0], seqlen_kv)
        sizes = {"N_q": seqlen_q, "N_kv": seqlen_kv, "g": group, "w_b": width, "p": prefix}
        density = float(computed(CLOSED[family], sizes, by_degrees=by_degrees)["u"])
        return Subgrids(min(most, density), width, family if density <= most else None)
    rows, columns = (bands(mask, side, seqlen_q, seqlen_kv) for side in ("rows", "columns"))
    if rows is None or columns is None:
        return Subgrids(most, width)
    numbers = counted(rows, columns, group)
    return Subgrids(min(most, numbers.per_row), numbers.width)


def counted(rows: Bands, columns: Bands, group: int) -> Subgrids:
    """Compute the numbers of the mask with the given rows and columns."""
    parts = [_of_part(*part, group) for part in _parts(rows, columns)]
    densest = max((part.per_row for part in parts), default=0.0)
    return Subgrids(densest, max((part.width for part in parts), default=1))


def densest_nested(degree: Numbers, count: Numbers) -> float:
    """Return the largest `sum of min(d, J) / (I + J)` over numbers J and any I rows with degrees d,
    rounded up; `count` is the number of rows of each degree.

    No I rows and J columns have more entries. If of any two rows one keeps all columns that the
    other keeps, as under a causal mask, the J columns kept by most rows have as many. Dinkelbach's
    algorithm: a guess u is too low as long as some I and J make `sum of min(d, J) - u (I + J)`
    positive. That is largest for all rows with at least u entries and a J that u rows still reach.
    """
    order = np.argsort(-degree, kind="stable")
    degrees, counts = degree[order].astype(float), count[order].astype(float)
    rows, entries = np.cumsum(counts), np.cumsum(counts * degrees)
    guess = 0.0
    while True:
        chosen = int(np.searchsorted(-degrees, -guess, side="right"))  # rows with >= guess entries
        if not chosen or rows[-1] < guess:
            return guess
        reached = degrees[np.searchsorted(rows, guess)]
        across = max(float(reached), np.ceil(guess))
        cut = min(chosen, int(np.searchsorted(-degrees, -across, side="right")))
        whole = rows[cut - 1] if cut else 0.0
        rest = entries[chosen - 1] - (entries[cut - 1] if cut else 0.0)
        most, size = whole * across + rest, rows[chosen - 1] + across
        if most <= guess * size:
            return guess
        guess = float(most / size) * (1 + PRECISION)


def _of_part(rows: Bands, columns: Bands, group: int) -> Subgrids:
    """Compute the numbers of a part of the mask that shares no row or column with other parts."""
    densities = [densest_nested(rows.degree, group * rows.size)]
    if columns.degree.size:
        densities.append(densest_nested(group * columns.degree, columns.size))
        densities.append(float(by_degrees(rows.degree.max(), columns.degree.max(), group)))
    above = (rows.end - 1 - rows.first).max()
    below = (rows.low - (rows.first + rows.size - 1)).min()
    return Subgrids(min(densities), int(above - below) + 1)


def _parts(rows: Bands, columns: Bands) -> list[tuple[Bands, Bands]]:
    """Split a mask into parts without common rows or columns, such as documents; equal parts are
    returned once."""
    if not rows.first.size:
        return []
    order = np.argsort(rows.low, kind="stable")
    low, end = rows.low[order], np.maximum.accumulate(rows.end[order])
    begins = np.flatnonzero(np.concatenate([[True], low[1:] >= end[:-1]]))
    if len(begins) > MAX_PARTS:
        return [(rows, columns)]
    parts: dict[bytes, tuple[Bands, Bands]] = {}
    for start, stop in zip(begins, [*begins[1:], len(order)], strict=True):
        part_rows = _chosen(rows, np.sort(order[start:stop]))
        first, last = low[start], end[stop - 1]
        inside = (columns.first < last) & (columns.first + columns.size > first)
        part_columns = _chosen(columns, np.flatnonzero(inside))
        shift = part_rows.first[0]
        key = (
            *(part_rows.first - shift, part_rows.size, part_rows.degree),
            *(part_rows.low - shift, part_rows.end - shift),
            *(part_columns.degree, part_columns.size),
        )
        parts[b"|".join(array.tobytes() for array in key)] = (part_rows, part_columns)
    return list(parts.values())


def _chosen(of: Bands, index: Numbers) -> Bands:
    arrays = (of.first, of.size, of.degree, of.low, of.end)
    return Bands(*(array[index] for array in arrays))
