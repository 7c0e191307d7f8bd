"""Configs for tests of the kernels that take head dims in slices: all different on purpose, since
nothing but the panel connects them."""

from __future__ import annotations

from tilegen.kernels.config import Kernel, TileConfig

PREPROCESS: dict[Kernel, TileConfig] = {"bwd_preprocess": TileConfig(block_m=64, block_n=16)}
FORWARD: dict[Kernel, TileConfig] = {
    "fwd_scores": TileConfig(block_m=32, block_n=64, block_d=32),
    "fwd_values": TileConfig(block_m=64, block_n=16, block_d=64),
}
BACKWARD: dict[Kernel, TileConfig] = {
    **PREPROCESS,
    "bwd_scores": TileConfig(block_m=64, block_n=32, block_d=32),
    "bwd_columns": TileConfig(block_m=32, block_n=64, block_d=32),
    "bwd_rows": TileConfig(block_m=16, block_n=64, block_d=64),
}
STREAMED: dict[Kernel, TileConfig] = {
    "fwd_streamed": TileConfig(block_m=32, block_n=16, block_d=64)
}
SMALL_CACHE: dict[Kernel, TileConfig] = FORWARD | BACKWARD
ALL: dict[Kernel, TileConfig] = SMALL_CACHE | STREAMED
