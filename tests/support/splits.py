"""Configs for tests of kernels that split streamed rows: small tiles and few splits."""

from __future__ import annotations

from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import BACKWARD
from tilegen.masks.grouping import packed_heads
from tilegen.problem import AttentionProblem

NAMES: tuple[Kernel, Kernel] = ("fwd_split", "fwd_combine")
COMBINE = TileConfig(block_m=1, block_n=16)
ALL: dict[Kernel, TileConfig] = {
    "fwd_split": TileConfig(block_m=16, block_n=32, split_kv=64),
    "fwd_paged": TileConfig(block_m=16, block_n=32, split_kv=64),
    "fwd_combine": COMBINE,
    "bwd_dkdv_split": TileConfig(block_m=32, block_n=16, split_kv=64),
    "bwd_dkdv_sum": TileConfig(block_m=4, block_n=4),
    "bwd_dq_split": TileConfig(block_m=16, block_n=32, split_kv=64),
    "bwd_dq_sum": TileConfig(block_m=1, block_n=16),
    "bwd_one_pass": TileConfig(block_m=32, block_n=16, split_kv=64),
}
"""Configs that are legal whatever mask and score are: each head has tiles of its own."""
PLAIN = TileConfig(block_m=32, block_n=32)


def backward(
    family: str, *, stays: int = 16, passes: int = 16, length: int = 32, rows: int = 4
) -> dict[Kernel, TileConfig]:
    """Return configs for a forward and a family of a backward: tiles of so many rows that stay and
    that pass, splits of so many rows, and so many rows of a result in a program that sums."""
    columns = TileConfig(block_m=passes, block_n=stays, split_kv=length)
    queries = TileConfig(block_m=stays, block_n=passes, split_kv=length)
    sums = TileConfig(block_m=rows, block_n=2)
    configs = {"bwd_dkdv_split": columns, "bwd_dq_split": queries}
    configs |= {"bwd_dkdv_sum": sums, "bwd_dq_sum": sums, "bwd_one_pass": columns}
    return {name: configs.get(name, PLAIN) for name in ("fwd", *BACKWARD[family].names)}


def splits(
    problem: AttentionProblem, *, rows: int = 16, block_n: int = 16, keys: int = 32
) -> dict[Kernel, TileConfig]:
    """Return configs for both kernels: tiles of `rows` rows (more where a group has more heads),
    splits of so many keys."""
    heads = packed_heads(problem)
    block_m = max(1, rows // heads)
    split = TileConfig(block_m=block_m, block_n=block_n, heads=heads, split_kv=keys)
    return {NAMES[0]: split, NAMES[1]: COMBINE}
