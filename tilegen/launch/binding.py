"""Bind the arguments of an emitted kernel that a mask determines: tensors and lists of tiles."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.panels import Launch
from tilegen.kernels.registry import KERNELS
from tilegen.masks.form import Shape
from tilegen.masks.mask import Mask, Side
from tilegen.masks.tensors import tensors_of

if TYPE_CHECKING:
    from tilegen.masks.tiles.tile_lists import ListCache

NOTHING: Mapping[str, Any] = {}


class BoundKernel:
    """The launch of an emitted kernel; `given` binds the tensors that mask and score read."""

    def __init__(
        self,
        launch: Launch,
        mask: Mask,
        kernel: Kernel,
        config: TileConfig,
    ) -> None:
        """Find the parameters of the launch that are tensors of mask and score."""
        names = inspect.signature(launch).parameters
        self.launch = launch
        slots = [(int(name[1:]), name) for name in names if re.fullmatch(r"t\d+", name)]
        self._slots = [(slot, name, mask.tables[slot].kind == "bool") for slot, name in slots]
        self._reads = [name for name in names if re.fullmatch(r"d?c\d+|sinks|dropout(_p)?", name)]
        self._side: Side = KERNELS[kernel].stationary
        self._blocks = {"block_m": config.block_m, "block_n": config.block_n}
        self._keep: Any = None  # the mask's predicate, if launches need lists of tiles
        if "tiles" in names:
            self._keep = mask.general.predicate(self._side)

        alone = bool(slots) and len(mask.tables) == 1 and not self._reads and self._keep is None
        self.reads_t0_alone = alone and not self._slots[0][2]
        """True if the kernel reads exactly one extra tensor: that of the mask, unchanged."""
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
        """Bind the arguments of one call, for tensors of a `shape` on a device.

        `reads` are the tensors of score and dropout: see `score_tensors` and `Dropout.given`.
        `tables` are those of the mask, if the caller has them already for another kernel of the
        pass. Raises InvalidProblem for values that do not fit the shape.
        """
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
            sources=tuple(source for value in mask.tables for source in value.sources),
            origin=tuple(value.origin for value in mask.tables),
        )
        num_stationary = lists.num_stationary
        return partial(
            launch,
            tiles=lists.tiles,
            starts=lists.starts,
            tiles_sb=lists.heads * num_stationary if lists.batch > 1 else 0,
            tiles_sh=num_stationary if lists.heads > 1 else 0,
        )

    def reading(self, tables: Sequence[torch.Tensor], reads: Mapping[str, Any] = NOTHING) -> Launch:
        """Bind the tensors of mask, score and dropout, but no lists of tiles."""
        extras: dict[str, Any] = {}
        for name in self._reads:
            extras[name] = reads[name]
        for slot, name, is_bool in self._slots:
            extras[name] = tables[slot].view(torch.uint8) if is_bool else tables[slot]
        return partial(self.launch, **extras) if extras else self.launch


@cache
def _list_cache() -> ListCache:
    from tilegen.masks.tiles.tile_lists import ListCache

    return ListCache()
