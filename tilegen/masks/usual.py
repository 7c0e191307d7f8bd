"""The forms of masks beyond causal and windows, and constructors of those that read no recipe."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks.form import Condition, Form, Side
from tilegen.masks.mask import NOT, Mask, causal, full
from tilegen.masks.values import Lengths, Pair, Pattern, Table, as_tensor, check_number, is_checked

if TYPE_CHECKING:
    import torch

    from tilegen.masks.language.expr import Expr


def equal(left: Any, right: Any) -> Condition:
    """Return the condition that two numbers are equal."""
    from tilegen.masks.language import algebra

    return algebra.equal(left, right)


# --------------------------------------------------------------------------------------------------
# Of a number, which a kernel may read at run time


def _prefix_keep(at: Pair, _: Side, number: Any) -> Condition:
    return (at.k <= at.q) | (at.k < at.number(number))


def _global_keep(at: Pair, _: Side, number: Any) -> Condition:
    tokens = at.number(number)
    return (at.q < tokens) | (at.k < tokens)


PREFIX_LM = Form("prefix_lm", _prefix_keep)
GLOBAL = Form("global", _global_keep)
KV_PREFIX = Form(
    "kv_prefix",
    lambda at, side, number: at.k < at.number(number),
    apart=lambda number: "keys",
)
DILATED = Form("dilated", lambda at, side, step: equal((at.q - at.k) % step, 0))


def prefix_lm(prefix: int | Table) -> Mask:
    """Return `k <= q or k < prefix`: bidirectional in the prefix, causal behind it."""
    prefix = _number("prefix_lm", prefix)
    return causal() if prefix == 0 else Mask.of(PREFIX_LM, prefix)


def global_tokens(tokens: int | Table) -> Mask:
    """Return `q < tokens or k < tokens`: the first tokens see everything and are seen by all. Join
    with a window by `|`, as Longformer does."""
    tokens = _number("global", tokens)
    return Mask.of(NOT, full()) if tokens == 0 else Mask.of(GLOBAL, tokens)


def kv_prefix(columns: int | Table) -> Mask:
    """Return `k < columns`: only the first columns, by batch for padded batches."""
    columns = _number("kv_prefix", columns)
    return Mask.of(NOT, full()) if columns == 0 else Mask.of(KV_PREFIX, columns)


def dilated(step: int) -> Mask:
    """Return `(q - k) % step == 0`: every step-th column, counted from the row's own.

    Join with causal and windows by `&`; rows and columns are then regrouped by their remainder, so
    that kernels visit kept pairs only. A window of w tokens at this dilation is
    `sliding_window((w - 1) * step) & dilated(step)`.
    """
    step = check_number("step", step, low=1)
    return full() if step == 1 else Mask.of(DILATED, step)


def _number(name: str, number: int | Table) -> int | Table:
    return number if isinstance(number, Table) else check_number(f"N of {name}(N)", number)


# --------------------------------------------------------------------------------------------------
# Of documents


def _documents_keep(
    at: Pair, side: Side, first: Table, end: Table, first_row: Table, end_row: Table
) -> Condition:
    if side == "columns":
        return (first_row.at(at) <= at.q) & (at.q < end_row.at(at))
    return (first.at(at) <= at.k) & (at.k < end.at(at))


DOCUMENTS = Form(
    "documents",
    _documents_keep,
    spelt=lambda first, *_: f"documents({first.notation})",
    apart=lambda *_: "pairs",
    is_solved=True,
)
"""`first[q] <= k < end[q]`, where neither falls as q rises: documents of a packed sequence. The
same pairs by column are `first_row[k] <= q < end_row[k]`."""
SAME_ID = Form(
    "same_id",
    lambda at, side, ids_q, ids_kv: equal(ids_q.at(at), ids_kv.at(at)),
    apart=lambda *_: "pairs",
)
"""`ids_q[q] == ids_kv[k]`, ids in any order."""


def intervals(first: Table) -> Mask:
    """Return the mask of documents whose four tables a recipe makes, of which `first` is the first;
    or of stand-ins like `first`."""
    sides: tuple[tuple[str, Pattern], ...]
    sides = ("q", "firsts"), ("q", "ends"), ("k", "firsts"), ("k", "ends")
    axes = (first.axes or "")[:-1]
    return Mask.of(
        DOCUMENTS, *[first.beside(i, how, axes + axis) for i, (axis, how) in enumerate(sides)]
    )


# --------------------------------------------------------------------------------------------------
# Of blocks


def _check_layout(seqlen_q: int, seqlen_kv: int, layout: Table, block: int) -> None:
    if layout.is_stand_in:
        return
    sizes = tuple(layout.tensor.shape[-2:])
    needed = tuple(-(-length // block) for length in (seqlen_q, seqlen_kv))
    if block == 1 and sizes != needed:
        raise InvalidProblem(
            f"a bool tensor as mask must have the lengths of the call, {needed}, got {sizes}"
        )
    if sizes[0] < needed[0] or sizes[1] < needed[1]:
        raise InvalidProblem(
            f"a layout of blocks of {block} must cover lengths {seqlen_q} and {seqlen_kv} "
            f"with {needed[0]} x {needed[1]} blocks, got {sizes[0]} x {sizes[1]}"
        )


BLOCK_SPARSE = Form(
    "block_sparse",
    lambda at, side, layout, block: layout.at(at, at.q // block, at.k // block),
    check_lengths=_check_layout,
)
"""`layout[(b,) (h,) q // block, k // block]`; pairs beyond the layout are dropped."""


# --------------------------------------------------------------------------------------------------
# Of a grid of points


def _neighborhood_keep(
    at: Pair, _: Side, grid: tuple[int, ...], windows: tuple[int, ...]
) -> Condition:
    keep: Any = True
    stride = 1
    for axis in reversed(range(len(grid))):
        size, window = grid[axis], min(windows[axis], grid[axis])
        own, seen = at.q // stride, at.k // stride
        if axis:
            own, seen = own % size, seen % size
        first = own - windows[axis] // 2
        above = (seen >= first) | (seen >= size - window)
        below = (seen < first + windows[axis]) | (seen < window)
        inside = above & below & (seen < size) if not axis else above & below
        keep = inside & keep
        stride *= size
    return keep


def _check_points(
    seqlen_q: int, seqlen_kv: int, grid: tuple[int, ...], windows: tuple[int, ...]
) -> None:
    points = math.prod(grid)
    if (seqlen_q, seqlen_kv) != (points, points):
        raise InvalidProblem(
            f"{Mask.of(NEIGHBORHOOD, grid, windows)} needs sequences of {points} points, "
            f"got {seqlen_q} and {seqlen_kv}"
        )


NEIGHBORHOOD = Form("neighborhood", _neighborhood_keep, check_lengths=_check_points, is_tied=True)
"""Every dimension's window around a point, moved inwards at the borders, as NATTEN defines it.
Points of a grid are numbered row by row; both sequences are the same grid."""


def neighborhood(grid: int | tuple[int, ...], window: int | tuple[int, ...]) -> Mask:
    """Return NATTEN's mask: the `window` (odd) nearest points in each dimension of a `grid`.

    Both sequences are the grid's points, row by row: their length is its product.
    """
    grid, window = (
        (sizes,) if isinstance(sizes, int) else tuple(sizes) for sizes in (grid, window)
    )
    if not 1 <= len(grid) <= 3 or len(grid) != len(window):
        raise InvalidProblem(
            "neighborhood needs one to three dimensions and a window for each, "
            f"got grid {grid} and window {window}"
        )
    grid = tuple(check_number("grid", size, low=1) for size in grid)
    window = tuple(check_number("window", size, low=1) for size in window)
    for size in window:
        if size % 2 == 0:
            raise InvalidProblem(f"window must be odd, got {size}")
    return Mask.of(NEIGHBORHOOD, grid, window)


# --------------------------------------------------------------------------------------------------
# Of an expression


def _keep_of_text(at: Pair, _: Side, text: str, *captured: Table) -> Condition:
    from tilegen.masks.language.expr import PAIR
    from tilegen.masks.language.rewriting import renamed, replaced

    keep = predicate_of(text, tuple(table.kind for table in captured))
    slots = {i: (table.slot, table.elements_kind) for i, table in enumerate(captured)}
    moved = {symbol: to for symbol, to in zip(PAIR, at, strict=True) if symbol is not to}
    return renamed(replaced(keep, moved) if moved else keep, slots)


def _text_spelt(text: str, *captured: Table) -> str:
    tables = "".join([f",{table.notation}{table.kind}" for table in captured])
    return f"keep({text}{tables})"


KEEP = Form("keep", _keep_of_text, spelt=_text_spelt)
"""The mask that the canonical text of a predicate describes; t<i> in it are the tables that
follow."""


@lru_cache(maxsize=512)
def predicate_of(text: str, kinds: tuple[str, ...]) -> Expr:
    """Parse the text of a predicate. Raises InvalidProblem for other texts."""
    from tilegen.masks.language.expr import S
    from tilegen.masks.language.texts import from_text

    expr = from_text(text, kinds)
    if not expr.is_condition or S in expr.free:
        raise InvalidProblem(
            f"expected a condition on b, h, q and k in keep(...), got {text[:200]!r}"
        )
    return expr


def text_of(text: str, kinds: tuple[str, ...]) -> str:
    """Return the canonical text of a predicate. Raises InvalidProblem for other texts."""
    from tilegen.masks.language.texts import to_text

    try:
        return to_text(predicate_of(text, kinds))
    except Unsupported as error:
        raise InvalidProblem(str(error)) from None


# --------------------------------------------------------------------------------------------------
# Of another mask


UNLISTED = Form("unlisted", lambda at, side, mask: mask.keep(at, side))
"""The same mask over keys in pages, whose lengths the host does not know: no lists of tiles can be
made. The parts with a closed form say which tiles are visited; all others are computed for each of
their pairs. `AttentionProblem.normal` rewrites problems so."""


def is_surely_solved(mask: Mask) -> bool:
    """Return whether a mask surely has a closed form, without solving it."""
    alone = mask.form in (UNLISTED, KV_PREFIX, TREE)
    return alone or all(part.form.is_solved for part in mask.conjuncts)


# --------------------------------------------------------------------------------------------------
# Trees of drafted tokens


def _check_rows(seqlen_q: int, seqlen_kv: int, table: Table, lengths: Table | None = None) -> None:
    if table.is_stand_in:
        return
    width = table.sources[0].shape[-1]
    if seqlen_q > width:
        raise InvalidProblem(
            f"a tree of {width} tokens has rows for as many queries, got {seqlen_q}"
        )


def _end(at: Pair, lengths: Table | None) -> Any:
    return at.seqlen_kv if lengths is None else lengths.at(at)


def _keep(at: Pair, _: Side, table: Table, lengths: Table | None = None) -> Condition:
    from tilegen.masks.language.algebra import maximum

    end = _end(at, lengths)
    base = end - at.seqlen_q
    kept = (at.k < base) | table.at(at, at.q, maximum(at.k - base, 0))
    return kept if lengths is None else kept & (at.k < end)


def _enclosing(
    at: Pair, _: Side, table: Table, lengths: Table | None = None
) -> tuple[Condition, Condition]:
    end = _end(at, lengths)
    before = at.k < end - at.seqlen_q
    return (True, before) if lengths is None else (at.k < end, before)


TREE = Form(
    "tree",
    _keep,
    enclosing=_enclosing,
    check_lengths=_check_rows,
    apart=lambda table, *lengths: "keys" if lengths else "",
)
"""`k < base or table[(b,) q, k - base]`, `base` the keys before those of the queries.

The queries are the last `seqlen_q` of `seqlen_kv` keys, or of `lengths[b]` where these are given as
a second argument; keys from there on are dropped. The table is bool, indexed by query and by key
behind `base`; beyond the end of the table nothing is kept.
"""


def trees_of(mask: Mask) -> int:
    """Count the tables of trees that a mask reads."""
    return (mask.form is TREE) + sum(map(trees_of, mask.parts))


def ancestors(parents: Any) -> torch.Tensor:
    """Compute the ancestors of each token of a tree, the token included: bool (..., tokens,
    tokens).

    parents are integers (..., tokens): the index of each token's parent, -1 for a root. Nothing
    waits for a device: each of log2(tokens) steps doubles the depth that a token sees. Raises
    InvalidProblem for parents that form no tree, if values are checked.
    """
    import torch

    parents = as_tensor("parents", parents)
    if parents.ndim == 0 or parents.is_floating_point() or parents.dtype is torch.bool:
        raise InvalidProblem(
            f"parents must be integers (..., tokens), got {parents.dtype} {tuple(parents.shape)}"
        )
    width = parents.shape[-1]
    is_root = (parents < 0) | (parents >= width)
    # One token more, which sees nothing, is the parent of roots and of itself.
    above = torch.nn.functional.pad(parents.long().masked_fill(is_root, width), (0, 1), value=width)
    eye = torch.eye(width + 1, width, dtype=torch.bool, device=parents.device)
    seen = eye.expand(*parents.shape[:-1], width + 1, width)
    for _ in range(max(width - 1, 0).bit_length()):
        seen = seen | seen.gather(-2, above[..., None].expand_as(seen))
        above = above.gather(-1, above)
    if is_checked(parents) and width:
        if int(parents.min()) < -1 or int(parents.max()) >= width:
            raise InvalidProblem(f"parents must be -1..{width - 1}, got {parents.tolist()}")
        if bool((above < width).any()):
            raise InvalidProblem(f"parents must lead to a root, got {parents.tolist()}")
    return seen[..., :width, :].contiguous()


def tables(parents: torch.Tensor, lengths: Lengths) -> tuple[torch.Tensor, ...]:
    """Return the table of a tree by its parents: the recipe of `tilegen.tree`."""
    return (ancestors(parents),)
