"""Masks written as an expression: traced from a Python function, or read from a notation."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from tilegen.bounded_cache import BoundedCache
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks.comparison import MATCHED, ORDERED, comparison_of
from tilegen.masks.form import Condition, Form, Side
from tilegen.masks.kinds import kind_of_mask
from tilegen.masks.language.algebra import both, conjuncts, subtract
from tilegen.masks.language.captured import kind_of_tensor, merge
from tilegen.masks.language.expr import FALSE, PAIR, TRUE, B, Expr, K, Q, S, slot_of
from tilegen.masks.language.integers import combined, linear
from tilegen.masks.language.rewriting import made, renamed, replaced
from tilegen.masks.language.texts import from_text, to_text
from tilegen.masks.mask import Mask, causal, full, intersect, sliding_window, with_tensors
from tilegen.masks.packed import of_ids
from tilegen.masks.shapes import Shape
from tilegen.masks.snapshots import TensorCache
from tilegen.masks.tiles.tile_lists import build
from tilegen.masks.tiles.visit import visit
from tilegen.masks.tracing.derived import Derived
from tilegen.masks.tracing.trace import Traced
from tilegen.masks.usual import BLOCK_SPARSE, DILATED, dilated
from tilegen.masks.values import MAX_WINDOW, Pair, Values, table

MAX_KNOWN = 512
"""Masks of functions that are kept."""


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


def canonical(text: str, kinds: tuple[str, ...]) -> str:
    """Return the canonical text of a predicate. Raises InvalidProblem for other texts."""
    try:
        return to_text(predicate_of(text, kinds))
    except Unsupported as error:
        raise InvalidProblem(str(error)) from None


def mask_of_text(text: str, captured: tuple[torch.Tensor, ...]) -> Mask:
    """Return the mask of a predicate's text over tensors, right for any elements they may have."""
    expr = predicate_of(text, tuple(map(kind_of_tensor, captured)))
    return mask_of_trace(Traced(expr, captured, (), Derived()), looks_at_tables=False)


def known_mask(traced: Traced) -> Mask:
    """Return the mask of a traced predicate, solved once for the same expression and tensors."""
    if traced.makes_tensors:
        return mask_of_trace(traced)
    # Aliases: the cache must not keep the tensors alive.
    aliases = replace(traced, captured=tuple(one.detach() for one in traced.captured))
    known = _known.get(traced.expr, traced.captured, lambda: mask_of_trace(aliases))
    mask = Mask(known.form, known.args)  # which keeps how it was made by itself
    vars(mask).update(vars(known))
    return mask


_known: TensorCache[Mask] = TensorCache(MAX_KNOWN, elements=False)


def general_mask(traced: Traced) -> Mask:
    """Return the mask of a traced predicate with other tensors than before, solved once for the
    same expression."""
    places = {id(one): place for place, one in enumerate(traced.captured)}
    key = (traced.expr, *((one.dtype, one.ndim, one.device) for one in traced.captured))
    kept = _general.get(
        key,
        lambda: with_tensors(
            mask_of_trace(traced, looks_at_tables=False), lambda one: places[id(one)]
        ),
    )
    mask = with_tensors(kept, lambda place: traced.captured[place])
    vars(mask)["_kind"] = kind_of_mask(kept)
    return mask


_general: BoundedCache[Any, Mask] = BoundedCache(MAX_KNOWN)


def mask_of_trace(traced: Traced, *, looks_at_tables: bool = True) -> Mask:
    """Return the mask of a traced predicate. `looks_at_tables` lets the elements of tables say
    whether ids are compared by rank, which needs no lists of tiles."""
    written = conjuncts(_within_documents(traced.expr))
    near = [_by_distance(part) for part in written]
    if not written:
        return full()
    by_distance = [mask for mask in near if mask is not None]
    if len(by_distance) == len(near) and any(mask.form is DILATED for mask in by_distance):
        return intersect(*by_distance)  # rows can be regrouped
    # Ids may be changed in place until their documents are not whole: ranks stay right then.
    compared = _compared(list(written), traced) if looks_at_tables else None
    if compared is not None:
        return compared
    documents = [_same_document(part, traced) for part in written]
    parts = [part if mask is None else mask for part, mask in zip(written, documents, strict=True)]
    compared = _compared(parts, traced)
    return _joined(parts, traced) if compared is None else compared


def _joined(parts: list[Any], traced: Traced) -> Mask:
    """Return the `&` of masks and conditions."""
    known = [part for part in parts if isinstance(part, Mask)]
    (rest,), captured = merge(
        [(both(*(p for p in parts if not isinstance(p, Mask))), traced.captured)]
    )
    if rest is TRUE:
        return intersect(*known)
    percent = _percent_live(rest, captured) if captured else 100
    values = tuple(_table(tensor, percent, traced.derived) for tensor in captured)
    return intersect(Mask.of(KEEP, to_text(rest), *values), *known)


def _compared(parts: list[Any], traced: Traced) -> Mask | None:
    """Return the mask with comparisons in the place of conditions that read tensors; None where
    that mask has no closed form."""
    replaced_parts: list[Any] = []
    for part in parts:
        if isinstance(part, Mask) or not part.loads():
            replaced_parts.append(part)
            continue
        is_negated = part.op == "not" and part.args[0].args[0].is_float
        comparison = comparison_of(part.args[0] if is_negated else part, traced)
        if comparison is None:
            return None
        replaced_parts.append(~comparison if is_negated else comparison)
    if not any(isinstance(part, Mask) and part not in parts for part in replaced_parts):
        return None
    mask = _joined(replaced_parts, traced)
    sides: tuple[Side, Side] = ("rows", "columns")
    return mask if all(visit(mask.general, side).sets for side in sides) else None


def _within_documents(expr: Any) -> Any:
    """Return an equal predicate without terms that are the same for q and k: where
    `ids[q] == ids[k]`, the document of k is that of q, and
    `q - starts[ids[q]] >= k - starts[ids[k]]` says `q >= k`."""
    same: dict[Expr, Expr] = {}
    for part in conjuncts(expr):
        if part.op == "eq" and all(side.op == "load" for side in part.args):
            of_q, of_k = sorted(part.args, key=lambda side: side.has(K))
            if replaced(of_q, {Q: K}) is of_k and not of_k.has(Q):
                same[of_k] = of_q
    if not same:
        return expr
    pairs = {part for part in conjuncts(expr) if part.op == "eq" and set(part.args) & set(same)}
    others = [replaced(part, same) for part in conjuncts(expr) if part not in pairs]
    return both(*pairs, *map(_cancelled, others))


def _cancelled(expr: Expr) -> Expr:
    """Return a predicate whose comparisons of integers have no term on both sides."""
    changed: dict[Expr, Expr] = {}
    for node in expr.walk():
        if node.op not in ("lt", "le", "eq") or not node.args[0].is_int:
            continue
        (left, a), (right, b) = map(linear, node.args)
        common = {term for term, factor in left.items() if right.get(term) == factor}
        if common:
            sides = (
                combined({t: f for t, f in terms.items() if t not in common}, constant)
                for terms, constant in ((left, a), (right, b))
            )
            changed[node] = made(node, tuple(sides))
    return replaced(expr, changed) if changed else expr


def _by_distance(part: Expr) -> Mask | None:
    """Convert a condition on the distance of q and k to a named mask; None for other conditions."""
    distances = (Q - K, K - Q, abs(Q - K))
    if part is FALSE or not part.args or not part.args[0].is_int:
        return None
    low, high = part.args
    if part.op == "eq" and low.op == "mod" and high.is_const and high.value == 0:
        distance, step = low.args
        return dilated(step.value) if step.is_const and distance in distances else None
    if part.op not in ("le", "lt"):
        return None
    room = high - low - int(part.op == "lt")
    ahead, behind, around = (subtract(room, -distance) for distance in (K - Q, Q - K, abs(Q - K)))
    if ahead.is_const and ahead.value == 0:
        return causal()
    for limit, sides in ((ahead, (False, True)), (behind, (True, False)), (around, (True, True))):
        if limit.is_const and 0 <= limit.value <= MAX_WINDOW:
            left, right = (limit.value if side else None for side in sides)
            return sliding_window(left, right)
    return None


def _same_document(part: Expr, traced: Traced) -> Mask | None:
    """Return the mask of `ids[q] == ids[k]`, of documents that need not be whole."""
    if part.op != "eq" or any(side.op != "load" for side in part.args):
        return None
    left, right = part.args
    (*at, first), (*same, second) = (side.args or (None,) for side in part.args)
    if slot_of(left) != slot_of(right) or at != same or {first, second} != {Q, K}:
        return None
    ids = traced.captured[slot_of(left)]
    is_made = traced.derived.made(ids)
    if at not in ([], [B]) or ids.dtype.is_floating_point or is_made:
        return None
    return of_ids(ids, are_whole=False)


def _table(tensor: Any, percent: int, derived: Derived) -> Values:
    """Return the values of a tensor that is looked up: a recipe if the function made the tensor."""
    looked_up = table(tensor, percent)
    recipe = derived.recipe(tensor, getattr(torch, looked_up.elements))
    return looked_up if recipe is None else replace(looked_up, tensor=None, recipe=recipe)


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


def _percent_live(keep: Any, captured: tuple[Any, ...]) -> int:
    """Return the percentage of tiles that a mask leaves, rounded up to a power of two.

    The length of a call is not known yet; the longest dimension of the tensors read is a good
    guess.
    """
    sizes = [size for tensor in captured for size in tensor.shape]
    length = min(max(sizes, default=BLOCK), LONGEST)
    shape = Shape(1, 1, length, length).tiled(BLOCK, BLOCK)
    lists = build(keep, captured, shape, device="cpu", side="rows")
    live = lists.visited_tiles / (shape.rows * shape.columns)
    return min(100, 2 ** math.ceil(math.log2(max(1.0, 100 * live))))
