"""Work of a launch, estimated from its programs and lengths: small launches take one thread.

Threads that have slept take milliseconds to wake. The estimate is of whole tiles and without a
mask, and no clock has a say: the same launch always takes the same number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilegen.emit.identity import RenderedKernel
from tilegen.kernels.registry import KERNELS, tile_heads

ENOUGH = 6_000_000
"""Work that several threads share [flop]: about 100 us of one thread, at 60 Gflop/s."""
_PER_ELEMENT = 20
"""Flops in the time that an element of memory takes, for kernels without products."""


@dataclass(frozen=True)
class Work:
    """The work of a program of a kernel that holds head dims whole, or goes over its rows once."""

    per_row: int
    """Flops for each row that passes."""
    tile: int
    """Rows that pass together."""
    most: int
    """Rows that pass at most, 0 where their number alone says."""
    place: int
    """The argument that is their number."""
    share: int = 0
    """Rows that stay, of the share of a program; 0 where `per_row` counts them."""
    stays: int = 0
    """The argument that is the number of rows that stay."""

    @staticmethod
    def of(rendered: RenderedKernel, names: Sequence[str]) -> Work | None:
        """Return the work of an emitted kernel with arguments of these names; None where lengths
        do not tell it."""
        spec, config, problem = KERNELS[rendered.kernel], rendered.config, rendered.problem
        if spec.pages or spec.joins or spec.sliced is not None:
            return None
        if not spec.masked:
            widths = problem.head_dim_qk + problem.head_dim_v
            return Work(_PER_ELEMENT * config.block_m * widths, 1, 1, names.index("seqlen_q"))
        flops = sum(2 * problem.head_dims[dim] for dim in spec.products)
        if spec.shares:
            places = names.index("seqlen_q"), config.split_kv, names.index("seqlen_kv")
            return Work(problem.group_size * flops, config.block_m, 0, *places)
        if spec.stays == "rows":
            rows = config.block_m * (tile_heads(config, problem.group_size) if spec.packs else 1)
            tile, passing = config.block_n, "seqlen_kv"
        else:
            rows = config.block_n * problem.group_size
            tile, passing = config.block_m, "seqlen_q"
        return Work(rows * flops, tile, config.split_kv, names.index(passing))

    def is_small(self, programs: int, values: Sequence[Any]) -> bool:
        """Return True for a launch of less than ENOUGH work."""
        rows = values[self.place]
        if self.most and rows > self.most:
            rows = self.most
        kept = min(values[self.stays], self.share) if self.share else 1
        return programs * self.per_row * kept * (-(-rows // self.tile) * self.tile) < ENOUGH
