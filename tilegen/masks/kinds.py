"""Kinds of masks: masks of one kind differ in their tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from tilegen.bounded_cache import BoundedCache
from tilegen.errors import InvalidProblem
from tilegen.masks.mask import Mask, full
from tilegen.masks.plain import check_plain
from tilegen.masks.tables import OfTables
from tilegen.masks.usual import kv_prefix
from tilegen.masks.values import MAX_WINDOW, Table

if TYPE_CHECKING:
    import torch

T = TypeVar("T", bound=OfTables)
MAX_KINDS = 4096
MAX_MADE = 1024
_SOURCE = "a tensor that the mask reads"
FULL_MASK = full()
"""The mask of calls without one, which keeps its kind from call to call."""


@dataclass(frozen=True, eq=False)
class MaskKind:
    """Masks with an equal stand-in. Kinds are compared by identity, which is faster than comparing
    masks."""

    mask: Mask
    """The stand-in."""

    @cached_property
    def checks_lengths(self) -> bool:
        """Whether some lengths may be invalid for such masks."""
        return self.mask.checks_lengths

    @cached_property
    def padded(self) -> tuple[MaskKind, int]:
        """The kind of the same masks for padded batches, and the index of the lengths among the
        values of such a mask."""
        lengths = lengths_of(None)
        joined = self.mask & kv_prefix(lengths)
        at = next(i for i, one in enumerate(joined.tables) if one is lengths)
        return kind_of_mask(joined), at


def lengths_of(tensor: torch.Tensor | None) -> Table:
    """Return the lengths of padded batches as values of a mask, or a stand-in. Tiles are chosen
    as if nothing was padded: looking at the lengths would wait for the device."""
    return Table(axes="b", typical=MAX_WINDOW, tensor=tensor)


def check_mask(given: Any) -> None:
    """Raise InvalidProblem for a value that is not a mask."""
    if not isinstance(given, Mask):
        raise InvalidProblem(
            f"mask must be a tilegen mask such as tilegen.causal(), got {type(given).__name__}"
        )


def kind_of_mask(mask: Mask) -> MaskKind:
    """Return the kind of a mask, and store it in the mask. Raises InvalidProblem for other
    values."""
    kind: MaskKind | None = getattr(mask, "_kind", None)
    if kind is None:
        check_mask(mask)
        for value in mask.tables:
            for source in value.sources if not value.is_stand_in else ():
                check_plain(**{_SOURCE: source})
        stand_in = mask.stand_in
        kind = vars(mask)["_kind"] = _kinds.get(stand_in, lambda: MaskKind(stand_in))
    return kind


_kinds: BoundedCache[Mask, MaskKind] = BoundedCache(MAX_KINDS)


def filled(key: Hashable, tensors: Sequence[torch.Tensor], make: Callable[[], T]) -> T:
    """Return the mask or the score that `make` makes of tensors: made once for a key and tensors
    of these dtypes, dimensions and devices, and right for any elements."""
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    kept: T = _made.get(
        (key, *((tensor.dtype, tensor.ndim, tensor.device) for tensor in tensors)),
        lambda: make().with_tensors(lambda tensor: places[id(tensor)]),
    )
    made = kept.with_tensors(tensors.__getitem__)
    if isinstance(kept, Mask):
        vars(made)["_kind"] = kind_of_mask(kept)
    return made


_made: BoundedCache[Any, Any] = BoundedCache(MAX_MADE)
"""Masks and scores with numbers in the place of tensors."""
