"""Kinds of masks: what masks are that differ in their tensors alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tilegen.bounded_cache import BoundedCache
from tilegen.errors import InvalidProblem
from tilegen.masks.mask import Mask, full
from tilegen.masks.usual import kv_prefix
from tilegen.masks.values import MAX_WINDOW, Values

if TYPE_CHECKING:
    import torch

MAX_KINDS = 4096
FULL = full()
"""The mask of calls without one, which keeps its kind from call to call."""


@dataclass(frozen=True, eq=False)
class MaskKind:
    """Masks with an equal stand-in. Told from other kinds by identity, which takes calls less long
    than to compare masks."""

    mask: Mask
    """The stand-in."""

    @cached_property
    def checks_lengths(self) -> bool:
        """Whether there are lengths at which such masks have no meaning."""
        return self.mask.checks_lengths

    @cached_property
    def padded(self) -> tuple[MaskKind, int]:
        """The kind of the same masks that leave each batch entry its first columns besides, and
        where among the values of these the lengths stand."""
        lengths = lengths_of(None)
        joined = self.mask & kv_prefix(lengths)
        at = next(i for i, one in enumerate(joined.values) if one is lengths)
        return kind_of_mask(joined), at


def lengths_of(tensor: torch.Tensor | None) -> Values:
    """Return the lengths of padded batches as a mask reads them, or a stand-in. Tiles are chosen as
    if nothing was padded, since nobody looks."""
    return Values(axes="b", typical=MAX_WINDOW, tensor=tensor)


def check_mask(given: Any) -> None:
    """Raise InvalidProblem for what is no mask."""
    if not isinstance(given, Mask):
        raise InvalidProblem(
            f"mask must be a tilegen mask such as tilegen.causal(), got {type(given).__name__}"
        )


def kind_of_mask(mask: Mask) -> MaskKind:
    """Return the kind of a mask, which it then keeps. Raises InvalidProblem for what is none."""
    kind: MaskKind | None = getattr(mask, "_kind", None)
    if kind is None:
        check_mask(mask)
        stand_in = mask.stand_in
        kind = vars(mask)["_kind"] = _kinds.get(stand_in, lambda: MaskKind(stand_in))
    return kind


_kinds: BoundedCache[Mask, MaskKind] = BoundedCache(MAX_KINDS)
