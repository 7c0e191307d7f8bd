"""Keeps lists of tiles, so that all layers of a model share those of one mask."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from threading import Lock, RLock
from weakref import ref

import torch
from cachetools import LRUCache
from sympy.logic.boolalg import Boolean

from tilegen import sympy_lock
from tilegen.masks.mask import Side
from tilegen.masks.shapes import TiledShape
from tilegen.masks.tiles.tile_classes import distinguished
from tilegen.masks.tiles.tile_lists import TileLists, build
from tilegen.masks.values import is_checked


@dataclass
class _Entry:
    sources: tuple[ref[torch.Tensor], ...]
    """The tensors that the lists depend on: the entry is dropped when one of them dies."""
    lock: Lock = field(default_factory=Lock)
    """The lock that is held while the lists are built, so that threads build them once."""
    lists: TileLists | None = None
    states: tuple[torch.Tensor | int | None, ...] = ()
    """The states of the sources when the lists were built, as `_state` returns them."""


class ListCache:
    """Lists of tiles by predicate, the tensors behind its tables (the very objects), lengths, tile
    shape, side and device; built again when such a tensor was changed in place.

    May be used from many threads. Entries die with a tensor, and the least recently used when there
    are too many.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._entries: LRUCache[Hashable, _Entry] = LRUCache(capacity)
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
        sources: Sequence[torch.Tensor] | None = None,
        origin: Hashable = None,
    ) -> TileLists:
        """Return what `tile_lists.build` does, built at most once.

        `captured` are made of `sources` in a way that `origin` names; by default they are the same.
        """
        sources = captured if sources is None else sources
        shape, device = distinguished(keep, shape), torch.device(device)
        key = (keep, origin, tuple(map(id, sources)), shape, device, side)
        entry = self._entry(key, sources)
        with entry.lock:
            if entry.lists is None or not all(map(_is_unchanged, sources, entry.states)):
                entry.states = tuple(map(_state, sources))
                with sympy_lock.lock:
                    entry.lists = build(keep, captured, shape, device=device, side=side)
            return entry.lists

    def _entry(self, key: Hashable, sources: Sequence[torch.Tensor]) -> _Entry:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:

                def forget(_: ref[torch.Tensor]) -> None:
                    with self._lock:
                        self._entries.pop(key, None)

                entry = _Entry(tuple(ref(tensor, forget) for tensor in sources))
                self._entries[key] = entry
            return entry


def _state(tensor: torch.Tensor) -> torch.Tensor | int | None:
    """Return the state of a tensor, in which a later change shows; None where no change would
    show."""
    if is_checked(tensor):  # changes through `.data` or numpy leave the version as it is
        return tensor.detach().clone()
    return None if tensor.is_inference() else tensor._version


def _is_unchanged(tensor: torch.Tensor, state: torch.Tensor | int | None) -> bool:
    if is_checked(tensor):
        return isinstance(state, torch.Tensor) and torch.equal(tensor, state)
    return isinstance(state, int) and not tensor.is_inference() and state == tensor._version
