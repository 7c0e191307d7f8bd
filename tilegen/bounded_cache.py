"""A bounded cache for a process. The least recently used value is dropped first, and each value is
computed once, by the first thread that needs it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_RECENT = 3
"""Number of objects that `recall` compares: a model's layers use one or two kinds of masks."""
MAX_USED = 64
"""Number of uses, by `known` and `recall`, that are remembered until a value is stored."""


class BoundedCache(Generic[K, V]):
    """Values by key, for many threads. No thread waits for the value of another key."""

    def __init__(self, size: int, on_drop: Callable[[V], Any] | None = None) -> None:
        """Keep at most `size` values; `on_drop` is called with each value that is dropped for
        another."""
        self._values: OrderedDict[K, V] = OrderedDict()  # the least recently used first
        self._used: deque[K] = deque(maxlen=MAX_USED)  # since a value was stored
        self._size = size
        self._making: dict[K, RLock] = {}
        self._lock = RLock()  # reentrant: what is dropped may drop others while it is held
        self._on_drop = on_drop
        self._recent: tuple[tuple[Any, K, Any], ...] = ()

    def __len__(self) -> int:
        return len(self._values)

    def known(self, key: K) -> V | None:
        """Return the value of a key, or None. Unlike `get` it takes no lock, for hot paths."""
        value = self._values.get(key)
        if value is not None:
            self._used.append(key)
        return value

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key; `make` computes it if it is missing. If `make` raises an
        error, nothing is stored."""
        with self._lock:
            try:
                value = self._values[key]
                self._values.move_to_end(key)
                return value
            except KeyError:
                making = self._making.setdefault(key, RLock())
        with making:
            with self._lock:
                if key in self._values:  # another thread stored the value meanwhile
                    return self._values[key]
            try:
                value = make()
                with self._lock:
                    self._put(key, value)
            finally:
                with self._lock:
                    self._making.pop(key, None)
        return value

    def drop(self, key: K) -> None:
        """Drop the value of a key, if there is one."""
        with self._lock:
            self._values.pop(key, None)

    def recall(self, facts: Any) -> Any:
        """Return the object that `note` stored recently with equal facts, or None.

        For callers whose keys take longer to compute than their facts take to compare.
        """
        for known, key, noted in self._recent:
            if known == facts:
                self._used.append(key)
                return noted
        return None

    def note(self, facts: Any, key: K, noted: Any) -> None:
        """Store an object for `recall`. Each use of the object counts as a use of the key."""
        # A single assignment: other threads may be reading.
        self._recent = ((facts, key, noted), *self._recent[: MAX_RECENT - 1])

    def clear(self) -> None:
        """Drop all values and noted objects."""
        with self._lock:
            self._values.clear()
            self._recent = ()

    def _put(self, key: K, value: V) -> None:
        while self._used:
            if (used := self._used.popleft()) in self._values:
                self._values.move_to_end(used)
        while len(self._values) >= self._size:
            _, dropped = self._values.popitem(last=False)
            if self._on_drop is not None:
                self._on_drop(dropped)
        self._values[key] = value
