"""Estimate the work of a launch from programs and lengths: small launches run on one thread.

Sleeping threads take milliseconds to wake. The estimate counts whole tiles and ignores the mask. It
uses no clock, so the same launch always has the same number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS, tile_heads
from tilegen.problem import AttentionProblem

ENOUGH = 6_000_000
"""Work from which several threads share it [flop]: about 100 us of a thread at 60 Gflop/s."""
_PER_ELEMENT = 20
"""Flops in the time of an access to one element, for kernels without products."""
_PER_BYTE = 1.2
"""Flops in the time to stream a byte: tiles of few rows wait for memory, at about 50 GB/s."""


@dataclass(frozen=True)
class Work:
    """The work of a program of a kernel that holds head dims whole, or passes over its rows
    once. What a kernel joins are splits, which count as rows."""

    per_row: int
    """Flops for each streamed row."""
    tile: int
    """Rows of a streamed tile."""
    most: int
    """Most rows streamed by a program; 0 if only the argument at `place` bounds them."""
    place: int
    """Index of the argument with the number of streamed rows."""
    share: int = 0
    """Stationary rows in the share of a program; 0 if `per_row` includes them."""
    stays: int = 0
    """Index of the argument with the number of stationary rows."""

    @staticmethod
    def of(
        kernel: Kernel, config: TileConfig, problem: AttentionProblem, names: Sequence[str]
    ) -> Work | None:
        """Return the work of an emitted kernel with the given argument names; None if lengths do
        not determine it."""
        spec = KERNELS[kernel]
        if spec.sliced is not None:
            return None
        if spec.joins:
            width = max(problem.head_dim_qk, problem.head_dim_v)
            per_row = _PER_ELEMENT * config.block_m * width
            return Work(per_row, config.block_n, 0, names.index("num_splits"))
        if not spec.masked:
            widths = problem.head_dim_qk + problem.head_dim_v
            return Work(_PER_ELEMENT * config.block_m * widths, 1, 1, names.index("seqlen_q"))
        flops = sum(2 * problem.head_dims[dim] for dim in spec.products)
        if spec.shares:
            places = names.index("seqlen_q"), config.split_kv, names.index("seqlen_kv")
            return Work(problem.group_size * flops, config.block_m, 0, *places)
        if spec.stationary == "rows":
            rows = config.block_m * (tile_heads(config, problem.group_size) if spec.packs else 1)
            # Of pages only the longest request is known here.
            tile, passing = config.block_n, "longest_kv" if problem.page else "seqlen_kv"
            streamed = problem.element_bytes * (problem.head_dim_qk + problem.head_dim_v)
            least = round(_PER_BYTE * streamed)
        else:
            rows = config.block_n * problem.group_size
            tile, passing, least = config.block_m, "seqlen_q", 0
        return Work(max(rows * flops, least), tile, config.split_kv, names.index(passing))

    def is_small(self, programs: int, values: Sequence[Any]) -> bool:
        """Check whether a launch has less work than ENOUGH."""
        rows = values[self.place]
        if self.most and rows > self.most:
            rows = self.most
        kept = min(values[self.stays], self.share) if self.share else 1
        return programs * self.per_row * kept * (-(-rows // self.tile) * self.tile) < ENOUGH
