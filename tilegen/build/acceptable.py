"""Whether a compiled kernel may be used: one rule for tuner, pipeline, bundles and calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tilegen.errors import BuildFailed
from tilegen.model.footprint import MOST_SPILLED

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec

TRIED = 5
"""How many of the model's proposals are compiled, at most, for one that may be used."""


class Usage(Protocol):
    """What the compiler says a kernel uses; `CompiledKernel` is one, a `Binary` of a bundle too."""

    @property
    def shared_bytes(self) -> int: ...
    @property
    def spill_bytes(self) -> int: ...


def acceptable(built: Usage | BuildFailed, gpu: GpuSpec) -> bool:
    """Whether a compiled kernel may be used on a GPU."""
    return not objection(built, gpu)


def objection(built: Usage | BuildFailed, gpu: GpuSpec) -> str:
    """Return why a compiled kernel may not be used on a GPU, an empty text where it may.

    It has to fit into shared memory, and may spill a little (see MOST_SPILLED), as long as its
    matrix products still overlap.
    """
    if isinstance(built, BuildFailed):
        return str(built)
    if built.shared_bytes > gpu.smem_per_block:
        sizes = (f"{size / 1024:.4g} KiB" for size in (built.shared_bytes, gpu.smem_per_block))
        return " > ".join(sizes)
    if getattr(built, "serialized", False):  # which a bundle's binaries were asked when compiled
        return f"{built.spill_bytes} bytes spilled, and each matrix product is waited for"
    return spills_much(built.spill_bytes)


def spills_much(spill_bytes: int) -> str:
    """Return the objection to what a thread spills, an empty text where there is none."""
    if spill_bytes <= MOST_SPILLED:
        return ""
    return f"{spill_bytes} bytes of registers spilled a thread, at most {MOST_SPILLED} are taken"
