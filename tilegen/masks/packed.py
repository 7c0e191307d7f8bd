"""Masks of packed sequences: which columns each row sees, as two numbers a row.

Documents follow each other, so neither number falls from one row to the next, and the tiles of any
mask within documents are solved in closed form from O(seqlen) numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tilegen.errors import InvalidProblem
from tilegen.masks.constructors import Intervals, SameDocument
from tilegen.masks.mask import And, Causal, Full, Mask, SlidingWindow, full, intersect
from tilegen.masks.values import Values, power_of_two_near


def packed(cu_seqlens_q: Any, cu_seqlens_kv: Any = None, mask: Mask | None = None) -> Mask:
    """Return `mask` within each document of packed sequences; pairs of two documents are dropped.

    cu_seqlens are (documents + 1,): where documents start, and where the last one ends. Positions
    and lengths in `mask` are those within a document. Raises InvalidProblem.
    """
    cu_q = _checked(cu_seqlens_q, "cu_seqlens_q")
    cu_kv = cu_q if cu_seqlens_kv is None else _checked(cu_seqlens_kv, "cu_seqlens_kv")
    if cu_q.shape != cu_kv.shape or cu_q.device != cu_kv.device:
        raise InvalidProblem(
            "cu_seqlens_q and cu_seqlens_kv must describe the same documents, got shapes "
            f"{tuple(cu_q.shape)} on {cu_q.device} and {tuple(cu_kv.shape)} on {cu_kv.device}"
        )
    rows, columns = Documents.of(cu_q), Documents.of(cu_kv)
    mask = mask or full()
    parts = mask.parts if isinstance(mask, And) else (mask,)
    if not all(isinstance(part, Full | Causal | SlidingWindow) for part in parts) or any(
        part.values for part in parts
    ):
        return _within(rows, columns, mask)
    if torch.equal(cu_q, cu_kv):  # positions in the sequence differ as those in a document do
        first = rows.start[rows.document]
        end = first + rows.length[rows.document]
        aligned = [replace(p, alignment="top_left") for p in parts if not isinstance(p, Full)]  # type: ignore[arg-type]
        return _both_ways(first, end, first, end, _typical(cu_q), "") & intersect(*aligned)
    first = columns.start[rows.document]
    length = columns.length[rows.document]
    low, high = torch.zeros_like(length), length
    for part in parts:
        if isinstance(part, Full):
            continue
        centre = rows.local
        if part.alignment == "bottom_right":  # type: ignore[union-attr]
            centre = centre + length - rows.length[rows.document]
        left, right = (None, 0) if isinstance(part, Causal) else (part.left, part.right)  # type: ignore[union-attr]
        if left is not None:
            low = torch.maximum(low, torch.minimum(centre - left, length))  # pyright: ignore
        if right is not None:
            high = torch.minimum(high, (centre + right + 1).clamp(min=0))  # pyright: ignore
    return _intervals(first + low, first + high, len(columns.local), _typical(cu_kv))


def from_ids(ids: Any) -> Mask:
    """Return `ids[q] == ids[k]`; ids (seqlen,) or (batch, seqlen) of integers."""
    ids = torch.as_tensor(ids)
    if ids.ndim not in (1, 2) or ids.is_floating_point() or not ids.numel():
        raise InvalidProblem(
            "ids must be integers of shape (seqlen,) or (batch, seqlen), got "
            f"{ids.dtype} {tuple(ids.shape)}"
        )
    axes = "b" if ids.ndim == 2 else ""
    new = torch.ones_like(ids, dtype=torch.bool)
    new[..., 1:] = ids[..., 1:] != ids[..., :-1]
    runs = int(new.sum())
    each = ids[None] if ids.ndim == 1 else ids
    typical = power_of_two_near(max(1, ids.numel() // runs))
    if runs != sum(len(row.unique()) for row in each):  # a document lies in several places
        ids = ids.unique(return_inverse=True)[1]  # any 64 bits may tell documents apart
        q, k = (
            Values(axes=axes + axis, typical=typical, tensor=_int32(ids), pattern="ids")
            for axis in "qk"
        )
        return SameDocument(q, k)
    length = ids.shape[-1]
    here = torch.arange(length, device=ids.device)
    first = torch.where(new, here, 0).cummax(-1).values
    starts_next = torch.where(new, here, length).flip(-1).cummin(-1).values.flip(-1)
    end = torch.cat([starts_next[..., 1:], torch.full_like(starts_next[..., :1], length)], -1)
    return _both_ways(first, end, first, end, typical, axes)


@dataclass(frozen=True)
class Documents:
    """Where documents lie in a packed sequence; `document` and `local` are per token."""

    start: torch.Tensor
    length: torch.Tensor
    document: torch.Tensor
    local: torch.Tensor

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor) -> Documents:
        """Return the documents that start at cu_seqlens, but for its last element."""
        length = cu_seqlens.diff()
        total = int(cu_seqlens[-1])
        document = torch.repeat_interleave(
            torch.arange(len(length), device=length.device), length, output_size=total
        )
        start = cu_seqlens[:-1]
        local = torch.arange(total, device=length.device) - start[document]
        return cls(start, length, document, local)


@dataclass(frozen=True)
class Within(Mask):
    """A mask within documents: `document(q) == document(k) and mask.keep(...)` at positions and
    lengths within the document."""

    same: Mask
    mask: Mask
    start_q: Values
    start_kv: Values
    length_q: Values
    length_kv: Values

    @property
    def notation(self) -> str:
        return f"within({self.same.notation},{self.mask.notation})"

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any, b: Any = 0, h: Any = 0) -> Any:
        start_q, start_kv, length_q, length_kv = (
            value.at(b, h, q, k)
            for value in (self.start_q, self.start_kv, self.length_q, self.length_kv)
        )
        inside = self.mask.keep(q - start_q, k - start_kv, length_q, length_kv, b, h)
        return self.same.keep(q, k, seqlen_q, seqlen_kv, b, h) & inside


def _within(rows: Documents, columns: Documents, mask: Mask) -> Mask:
    typical = power_of_two_near(max(1, len(rows.local) // max(1, len(rows.length))))

    def value(axes: str, tensor: torch.Tensor, pattern: Any) -> Values:
        return Values(axes=axes, typical=typical, tensor=_int32(tensor), pattern=pattern)

    same = SameDocument(value("q", rows.document, "ids"), value("k", columns.document, "ids"))
    return Within(
        same,
        mask,
        value("q", rows.start[rows.document], "firsts"),
        value("k", columns.start[columns.document], "firsts"),
        value("q", rows.length[rows.document], "constant"),
        value("q", columns.length[rows.document], "constant"),
    )


def _intervals(first: torch.Tensor, end: torch.Tensor, columns: int, typical: int) -> Mask:
    """Return the mask of `first[q] <= k < end[q]`, neither of which falls."""
    k = torch.arange(columns, device=first.device)
    first_row = torch.searchsorted(end.contiguous(), k, right=True)
    end_row = torch.searchsorted(first.contiguous(), k, right=True)
    return _both_ways(first, end, first_row, end_row, typical, "")


def _both_ways(
    first: torch.Tensor,
    end: torch.Tensor,
    first_row: torch.Tensor,
    end_row: torch.Tensor,
    typical: int,
    axes: str,
) -> Mask:
    def value(tensor: torch.Tensor, axis: str, pattern: Any) -> Values:
        return Values(axes=axes + axis, typical=typical, tensor=_int32(tensor), pattern=pattern)

    return Intervals(
        value(first, "q", "firsts"),
        value(end, "q", "ends"),
        value(first_row, "k", "firsts"),
        value(end_row, "k", "ends"),
    )


def _typical(cu_seqlens: torch.Tensor) -> int:
    """Return the length of the document a token lies in, on average, as a power of two."""
    lengths = cu_seqlens.diff().double()
    total = float(lengths.sum())
    return power_of_two_near(max(1, round(float((lengths**2).sum()) / total))) if total else 1


def _checked(cu_seqlens: Any, name: str) -> torch.Tensor:
    tensor = torch.as_tensor(cu_seqlens)
    if tensor.ndim != 1 or len(tensor) < 2 or tensor.is_floating_point():
        raise InvalidProblem(
            f"{name} must be integers of shape (documents + 1,), got {tensor.dtype} "
            f"{tuple(tensor.shape)}"
        )
    tensor = tensor.long()
    if int(tensor[0]) != 0 or bool((tensor.diff() < 0).any()) or int(tensor[-1]) == 0:
        raise InvalidProblem(
            f"{name} must rise from 0 to the number of tokens, got {tensor.tolist()[:8]}"
        )
    return tensor


def _int32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int32).contiguous()
