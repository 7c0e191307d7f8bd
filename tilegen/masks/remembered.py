"""Results that are remembered by mask, and keep no tensor of a mask alive."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import ref

from tilegen.bounded_cache import BoundedCache
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
        known: BoundedCache[Hashable, tuple[T, list[ref[Table]]]] = BoundedCache(size)

        @wraps(compute)
        def found(mask: Mask, *args: P.args, **kwargs: P.kwargs) -> T:
            key = (_key(mask), args, tuple(kwargs.items()))

            def make() -> tuple[T, list[ref[Table]]]:
                real = [table for table in mask.tables if not table.is_stand_in]
                made = compute(mask, *args, **kwargs)
                return made, [ref(table, lambda _: known.drop(key)) for table in real]

            return known.get(key, make)[0]

        return found

    return decorate


def _key(item: Any) -> Hashable:
    """Return a key of a mask, with numbers in the place of its tensors."""
    if isinstance(item, Table):
        return item if item.is_stand_in else id(item)
    if isinstance(item, Mask):
        return (item.form, *map(_key, item.args))
    return item
