"""Masks of traced functions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tilegen.masks.comparison import comparison_of
from tilegen.masks.form import Side
from tilegen.masks.kinds import filled
from tilegen.masks.language.algebra import both, conjuncts
from tilegen.masks.language.expr import B, Expr, K, Q, slot_of
from tilegen.masks.language.integers import combined, linear
from tilegen.masks.language.rewriting import made, merge, replaced
from tilegen.masks.language.texts import to_text
from tilegen.masks.mask import AND, Mask
from tilegen.masks.naming import canonical, simplified
from tilegen.masks.packed import of_ids
from tilegen.masks.snapshots import TensorCache
from tilegen.masks.tiles.spans import visit
from tilegen.masks.tracing.trace import Traced
from tilegen.masks.usual import KEEP, predicate_of
from tilegen.masks.values import table_of

MAX_KNOWN = 512
"""Masks of functions that are kept."""


def mask_of_text(text: str, captured: tuple[torch.Tensor, ...]) -> Mask:
    """Return the mask of a predicate's text over tensors, right for any elements they may have."""
    tables = tuple(map(table_of, captured))
    expr = predicate_of(text, tuple([one.kind for one in tables]))
    return mask_of_trace(Traced(expr, tables), looks_at_tables=False)


def known_mask(traced: Traced) -> Mask:
    """Return the mask of a traced predicate, solved once for the same expression and tensors."""
    if traced.makes_tensors:
        return mask_of_trace(traced)
    # Aliases: the cache must not keep the tensors alive.
    aliases = traced.with_tensors(torch.Tensor.detach)
    known = _known.get(traced.expr, traced.captured, lambda: mask_of_trace(aliases))
    mask = Mask(known.form, known.args)  # which keeps how it was made by itself
    vars(mask).update(vars(known))
    return mask


_known: TensorCache[Mask] = TensorCache(MAX_KNOWN, elements=False)


def general_mask(traced: Traced) -> Mask:
    """Return the mask of a traced predicate with other tensors than before, solved once for the
    same expression."""
    make = partial(mask_of_trace, traced, looks_at_tables=False)
    return filled(traced.expr, traced.captured, make)


def mask_of_trace(traced: Traced, *, looks_at_tables: bool = True) -> Mask:
    """Return the mask of a traced predicate. `looks_at_tables` lets the elements of tables say
    whether ids are compared by rank, which needs no lists of tiles."""
    written = conjuncts(simplified(_within_documents(traced.expr)))
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
    rest = both(*(part for part in parts if not isinstance(part, Mask)))
    (rest,), tables = merge([(rest, traced.tables)])
    return canonical(Mask.of(AND, Mask.of(KEEP, to_text(rest), *tables), *known))


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


def _same_document(part: Expr, traced: Traced) -> Mask | None:
    """Return the mask of `ids[q] == ids[k]`, of documents that need not be whole."""
    if part.op != "eq" or any(side.op != "load" for side in part.args):
        return None
    left, right = part.args
    (*at, first), (*same, second) = (side.args or (None,) for side in part.args)
    if slot_of(left) != slot_of(right) or at != same or {first, second} != {Q, K}:
        return None
    ids = traced.tables[slot_of(left)]
    is_made = ids.recipe is not None
    if at not in ([], [B]) or is_made or ids.tensor.dtype.is_floating_point:
        return None
    return of_ids(ids.tensor, are_whole=False)
