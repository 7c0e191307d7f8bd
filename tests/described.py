"""Configs of kernels that load streamed tiles through tensor descriptors, for tests of every
tier."""

from __future__ import annotations

from dataclasses import replace

from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS, LARGE_CACHE

DESCRIBED: tuple[Kernel, ...] = tuple(name for name in LARGE_CACHE if KERNELS[name].described)


def configs(config: TileConfig) -> dict[Kernel, TileConfig]:
    """Return a config for each kernel of a forward and a backward, with descriptors where it may
    have them."""
    return {name: replace(config, descriptors=name in DESCRIBED) for name in LARGE_CACHE}
