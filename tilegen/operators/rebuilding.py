"""Decode the masks and scores of a crossing inside of an operator.

Masks and scores are cached by text, built with the tensors of the first call. Elements of these
tensors affect only estimates, never results. Further calls put their own tensors in the same
places.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any

import torch

from tilegen.errors import InvalidProblem
from tilegen.launch.changes import Changes, Pages
from tilegen.masks.blocks import Blocks, Restriction
from tilegen.masks.constructors import tree
from tilegen.masks.dropout import Dropout
from tilegen.masks.kinds import FULL_MASK, MaskKind, filled, kind_of_mask
from tilegen.masks.mask import Mask, intersect, unite
from tilegen.masks.notation import parse_mask
from tilegen.masks.packed import of_ids, packed
from tilegen.masks.score import Score
from tilegen.masks.snapshots import TensorCache
from tilegen.masks.values import UNKNOWN, Table, table_of, typical_of

MAX_KNOWN = 512
MAX_BLOCK_MASKS = 64
Tensors = Sequence[torch.Tensor]


def rebuilt(
    text: str,
    tensors: Tensors,
    trained: Sequence[int],
    lengths: tuple[int, int],
    dropout: Dropout | None,
    pages: Pages | None = None,
) -> tuple[Changes, Tensors]:
    """Rebuild mask, score and lengths of a call from its crossing.

    Also returns the tensors that they read, in the order of `tensors`; those in `trained` need
    gradients. Raises InvalidProblem and Unsupported.
    """
    tensors = [
        # Each tensor must be an object of its own: its place is looked up by id.
        tensor.detach().requires_grad_(i in trained)
        if i in trained or tensor.requires_grad or any(tensor is x for x in tensors[:i])
        else tensor
        for i, tensor in enumerate(tensors)
    ]
    spec = _spec(text)
    mask = FULL_MASK if "mask" not in spec else _filled_mask(spec["mask"], tensors, lengths)
    score = _filled_score(spec["score"], tensors, lengths) if "score" in spec else None
    kv_lengths = tensors[spec["lengths"]] if "lengths" in spec else None
    return Changes(mask, score, kv_lengths, dropout, pages), tensors


def trained_places(text: str) -> list[int]:
    """Return the indices of the tensors of a crossing that need gradients."""
    return _spec(text).get("trained", [])


@lru_cache(maxsize=MAX_KNOWN)
def _spec(text: str) -> Any:
    return json.loads(text)


# --------------------------------------------------------------------------------------------------
# Masks


def _filled_mask(spec: Any, tensors: Tensors, lengths: tuple[int, int]) -> Mask:
    if spec[0] == "blocks":
        return _of_blocks(spec, tensors, lengths)
    return filled(repr(spec), tensors, lambda: _mask(spec, tensors))


def _mask(spec: Any, tensors: Tensors) -> Mask:
    """Build the mask of a specification from tensors. Raises InvalidProblem and Unsupported."""
    match spec:
        case "plain", notation, places:
            given = iter([tensors[i] for i in places])
            return parse_mask(notation).with_tables(lambda table: _with(table, next(given)))
        case "keep", text, places:
            from tilegen.masks.traced import mask_of_text  # loads torch

            return mask_of_text(text, tuple(tensors[i] for i in places))
        case "ids", place, are_whole:
            return of_ids(tensors[place], are_whole)
        case "packed", cu_q, cu_kv, inner:
            return packed(tensors[cu_q], tensors[cu_kv], _mask(inner, tensors))
        case "tree", of, lengths:
            return tree(tensors[of], None if lengths is None else tensors[lengths])
        case "~", inner:
            return ~_mask(inner, tensors)
        case ("&" | "|") as sign, *parts:
            join = intersect if sign == "&" else unite
            return join(*(_mask(part, tensors) for part in parts))
        case _:
            raise InvalidProblem(f"expected a mask that crossed into an operator, got {spec!r}")


def _with(value: Table, tensor: torch.Tensor) -> Table:
    """Give a placeholder its tensor, and the typical number of the tensor if it can be computed."""
    typical = value.typical  # percent of pairs
    if value.pattern in ("constant", "layout"):
        typical = typical_of(tensor)
    elif value.pattern in ("ids", "firsts", "ends"):
        typical = UNKNOWN
    return replace(value, tensor=tensor, typical=typical)


def _of_blocks(spec: Any, tensors: Tensors, lengths: tuple[int, int]) -> Mask:
    """Build the mask of a BlockMask, whose blocks are read again when a tensor changed."""
    _, places, sides, inner = spec
    inside = _filled_mask(inner, tensors, lengths)
    counts, indices, *whole = (tensors[i] for i in places)
    blocks = Blocks(counts, indices, (whole[0], whole[1]) if whole else None, tuple(sides))

    def make() -> tuple[Restriction, MaskKind] | None:
        restriction = blocks.restriction(inside, lengths)
        return restriction and (restriction, kind_of_mask(restriction.of(inside)))

    cached = _restrictions.get((repr(spec), lengths), tensors, make)
    if cached is None:
        return inside
    restriction, kind = cached
    mask = restriction.of(inside)
    vars(mask)["_kind"] = kind
    return mask


_restrictions: TensorCache[tuple[Restriction, MaskKind] | None] = TensorCache(MAX_BLOCK_MASKS)


# --------------------------------------------------------------------------------------------------
# Scores


def _filled_score(spec: Any, tensors: Tensors, lengths: tuple[int, int]) -> Score:
    if spec[0] == "within":
        from tilegen.masks.packed_score import within_documents  # loads torch

        _, inner, (cu_q, cu_kv) = spec
        score = _filled_score(inner, tensors, lengths)
        return within_documents(score, tensors[cu_q], tensors[cu_kv], lengths)
    return filled(repr(spec), tensors, lambda: _score(spec, tensors))


def _score(spec: Any, tensors: Tensors) -> Score:
    match spec:
        case "score", text, places, sizes, sinks:
            axes = dict(sizes)
            read = [table_of(tensors[i], axes.get(slot)) for slot, i in enumerate(places)]
            return Score(text, tuple(read), None if sinks is None else table_of(tensors[sinks]))
        case "then", *parts:
            return reduce(Score.then, (_score(part, tensors) for part in parts))
        case _:
            raise InvalidProblem(f"expected a score that crossed into an operator, got {spec!r}")
