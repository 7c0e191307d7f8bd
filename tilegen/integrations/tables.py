"""Masks from tensors of other packages, made without reading the tensors' values.

Nothing here waits for a device. Masks of one form are of one kind for any values, so that a call
with new tensors reuses the kernels of the last.
"""

from __future__ import annotations

from typing import Any

import torch

from tilegen.masks.mask import Mask
from tilegen.masks.usual import BLOCK_SPARSE, DOCUMENTS, SAME_ID
from tilegen.masks.values import UNKNOWN, Pattern, Table

TYPICAL = 50
"""Assumed share of the pairs that bool masks keep [percent]. Measuring it would wait for the GPU,
and choose other kernels for each mask."""
BlockTables = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def padding(is_token: torch.Tensor, rows: int) -> Mask:
    """Return the mask with `rows` rows that keeps the columns where `is_token` (batch, columns).

    Padding may be before, after and between the tokens. Tiles of padding before and after them are
    not visited. If there is no padding between the tokens, tiles with tokens only need no mask.
    """
    from tilegen.masks.comparison import ORDERED  # loads torch

    is_token = is_token.bool()
    batch, columns = is_token.shape
    at = torch.arange(columns, dtype=torch.int32, device=is_token.device)
    first = torch.where(is_token, at, columns).amin(-1, keepdim=True)
    end = torch.where(is_token, at + 1, 0).amax(-1, keepdim=True)
    whole = is_token.sum(-1, keepdim=True) == end - first
    by_row = tuple(
        bound.expand(batch, rows) for bound in (first, end, first, torch.where(whole, end, first))
    )
    first_row, end_row = torch.where(at >= end, rows, 0), torch.where(at < first, 0, rows)
    sure = torch.where(whole, first_row, 0), torch.where(whole, end_row, 0)
    column = _values("bk", "table", (~is_token).int(), typical=100)
    row = _values("bq", "table", torch.ones_like(by_row[0]), typical=100)
    bounds = [
        _values(axes, "rising", bound, typical=100)
        for axes, four in (("bq", by_row), ("bk", (first_row, end_row, *sure)))
        for bound in four
    ]
    return Mask.of(ORDERED, column, row, *bounds)


def chunks(
    size: int, lengths: tuple[int, int], at: tuple[torch.Tensor, torch.Tensor], shift: Any
) -> Mask:
    """Return the mask `at_q // size == at_k // size`, for chunks of positions that rise by one.

    `at` are the positions (batch, 1) of the first row and the first column in the chunked sequence.
    `shift` is the column at the position of the first row; it may be a tensor.
    """
    seqlen_q, seqlen_kv = lengths
    at_q, at_kv = at
    q = at_q + torch.arange(seqlen_q, device=at_q.device)
    k = at_kv + torch.arange(seqlen_kv, device=at_kv.device)
    q, k = (torch.div(x, size, rounding_mode="floor") * size for x in (q, k))
    first, first_row = q - at_q + shift, k - at_kv - shift
    return _intervals(
        (
            first.clamp(0, seqlen_kv),
            (first + size).clamp(0, seqlen_kv),
            first_row.clamp(0, seqlen_q),
            (first_row + size).clamp(0, seqlen_q),
        )
    )


def runs(*numbers: torch.Tensor) -> Mask:
    """Return the mask that keeps pairs of tokens of the same run.

    A run is a sequence of adjacent tokens with the same `numbers` (batch, tokens). Runs elsewhere
    with the same numbers are other runs.
    """
    length = numbers[0].shape[-1]
    at = torch.arange(length, dtype=torch.int32, device=numbers[0].device)
    new = torch.zeros_like(numbers[0], dtype=torch.bool)
    for number in numbers:
        new[:, 1:] |= number[:, 1:] != number[:, :-1]
    first = torch.where(new, at, 0).cummax(-1).values
    follows = torch.where(new, at, length).flip(-1).cummin(-1).values.flip(-1)
    end = torch.cat([follows[:, 1:], torch.full_like(follows[:, :1], length)], -1)
    return _intervals((first, end, first, end))


def groups(of_q: torch.Tensor, of_k: torch.Tensor) -> Mask:
    """Return the mask `of_q[b, q] == of_k[b, k]`, of 32-bit integers in any order."""
    return Mask.of(SAME_ID, _values("bq", "ids", of_q), _values("bk", "ids", of_k))


def dense(keep: torch.Tensor) -> Mask:
    """Return the mask of a bool tensor (1 or batch, 1 or heads, rows, columns)."""
    axes = "".join(name for name, size in zip("bh", keep.shape, strict=False) if size != 1)
    keep = keep.reshape(*(size for size in keep.shape[:2] if size != 1), *keep.shape[2:])
    layout = Table(axes=axes, typical=TYPICAL, tensor=keep, kind="bool", pattern="layout")
    return Mask.of(BLOCK_SPARSE, layout, 1)


def _intervals(tables: BlockTables) -> Mask:
    """Return the mask with the given first and end by row, then by column."""
    names: tuple[tuple[str, Pattern], ...]
    names = ("bq", "firsts"), ("bq", "ends"), ("bk", "firsts"), ("bk", "ends")
    return Mask.of(
        DOCUMENTS, *(_values(*name, table) for name, table in zip(names, tables, strict=True))
    )


def _values(axes: str, pattern: Pattern, tensor: torch.Tensor, *, typical: int = UNKNOWN) -> Table:
    table = tensor.to(torch.int32).contiguous()
    return Table(axes=axes, typical=typical, tensor=table, pattern=pattern)
