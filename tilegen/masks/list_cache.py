"""Keeps lists of tiles, so that all layers of a model share those of one mask."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from threading import Lock, RLock
from typing import Any
from weakref import ref

import torch
from sympy.logic.boolalg import Boolean

from tilegen.masks.symbols import B, H
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
        *,
        batch: int,
        heads: int,
        seqlen_q: int,
        seqlen_kv: int,
        block_m: int,
        block_n: int,
        device: torch.device | str,
        side: Side,
    ) -> TileLists:
        """Return what `tile_lists.build` does, built at most once."""
        arguments: dict[str, Any] = {
            "batch": batch if B in keep.free_symbols else 1,
            "heads": heads if H in keep.free_symbols else 1,
            "seqlen_q": seqlen_q,
            "seqlen_kv": seqlen_kv,
            "block_m": block_m,
            "block_n": block_n,
            "device": torch.device(device),
        }
        key = (keep, tuple(map(_identity, captured)), side, *arguments.values())
        entry = self._entry(key, captured)
        with entry.lock:
            if entry.lists is None:
                entry.lists = build(keep, captured, side=side, **arguments)
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
