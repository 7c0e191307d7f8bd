"""Masks of blocks, and of pairs inside of blocks, as a FlexAttention BlockMask lists them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tilegen.errors import InvalidProblem
from tilegen.masks.constructors import block_sparse
from tilegen.masks.form import Shape
from tilegen.masks.mask import Mask


@dataclass(frozen=True)
class Restriction:
    """Blocks that are kept as a whole, and blocks in which another mask decides. Reads no tensor of
    the BlockMask, nor of the other mask."""

    whole: Mask
    partial: Mask

    def of(self, inside: Mask) -> Mask:
        """Restrict a mask."""
        return self.whole | (self.partial & inside)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks that are visited, as lists for each row of blocks."""

    counts: torch.Tensor
    """Number of blocks of each row in which the mask decides pair by pair, (batch, heads, rows)."""
    indices: torch.Tensor
    """The columns of these blocks, (batch, heads, rows, columns)."""
    whole: tuple[torch.Tensor, torch.Tensor] | None
    """Counts and indices of blocks that are kept as a whole."""
    sides: tuple[int, int]
    """Rows and columns of a block."""

    def mask(self, inside: Mask, lengths: tuple[int, int]) -> Mask:
        """Restrict a mask to the blocks, at these lengths of a call."""
        restriction = self.restriction(inside, lengths)
        return inside if restriction is None else restriction.of(inside)

    def restriction(self, inside: Mask, lengths: tuple[int, int]) -> Restriction | None:
        """Return the restriction to the blocks; None if `inside` visits exactly these blocks
        already, as masks of `create_block_mask` do."""
        is_one = all(side >= size for side, size in zip(self.sides, lengths, strict=True))
        if is_one and bool(self.counts.all()):  # sides may be too large for tiles
            return None
        partial, whole = self._layouts()
        if self._same(inside, partial | whole, whole, lengths):
            return None
        rows, columns = self.sides
        side = math.gcd(rows, columns)
        whole, partial = (
            layout.repeat_interleave(rows // side, -2).repeat_interleave(columns // side, -1)
            for layout in (whole, partial)
        )
        return Restriction(block_sparse(whole, side), block_sparse(partial, side))

    def _layouts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute bool tables of partial and of whole blocks, (batch, heads, rows, columns)."""
        like = self.indices

        def layout(listed: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
            table = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
            if listed is None:
                return table
            counts, indices = listed
            is_listed = torch.arange(indices.shape[-1], device=like.device) < counts[..., None]
            is_outside = is_listed & ((indices < 0) | (indices >= table.shape[-1]))
            if bool(is_outside.any()):
                raise InvalidProblem(
                    f"expected listed blocks from 0 to {table.shape[-1] - 1}, got "
                    f"{int(indices[is_outside][0])}; PagedAttention lists -1 for pages that it has "
                    "not reserved"
                )
            # Indices beyond the count may repeat a listed block: move them into an extra column.
            columns = torch.where(is_listed, indices.long(), table.shape[-1])
            return torch.nn.functional.pad(table, (0, 1)).scatter(-1, columns, True)[..., :-1]

        return layout((self.counts, self.indices)), layout(self.whole)

    def _same(
        self, inside: Mask, visited: torch.Tensor, whole: torch.Tensor, lengths: tuple[int, int]
    ) -> bool:
        """Check whether a mask leaves exactly the listed blocks, and keeps all pairs of the
        whole blocks."""
        from tilegen.masks.tiles.tile_ranges import flags  # loads torch

        batch, heads, rows, columns = visited.shape
        shape = Shape(batch, heads, *lengths).tiled(*self.sides)
        if (rows, columns) != (shape.rows, shape.columns):
            return False
        live, full = flags(inside, shape, visited.device)
        return torch.equal(live.expand_as(visited), visited) and bool((whole <= full).all())
