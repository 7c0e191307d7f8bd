"""Arguments that an emitted kernel is launched with for a mask: tensors, and lists of tiles."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from tilegen import sympy_lock
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.panels import Launch
from tilegen.kernels.registry import KERNELS
from tilegen.masks.mask import Mask, Side
from tilegen.masks.shapes import Shape
from tilegen.masks.tensors import tensors_of

if TYPE_CHECKING:
    from tilegen.masks.tiles.tile_lists import ListCache

NOTHING: Mapping[str, Any] = {}


class BoundKernel:
    """The launch of an emitted kernel; calling `given` completes it with what a mask reads."""

    def __init__(
        self,
        launch: Launch,
        mask: Mask,
        kernel: Kernel,
        config: TileConfig,
        names: Collection[str] | None = None,
    ) -> None:
        """`names` are those of the launch's parameters; by default its signature says them."""
        names = inspect.signature(launch).parameters if names is None else names
        self.launch = launch
        slots = [(int(name[1:]), name) for name in names if re.fullmatch(r"t\d+", name)]
        self._slots = [(slot, name, mask.values[slot].kind == "bool") for slot, name in slots]
        self._reads = [name for name in names if re.fullmatch(r"d?c\d+|sinks|dropout(_p)?", name)]
        self._side: Side = KERNELS[kernel].stays
        self._blocks = {"block_m": config.block_m, "block_n": config.block_n}
        self._keep: Any = None  # a predicate, where launches take lists of tiles
        if "tiles" in names:
            from tilegen.masks.tiles.closed_form import predicate  # loads SymPy

            with sympy_lock.lock:
                self._keep = predicate(mask.general, self._side)

        alone = bool(slots) and len(mask.values) == 1 and not self._reads and self._keep is None
        self.reads_t0_alone = alone and not self._slots[0][2]
        """Whether the kernel reads the mask's one tensor as it is given, and nothing else."""
        self.reads_nothing = not self._slots and not self._reads and self._keep is None
        self.reads_lists = self._keep is not None

    def given(
        self,
        mask: Mask,
        shape: Shape,
        device: torch.device,
        reads: Mapping[str, Any] = NOTHING,
        tables: tuple[torch.Tensor, ...] | None = None,
    ) -> Launch:
        """Return the launch for one call with this mask, and with what score and dropout
        `reads` (see `score_tensors` and `Dropout.given`); `tables` are those of the mask, made once
        for all kernels of a pass. Raises InvalidProblem for values that do not fit the shape."""
        if tables is None:
            tables = tensors_of(mask, shape, device) if self._slots or self.reads_lists else ()
        launch = self.reading(tables, reads)
        if self._keep is None:
            return launch
        lists = _list_cache().get(
            self._keep,
            tables,
            shape.tiled(**self._blocks),
            device=device,
            side=self._side,
            sources=tuple(source for value in mask.values for source in value.sources),
            origin=tuple(value.origin for value in mask.values),
        )
        each = lists.num_stationary
        return partial(
            launch,
            tiles=lists.tiles,
            starts=lists.starts,
            tiles_sb=lists.heads * each if lists.batch > 1 else 0,
            tiles_sh=each if lists.heads > 1 else 0,
        )

    def reading(self, tables: Sequence[torch.Tensor], reads: Mapping[str, Any] = NOTHING) -> Launch:
        """Return the launch with what mask, score and dropout read, but without lists of tiles."""
        extras: dict[str, Any] = {}
        for name in self._reads:
            extras[name] = reads[name]
        for slot, name, is_bool in self._slots:
            extras[name] = tables[slot].view(torch.uint8) if is_bool else tables[slot]
        return partial(self.launch, **extras) if extras else self.launch


@cache
def _list_cache() -> ListCache:
    from tilegen.masks.tiles.tile_lists import ListCache  # loads SymPy

    return ListCache()
