"""Masks written as an expression: traced from a Python function, or read from a notation."""

from __future__ import annotations

import math
from functools import lru_cache

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks.comparison import MATCHED, ORDERED
from tilegen.masks.form import Condition, Form, Side
from tilegen.masks.language.expr import PAIR, Expr, S
from tilegen.masks.language.rewriting import renamed, replaced
from tilegen.masks.language.texts import from_text, to_text
from tilegen.masks.mask import Mask
from tilegen.masks.shapes import Shape
from tilegen.masks.tiles.tile_lists import build
from tilegen.masks.usual import BLOCK_SPARSE
from tilegen.masks.values import Pair, Values


def _keep(at: Pair, _: Side, text: str, *captured: Values) -> Condition:
    keep = predicate_of(text, tuple(table.kind for table in captured))
    slots = {i: (table.slot, table.elements_kind) for i, table in enumerate(captured)}
    moved = {symbol: to for symbol, to in zip(PAIR, at, strict=True) if symbol is not to}
    return renamed(replaced(keep, moved) if moved else keep, slots)


def _spelt(text: str, *captured: Values) -> str:
    tables = "".join([f",{table.notation}{table.kind}" for table in captured])
    return f"keep({text}{tables})"


KEEP = Form("keep", _keep, spelt=_spelt)
"""The mask that the canonical text of a predicate describes; t<i> in it are the tables that
follow."""


@lru_cache(maxsize=512)
def predicate_of(text: str, kinds: tuple[str, ...]) -> Expr:
    """Parse the text of a predicate. Raises InvalidProblem for other texts."""
    expr = from_text(text, kinds)
    if not expr.is_condition or S in expr.free:
        raise InvalidProblem(
            f"expected a condition on b, h, q and k in keep(...), got {text[:200]!r}"
        )
    return expr


def text_of(text: str, kinds: tuple[str, ...]) -> str:
    """Return the canonical text of a predicate. Raises InvalidProblem for other texts."""
    try:
        return to_text(predicate_of(text, kinds))
    except Unsupported as error:
        raise InvalidProblem(str(error)) from None


def typical(mask: Mask) -> Mask:
    """Replace each mask whose tables are missing by random blocks of the same density."""
    if mask.form in (KEEP, ORDERED, MATCHED) and mask.is_stand_in:
        percent = mask.values[0].typical
        layout = Values(axes="", typical=percent, kind="bool", pattern="layout", block=BLOCK)
        return Mask.of(BLOCK_SPARSE, layout, BLOCK)
    return mask.with_parts(typical)


BLOCK = 64
"""Side of the tiles by which the density of a traced mask is judged."""
LONGEST = 4096
"""Longest sequence for which the density of a traced mask is judged."""


def percent_live(mask: Mask) -> int:
    """Compute the percentage of tiles that an expression leaves, rounded up to a power of two.

    The length of a call is not known yet; the longest dimension of the tensors read is a good
    guess.
    """
    tables = [value.on("cpu", (LONGEST, LONGEST)) for value in mask.values]
    sizes = [size for table in tables for size in table.shape]
    length = min(max(sizes, default=BLOCK), LONGEST)
    shape = Shape(1, 1, length, length).tiled(BLOCK, BLOCK)
    lists = build(mask.predicate(), tables, shape, device="cpu", side="rows")
    live = lists.visited_tiles / (shape.rows * shape.columns)
    return min(100, 2 ** math.ceil(math.log2(max(1.0, 100 * live))))
