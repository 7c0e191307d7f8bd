"""Masks that keep texts apart, so that not even NaN may pass from one to another: documents of a
packed sequence, and entries of a padded batch, whose keys end where their lengths say.

Other masks are as in PyTorch: 0 times NaN is NaN, wherever a kernel multiplies a dropped pair.
"""

from __future__ import annotations

from typing import Literal

from tilegen.masks.mask import And, Mask
from tilegen.masks.packed import Within
from tilegen.masks.tree import Tree
from tilegen.masks.usual import Intervals, KvPrefix, SameDocument

Apart = Literal["", "keys", "pairs"]
"""The part of a call that must reach nothing: keys from some key on, or any pair that is dropped;
empty: none."""


def apart(mask: Mask) -> Apart:
    """Return the part of a call that a mask must keep from reaching anything."""
    if _holds_documents(mask):
        return "pairs"
    parts = mask.parts if isinstance(mask, And) else (mask,)
    return "keys" if any(map(_ends_keys, parts)) else ""


def _holds_documents(mask: Mask) -> bool:
    is_one = isinstance(mask, Intervals | SameDocument | Within)
    return is_one or any(map(_holds_documents, mask.parts))


def _ends_keys(mask: Mask) -> bool:
    return isinstance(mask, KvPrefix) or (isinstance(mask, Tree) and mask.lengths is not None)
