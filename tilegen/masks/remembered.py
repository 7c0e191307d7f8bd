"""Results that are remembered by mask, and keep no tensor of a mask alive."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import ref

from cachetools import LRUCache

from tilegen.masks.mask import Mask
from tilegen.masks.values import Table

P = ParamSpec("P")
T = TypeVar("T")


def by_mask(
    size: int,
) -> Callable[[Callable[Concatenate[Mask, P], T]], Callable[Concatenate[Mask, P], T]]:
    """Return a decorator like `lru_cache(size)` for a function of a mask and hashable arguments.

    A result is forgotten when a tensor that the mask reads is gone.
    """

    def decorate(
        compute: Callable[Concatenate[Mask, P], T],
    ) -> Callable[Concatenate[Mask, P], T]:
        known: LRUCache[Hashable, tuple[T, list[ref[Table]]]] = LRUCache(size)
        # Reentrant: values may die, and their results with them, while this thread holds the lock.
        lock = RLock()

        @wraps(compute)
        def found(mask: Mask, *args: P.args, **kwargs: P.kwargs) -> T:
            key = (_key(mask), args, tuple(kwargs.items()))
            with lock:
                if (entry := known.get(key)) is not None:
                    return entry[0]
            made = compute(mask, *args, **kwargs)

            def forget(_: ref[Table]) -> None:
                with lock:
                    known.pop(key, None)

            real = [one for one in mask.tables if not one.is_stand_in]
            with lock:
                known[key] = made, [ref(one, forget) for one in real]
            return made

        return found

    return decorate


def _key(item: Any) -> Hashable:
    """Return a key of a mask, with numbers in the place of its tensors."""
    if isinstance(item, Table):
        return item if item.is_stand_in else id(item)
    if isinstance(item, Mask):
        return (item.form, *map(_key, item.args))
    return item
