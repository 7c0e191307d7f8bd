"""The sizes of a call, and of its tiles, as masks and scores need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shape:
    """Sizes that a mask's values and lists are for; heads are query heads."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_kv: int

    @staticmethod
    def of(q: torch.Tensor, k: torch.Tensor) -> Shape:
        """Return the shape of a call."""
        return Shape(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

    @property
    def by_axis(self) -> dict[str, int]:
        """The same by the names of axes."""
        return dict(b=self.batch, h=self.heads, q=self.seqlen_q, k=self.seqlen_kv)

    def tiled(self, block_m: int, block_n: int) -> TiledShape:
        """Return the same in tiles of so many rows and columns."""
        sizes = (self.batch, self.heads, self.seqlen_q, self.seqlen_kv)
        return TiledShape(*sizes, block_m, block_n)


@dataclass(frozen=True)
class TiledShape(Shape):
    """What tiles are classified and listed for."""

    block_m: int
    block_n: int

    @property
    def rows(self) -> int:
        """Query tiles."""
        return -(-self.seqlen_q // self.block_m)

    @property
    def columns(self) -> int:
        """KV tiles."""
        return -(-self.seqlen_kv // self.block_n)
