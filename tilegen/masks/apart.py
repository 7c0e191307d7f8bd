"""Masks under which NaN must not pass between texts: documents of a packed sequence, and entries of
a padded batch, whose keys end at their lengths.

Other masks behave as in PyTorch: 0 times NaN is NaN, wherever a kernel multiplies a dropped pair.
"""

from __future__ import annotations

from tilegen.masks.form import Apart
from tilegen.masks.mask import Mask


def apart(mask: Mask) -> Apart:
    """Return the dropped pairs whose NaN must not reach the results."""
    if _holds_documents(mask):
        return "pairs"
    return "keys" if any(_apart(part) == "keys" for part in mask.conjuncts) else ""


def _apart(mask: Mask) -> Apart:
    return "" if mask.form.apart is None else mask.form.apart(*mask.args)


def _holds_documents(mask: Mask) -> bool:
    return _apart(mask) == "pairs" or any(map(_holds_documents, mask.parts))
