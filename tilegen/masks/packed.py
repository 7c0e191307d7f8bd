"""Masks of packed sequences: the columns that each row sees, as two numbers for each row.

Documents follow each other, so neither number falls from one row to the next, and the tiles of any
mask within documents are solved in closed form from O(seqlen) numbers. Those are made anew at each
call, on its device, from the ids or cu_seqlens that the user holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilegen.errors import InvalidProblem
from tilegen.masks.form import Condition, Form, Shape, Side, Window
from tilegen.masks.kinds import check_mask
from tilegen.masks.made import is_traced, noted
from tilegen.masks.mask import Mask, Pending, causal, full, intersect, sliding_window
from tilegen.masks.usual import SAME_ID, intervals
from tilegen.masks.values import (
    UNKNOWN,
    Lengths,
    Pair,
    Recipe,
    Table,
    as_tensor,
    is_checked,
    power_of_two_near,
)

Tables = tuple[torch.Tensor, ...]


def packed(
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any = None,
    mask: Mask | None = None,
    *,
    tokens: int | None = None,
) -> Mask:
    """Return `mask` within each document of packed sequences; pairs of two documents are dropped.

    cu_seqlens are (documents + 1,): where documents start, and where the last one ends. Tokens
    beyond it belong to no document: all their pairs are dropped. cu_seqlens may be changed in
    place. Positions and lengths in `mask` are those within a document. Documents are the same in
    rows and columns where cu_seqlens_kv is missing or the same object. How many `tokens` there are
    to expect saves a look at the values. Raises InvalidProblem.
    """
    mask = full() if mask is None else mask
    check_mask(mask)
    cu_q = _checked(cu_seqlens_q, "cu_seqlens_q")
    same = cu_seqlens_kv is None or cu_seqlens_kv is cu_seqlens_q
    cu_kv = cu_q if same else _checked(cu_seqlens_kv, "cu_seqlens_kv")
    if cu_q.shape != cu_kv.shape or cu_q.device != cu_kv.device:
        raise InvalidProblem(
            "cu_seqlens_q and cu_seqlens_kv must describe the same documents, got shapes "
            f"{tuple(cu_q.shape)} on {cu_q.device} and {tuple(cu_kv.shape)} on {cu_kv.device}"
        )
    how = ("packed", cu_q, cu_kv, mask)
    if is_traced():
        return Pending(how)
    return noted(_packed(cu_q, cu_kv, mask, tokens), how)


def _packed(cu_q: torch.Tensor, cu_kv: torch.Tensor, mask: Mask, tokens: int | None) -> Mask:
    documents = max(1, len(cu_q) - 1)
    typical = _typical(cu_kv) if tokens is None else max(1, tokens // documents)
    typical = power_of_two_near(typical)
    windows = [part.window for part in mask.conjuncts]
    known = [window for window in windows if window is not None]
    if len(known) < len(windows) or mask.tables:
        recipe = Recipe(places, (cu_q, cu_kv), check=check_cu_seqlens)
        return within(_same(recipe, typical), mask)
    if cu_q is cu_kv:  # positions in the sequence differ as those in a document do
        aligned = (
            causal() if part.is_causal else sliding_window(left, right)
            for part, (left, right, _) in zip(mask.conjuncts, known, strict=True)
        )
        recipe = Recipe(_crossed, (cu_q, cu_q), check=check_cu_seqlens)
        return _both_ways(recipe, typical) & intersect(*aligned)
    return _both_ways(Recipe(_crossed, (cu_q, cu_kv), tuple(known), check_cu_seqlens), typical)


def from_ids(ids: Any) -> Mask:
    """Return `ids[q] == ids[k]`; ids (seqlen,) or (batch, seqlen) of integers, or longer.

    The ids may be changed in place, but documents that are whole now must stay whole: the compiled
    kernel depends on it.
    """
    ids = as_tensor("ids", ids)
    if ids.ndim not in (1, 2) or ids.is_floating_point() or not ids.numel():
        raise InvalidProblem(
            "ids must be integers of shape (seqlen,) or (batch, seqlen), got "
            f"{ids.dtype} {tuple(ids.shape)}"
        )
    return Pending(("ids", ids, False)) if is_traced() else of_ids(ids, None)


def of_ids(ids: torch.Tensor, are_whole: bool | None) -> Mask:
    """Return `ids[q] == ids[k]` of documents that are whole, or perhaps are not; None: as they are
    now."""
    axes = "b" if ids.ndim == 2 else ""
    runs, distinct = _counted(ids)
    typical = power_of_two_near(max(1, ids.numel() // runs))
    are_whole = runs == distinct if are_whole is None else are_whole
    if are_whole:
        mask = _both_ways(Recipe(_runs, (ids,), check=_check_whole), typical, axes)
    else:
        mask = _same(Recipe(_numbered, (ids,)), typical, axes)
    return noted(mask, ("ids", ids, are_whole))


@dataclass(frozen=True)
class Documents:
    """The documents of a packed sequence: `start` and `length` of each, and for each token the
    number of its `document` and its `local` place there.

    A document of no length follows the last, for tokens beyond the end.
    """

    start: torch.Tensor
    length: torch.Tensor
    document: torch.Tensor
    local: torch.Tensor

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, tokens: int) -> Documents:
        """Locate the documents of a sequence of `tokens` tokens, without waiting for a device."""
        start = cu_seqlens.long().contiguous()
        token = torch.arange(tokens, device=start.device)
        # Clamp: the last tokens may belong to no document, and cu_seqlens may be invalid.
        document = (torch.searchsorted(start, token, right=True) - 1).clamp(min=0)
        length = torch.cat([start.diff(), torch.zeros_like(start[:1])])
        return cls(start, length, document, token - start[document])


def check_cu_seqlens(cu_q: torch.Tensor, cu_kv: torch.Tensor, lengths: Lengths, *_: Any) -> None:
    """Raise InvalidProblem unless cu_seqlens rise from 0 to at most the lengths of a call."""
    for name, cu, length in (("q", cu_q, lengths[0]), ("k", cu_kv, lengths[1])):
        _check_rising(cu, "cu_seqlens")
        if int(cu[-1]) > length:
            raise InvalidProblem(
                f"cu_seqlens must end at most with {name}'s {length} tokens, got {int(cu[-1])}"
            )


def _keep_within(
    at: Pair,
    side: Side,
    ids_q: Table,
    ids_kv: Table,
    mask: Mask,
    start_q: Table,
    start_kv: Table,
    length_q: Table,
    length_kv: Table,
) -> Condition:
    inside = Pair(
        b=ids_q.at(at),
        h=at.h,
        q=at.q - start_q.at(at),
        k=at.k - start_kv.at(at),
        seqlen_q=length_q.at(at),
        seqlen_kv=length_kv.at(at),
    )
    return SAME_ID.keep(at, side, ids_q, ids_kv) & mask.keep(inside, side)


def _shape_within(shape: Shape, *args: Any) -> Shape:
    """Return a shape with a batch entry for each document and the lengths of the longest document.

    The lengths are 1 if looking at cu_seqlens would wait for a device, and those of all tokens for
    a stand-in.
    """
    start_q: Table = args[3]
    recipe = start_q.recipe
    if recipe is None:
        documents = -(-shape.seqlen_q // max(1, start_q.typical))
        return Shape(documents, shape.heads, shape.seqlen_q, shape.seqlen_kv)
    return Shape(len(recipe.sources[0]) - 1, shape.heads, *(_longest(start_q) or (1, 1)))


def _check_longest(seqlen_q: int, seqlen_kv: int, *args: Any) -> None:
    """Check the mask at the length of the longest document, unless that would wait for a device."""
    if longest := _longest(args[3]):
        args[2].check_lengths(*longest)


def _longest(start_q: Table) -> Lengths | None:
    """Return the rows and the columns of the longest document; None if reading them would wait
    for a device."""
    sources = start_q.recipe.sources if start_q.recipe else ()
    if not sources or not all(map(is_checked, sources)):
        return None
    cu_q, cu_kv = sources
    return longest_of(cu_q), longest_of(cu_kv)


WITHIN = Form(
    "within",
    _keep_within,
    spelt=lambda ids_q, ids_kv, mask, *_: f"within({Mask.of(SAME_ID, ids_q, ids_kv)},{mask})",
    check_lengths=_check_longest,
    shape_of_parts=_shape_within,
    apart=lambda *_: "pairs",
)
"""A mask within documents: `document(q) == document(k)`, and the mask at positions and lengths
within the document, whose number is b. The arguments are the ids of rows and columns, the mask, and
by row and by column the starts and the lengths of documents."""


def within(same: Mask, mask: Mask) -> Mask:
    """Return a mask within documents, whose ids are stand-ins or a recipe's first tables."""
    q, k = same.args
    rows, columns = q.axes or "", k.axes or ""
    starts = q.beside(2, "firsts", rows), k.beside(3, "firsts", columns)
    return Mask.of(WITHIN, q, k, mask, *starts, *(q.beside(i, "constant", rows) for i in (4, 5)))


def _same(recipe: Recipe, typical: int, axes: str = "") -> Mask:
    """Return the mask of a recipe for the ids of rows and of columns."""
    q = Table(axes=f"{axes}q", typical=typical, pattern="ids", recipe=recipe)
    return Mask.of(SAME_ID, q, q.beside(1, "ids", f"{axes}k"))


def _both_ways(recipe: Recipe, typical: int, axes: str = "") -> Mask:
    """Return the mask of a recipe for `first[q] <= k < end[q]` and the same by column."""
    return intervals(Table(axes=f"{axes}q", typical=typical, recipe=recipe))


# --------------------------------------------------------------------------------------------------
# Recipes


def _crossed(cu_q: torch.Tensor, cu_kv: torch.Tensor, lengths: Lengths, *windows: Window) -> Tables:
    """Return first and end by row, then by column: a token sees its document, under causal masks
    and windows."""
    rows, columns = Documents.of(cu_q, lengths[0]), Documents.of(cu_kv, lengths[1])
    first = columns.start[rows.document]
    length = columns.length[rows.document]
    low, high = torch.zeros_like(length), length
    for left, right, alignment in windows:
        centre = rows.local
        if alignment == "bottom_right":
            centre = centre + length - rows.length[rows.document]
        if left is not None:
            low = torch.maximum(low, torch.minimum(centre - left, length))  # pyright: ignore
        if right is not None:
            high = torch.minimum(high, (centre + right + 1).clamp(min=0))  # pyright: ignore
    first, end = first + low, first + high
    k = torch.arange(lengths[1], device=first.device)
    first_row, end_row = (torch.searchsorted(one, k, right=True) for one in (end, first))
    return first.int(), end.int(), first_row.int(), end_row.int()


def places(cu_q: torch.Tensor, cu_kv: torch.Tensor, lengths: Lengths) -> Tables:
    """Return the document of rows and of columns, its start for both, and by row its lengths in
    rows and in columns."""
    rows, columns = Documents.of(cu_q, lengths[0]), Documents.of(cu_kv, lengths[1])
    # Beyond the last document rows and columns have different ids, so that no pair is kept.
    beyond = columns.document == len(cu_kv) - 1
    numbers = (
        *(rows.document, columns.document + beyond),
        *(rows.start[rows.document], columns.start[columns.document]),
        *(rows.length[rows.document], columns.length[rows.document]),
    )
    return tuple(one.int() for one in numbers)


def _runs(ids: torch.Tensor, lengths: Lengths) -> Tables:
    """Return first and end by row, then by column: a token sees the run of ids it lies in."""
    ids = ids[..., : max(lengths)]
    length = ids.shape[-1]
    new = torch.ones_like(ids, dtype=torch.bool)
    new[..., 1:] = ids[..., 1:] != ids[..., :-1]
    here = torch.arange(length, dtype=torch.int32, device=ids.device)
    first = torch.where(new, here, 0).cummax(-1).values
    starts_next = torch.where(new, here, length).flip(-1).cummin(-1).values.flip(-1)
    end = torch.cat([starts_next[..., 1:], torch.full_like(starts_next[..., :1], length)], -1)
    sides = (one[..., :size] for size in lengths for one in (first, end))
    return tuple(one.contiguous() for one in sides)


def _numbered(ids: torch.Tensor, lengths: Lengths) -> Tables:
    """Return the ids of rows and of columns, renumbered from 0: ids are any integers of 64 bits."""
    ordered, order = ids.flatten().long().sort()
    number = torch.zeros_like(order)
    number[1:] = (ordered[1:] != ordered[:-1]).long().cumsum(0)
    renumbered = torch.empty_like(order).scatter_(0, order, number).view(ids.shape)
    return tuple(renumbered[..., :size].int().contiguous() for size in lengths)


# --------------------------------------------------------------------------------------------------
# Checks


def _counted(ids: torch.Tensor) -> tuple[int, int]:
    """Count runs of the same id, and different ids, over all rows."""
    each = ids[None] if ids.ndim == 1 else ids
    runs = len(each) + int((each[:, 1:] != each[:, :-1]).sum())
    return runs, sum(len(row.unique()) for row in each)


def _check_whole(ids: torch.Tensor, lengths: Lengths) -> None:
    runs, distinct = _counted(ids[..., : max(lengths)])
    if runs != distinct:
        raise InvalidProblem(
            f"documents were whole when the mask was made, and {distinct} of them now lie in "
            f"{runs} places; make a mask for ids like these"
        )


def _checked(cu_seqlens: Any, name: str) -> torch.Tensor:
    tensor = as_tensor(name, cu_seqlens)
    if tensor.ndim != 1 or not len(tensor) or tensor.is_floating_point():
        raise InvalidProblem(
            f"{name} must be integers of shape (documents + 1,), got {tensor.dtype} "
            f"{tuple(tensor.shape)}"
        )
    if is_checked(tensor):
        _check_rising(tensor, name)
    return tensor


def _check_rising(cu_seqlens: torch.Tensor, name: str) -> None:
    if int(cu_seqlens[0]) != 0 or bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
        raise InvalidProblem(
            f"{name} must rise from 0 to at most the number of tokens, got "
            f"{cu_seqlens.tolist()[:8]}"
        )


def longest_of(cu_seqlens: torch.Tensor) -> int:
    """Return the length of the longest document, at least 1; reading it waits for the device."""
    return max(1, int(cu_seqlens.diff().max())) if len(cu_seqlens) > 1 else 1


def _typical(cu_seqlens: torch.Tensor) -> int:
    """Return the mean over tokens of the length of their document."""
    if cu_seqlens.device.type != "cpu":
        return UNKNOWN
    lengths = cu_seqlens.diff().double()
    return max(1, round(float((lengths**2).sum()) / max(1.0, float(lengths.sum()))))
