"""The way in which kernels find the tiles that a mask leaves. Kernels, the model and the counts of
tiles decide by `visit` alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tilegen.errors import Unsupported
from tilegen.masks.form import Side
from tilegen.masks.mask import Mask
from tilegen.masks.tiles.spans import StreamSets, stream_sets


@dataclass(frozen=True)
class Visit:
    """The tiles of a side in one interval, in several that the kernel merges, or in lists that are
    made before the launch."""

    strategy: Literal["single", "several", "lists"]
    sets: StreamSets | None = None
    """The closed form; None for lists."""
    reason: str = ""
    """The reason for lists."""


def visit(mask: Mask, side: Side) -> Visit:
    """Choose the first strategy that can express the tiles of a mask."""
    try:
        sets = stream_sets(mask, side)
    except Unsupported as refusal:
        return Visit("lists", reason=str(refusal))
    if sets.full is not None:
        return Visit("single", sets)
    if sets.is_short:
        return Visit("several", sets)
    return Visit("lists", reason="a kernel would merge too many intervals")
