"""Changes of tensors: the one place that decides whether a tensor is still what it was.

`Snapshot` records the state of a tensor, `TensorCache` keeps results that depend on tensors.
Neither keeps a tensor, or the memory of a tensor, alive.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from cachetools import LRUCache
from torch.multiprocessing.reductions import StorageWeakRef

from tilegen.masks.values import is_captured, is_checked

T = TypeVar("T")
MAX_COMPARED = 2**20
"""Most elements that are compared of a tensor on a GPU whose changes PyTorch does not count."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The memory of a tensor, and the elements in it as far as a change could be missed otherwise.

    On a CPU elements are compared, since NumPy and `.data` change them uncounted. On a GPU the
    version of the tensor counts changes. Inference tensors have no version: their elements are
    compared if there are at most MAX_COMPARED.
    """

    place: tuple[Any, ...]
    storage: StorageWeakRef | None
    """The storage, whose address is not used again while this reference exists."""
    version: int | None = None
    elements: torch.Tensor | None = None

    @staticmethod
    def of(tensor: torch.Tensor, *, elements: bool = True) -> Snapshot:
        """Record a tensor; without `elements` only which memory it is."""
        storage = _storage(tensor)
        weak = None if storage is None else StorageWeakRef(storage)
        if not elements:
            return Snapshot(_place(tensor), weak)
        counted = not tensor.is_inference()
        compared = is_checked(tensor) or (not counted and tensor.numel() <= MAX_COMPARED)
        return Snapshot(
            _place(tensor),
            weak,
            tensor._version if counted else None,
            tensor.detach().clone() if compared else None,
        )

    def is_current(self, tensor: torch.Tensor, *, elements: bool = True) -> bool:
        """Check whether a tensor is in the recorded memory, with the recorded `elements`."""
        storage = _storage(tensor)
        if (self.storage is None) != (storage is None) or self.place != _place(tensor):
            return False
        if self.storage is not None and self.storage.cdata != storage._cdata:
            return False
        if not elements:
            return True
        if self.elements is None:
            return self.version is not None and self.version == tensor._version
        # A CUDA graph under capture may not wait for the device.
        return is_captured(tensor.device) or torch.equal(tensor, self.elements)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    strided = tensor.layout == torch.strided
    stride = (tensor.stride(), tensor.storage_offset()) if strided else tensor.layout
    return tensor.dtype, tensor.shape, tensor.device, stride


def _storage(tensor: torch.Tensor) -> Any:
    """Return the storage of a tensor, or None if it has none: sparse, or of another class."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided:
        return tensor.untyped_storage()
    return None


@dataclass(eq=False)
class _Entry(Generic[T]):
    tensors: tuple[ref[torch.Tensor], ...]
    lock: RLock = field(default_factory=RLock)
    """The lock that is held while the result is made, so that threads make it once."""
    result: tuple[T, tuple[Snapshot, ...]] | None = None
    """The result, and the state of the tensors just before it was made."""


class TensorCache(Generic[T]):
    """Results by key and by tensor objects, made again when a tensor changed.

    An entry is dropped when one of the tensor objects dies, and the least recently used entry when
    there are more than `size`. Results must not hold the tensor objects; an alias, as
    `tensor.detach()` returns it, is allowed. May be used from many threads.
    """

    def __init__(self, size: int, *, elements: bool = True) -> None:
        """Set `elements` to False for results that read the tensors' elements later."""
        self._entries: LRUCache[Hashable, _Entry[T]] = LRUCache(size)
        self._elements = elements
        # Reentrant: a tensor may die, and its entries with it, while this thread holds the lock.
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(
        self,
        key: Hashable,
        tensors: Sequence[torch.Tensor],
        make: Callable[[], T],
        *,
        views: Sequence[torch.Tensor] | None = None,
    ) -> T:
        """Return the result of `make`, which is called if there is none for unchanged tensors.

        `views` of the tensors are watched in their place. If `make` raises an error, the entry is
        as it was.
        """
        watched = tensors if views is None else views
        entry = self._entry((key, *map(id, tensors)), tensors)
        with entry.lock:
            if entry.result is not None and all(map(self._is_current, entry.result[1], watched)):
                return entry.result[0]
            # Before `make`: what changes meanwhile counts as changed.
            states = tuple(Snapshot.of(tensor, elements=self._elements) for tensor in watched)
            result = make()
            entry.result = result, states
            return result

    def _is_current(self, state: Snapshot, tensor: torch.Tensor) -> bool:
        return state.is_current(tensor, elements=self._elements)

    def _entry(self, key: Hashable, tensors: Sequence[torch.Tensor]) -> _Entry[T]:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:

                def forget(dead: ref[torch.Tensor]) -> None:
                    with self._lock:
                        known = self._entries.get(key)
                        if known is not None and any(dead is one for one in known.tensors):
                            del self._entries[key]

                entry = _Entry(tuple(ref(tensor, forget) for tensor in tensors))
                self._entries[key] = entry
            return entry
