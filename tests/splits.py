"""Configs for tests of the kernels that split the keys: small tiles, and splits of few of them."""

from __future__ import annotations

from tilegen.kernels.config import Kernel, TileConfig
from tilegen.masks.grouping import packed_heads
from tilegen.problem import AttentionProblem

NAMES: tuple[Kernel, Kernel] = ("fwd_split", "fwd_combine")
COMBINE = TileConfig(block_m=1, block_n=16)
ALL: dict[Kernel, TileConfig] = {
    "fwd_split": TileConfig(block_m=16, block_n=32, split_kv=64),
    "fwd_paged": TileConfig(block_m=16, block_n=32, split_kv=64),
    "fwd_combine": COMBINE,
}
"""Configs that are legal whatever mask and score are: each head has tiles of its own."""


def splits(
    problem: AttentionProblem, *, rows: int = 16, block_n: int = 16, keys: int = 32
) -> dict[Kernel, TileConfig]:
    """Return configs for both kernels: tiles of `rows` rows (more where a group has more heads),
    splits of so many keys."""
    heads = packed_heads(problem)
    block_m = max(1, rows // heads)
    split = TileConfig(block_m=block_m, block_n=block_n, heads=heads, split_kv=keys)
    return {NAMES[0]: split, NAMES[1]: COMBINE}
