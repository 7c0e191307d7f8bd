"""Smallest and largest elements of a captured tensor over boxes of indices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from itertools import product

import torch

MOST_BLOCKS = 4
"""Most blocks per dimension that cover a box."""

Extremes = tuple[torch.Tensor, torch.Tensor]


class BoxExtremes:
    """Answers for many boxes at once, from tables of blocks of powers of two made on demand.

    The tables together are about as large as the tensor. A box that blocks do not cover exactly
    gets the extremes of a slightly larger one.
    """

    def __init__(self, tensor: torch.Tensor, boxed: Sequence[int]) -> None:
        """`boxed` are the dimensions that boxes extend in; in the others a box has one index."""
        single = [dim for dim in range(tensor.dim()) if dim not in boxed]
        self._single = [tensor.shape[dim] for dim in single]
        self._boxed = [tensor.shape[dim] for dim in boxed]
        values = tensor.permute(*single, *boxed).reshape(-1, *self._boxed)
        if values.dtype == torch.bool:  # which has no minimum
            values = values.view(torch.uint8)
        self._tables: dict[tuple[int, ...], Extremes] = {(0,) * len(boxed): (values, values)}

    def of(
        self,
        single: Sequence[torch.Tensor],
        first: Sequence[torch.Tensor],
        last: Sequence[torch.Tensor],
    ) -> Extremes:
        """Return the smallest and largest element of each box; all indices inside the tensor."""
        row = torch.zeros((), dtype=torch.int64, device=first[0].device)
        for index, size in zip(single, self._single, strict=True):
            row = row * size + index
        shifts = tuple(map(_shift, first, last))
        smallest, largest = self._table(shifts)
        starts = [index >> shift for index, shift in zip(first, shifts, strict=True)]
        ends = [index >> shift for index, shift in zip(last, shifts, strict=True)]
        counts = [int((end - start).max()) + 1 for start, end in zip(starts, ends, strict=True)]
        blocks = [
            (row, *map(torch.minimum, map(torch.add, starts, steps), ends))
            for steps in product(*map(range, counts))
        ]
        low = reduce(torch.minimum, (smallest[block] for block in blocks))
        high = reduce(torch.maximum, (largest[block] for block in blocks))
        return low, high

    @cached_property
    def everywhere(self) -> Extremes:
        """The smallest and largest element of all."""
        smallest, largest = next(iter(self._tables.values()))
        return smallest.amin(), largest.amax()

    def _table(self, shifts: tuple[int, ...]) -> Extremes:
        """Return the extremes of every block of 2**shift indices in each dimension."""
        if shifts not in self._tables:
            finer = max(
                (known for known in self._tables if all(map(int.__le__, known, shifts))), key=sum
            )
            smallest, largest = self._tables[finer]
            for dim, (have, want) in enumerate(zip(finer, shifts, strict=True), start=1):
                if want > have:
                    smallest = _pool(smallest, dim, want - have).amin(dim + 1)
                    largest = _pool(largest, dim, want - have).amax(dim + 1)
            self._tables[shifts] = smallest, largest
        return self._tables[shifts]


def _pool(table: torch.Tensor, dim: int, shift: int) -> torch.Tensor:
    """Return the table with a dimension split in blocks of 2**shift; the last element is repeated
    to fill the last block."""
    size, block = table.shape[dim], 1 << shift
    missing = -size % block
    if missing:
        last = table.narrow(dim, size - 1, 1)
        repeated = [missing if d == dim else -1 for d in range(table.dim())]
        table = torch.cat([table, last.expand(repeated)], dim)
    return table.unflatten(dim, (-1, block))


def _shift(first: torch.Tensor, last: torch.Tensor) -> int:
    """Return the logarithm of the smallest block size at which a few blocks cover every range."""
    shift = 0
    while int(((last >> shift) - (first >> shift)).max()) >= MOST_BLOCKS:
        shift += 1
    return shift
