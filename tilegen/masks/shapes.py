"""The sizes of a call, and of its tiles, as masks and scores need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shape:
    """Sizes of a call, for which a mask's values and lists are made; heads are query heads."""

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
        """The sizes by the letters of the axes: b, h, q and k."""
        return dict(b=self.batch, h=self.heads, q=self.seqlen_q, k=self.seqlen_kv)

    def tiled(self, block_m: int, block_n: int) -> TiledShape:
        """Return the shape cut into tiles of block_m rows and block_n columns."""
        sizes = (self.batch, self.heads, self.seqlen_q, self.seqlen_kv)
        return TiledShape(*sizes, block_m, block_n)


@dataclass(frozen=True)
class TiledShape(Shape):
    """The sizes of a call and of its tiles, for which tiles are classified and listed."""

    block_m: int
    block_n: int

    @property
    def rows(self) -> int:
        """The number of query tiles."""
        return -(-self.seqlen_q // self.block_m)

    @property
    def columns(self) -> int:
        """The number of KV tiles."""
        return -(-self.seqlen_kv // self.block_n)
