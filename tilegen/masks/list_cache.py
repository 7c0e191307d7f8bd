"""Keeps lists of tiles, so that all layers of a model share those of one mask."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from threading import Lock, RLock
from weakref import ref

import torch
from sympy.logic.boolalg import Boolean

from tilegen.masks.shapes import TiledShape
from tilegen.masks.tile_classes import distinguished
from tilegen.masks.tile_lists import Side, TileLists, build


@dataclass
class _Entry:
    lock: Lock = field(default_factory=Lock)
    """Held while the lists are built: once, whoever asks."""
    lists: TileLists | None = None
    captured: tuple[ref[torch.Tensor], ...] = ()
    """When one of them dies, so does the entry."""


class ListCache:
    """Lists of tiles by predicate, captured tensors (the very objects, unmodified), lengths, tile
    shape, side and device.

    May be used from many threads. Entries die with a captured tensor, and the least recently used
    when there are too many.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        # Reentrant: a tensor may die, and its entries with it, while this thread holds the lock.
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(
        self,
        keep: Boolean,
        captured: Sequence[torch.Tensor],
        shape: TiledShape,
        *,
        device: torch.device | str,
        side: Side,
    ) -> TileLists:
        """Return what `tile_lists.build` does, built at most once."""
        shape, device = distinguished(keep, shape), torch.device(device)
        key = (keep, tuple(map(_identity, captured)), shape, device, side)
        entry = self._entry(key, captured)
        with entry.lock:
            if entry.lists is None:
                entry.lists = build(keep, captured, shape, device=device, side=side)
            return entry.lists

    def _entry(self, key: Hashable, captured: Sequence[torch.Tensor]) -> _Entry:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:

                def forget(_: ref[torch.Tensor]) -> None:
                    with self._lock:
                        self._entries.pop(key, None)

                entry = _Entry(captured=tuple(ref(tensor, forget) for tensor in captured))
                self._entries[key] = entry
                if len(self._entries) > self._capacity:
                    self._entries.popitem(last=False)
            self._entries.move_to_end(key)
            return entry


def _identity(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what differs between tensors alive, and after a tensor was modified in place."""
    # Inference tensors have no version; that they are not modified is up to their owner.
    return id(tensor), 0 if tensor.is_inference() else tensor._version
