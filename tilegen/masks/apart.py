"""Masks under which NaN must not pass between texts: documents of a packed sequence, and entries of
a padded batch, whose keys end at their lengths.

Other masks behave as in PyTorch: 0 times NaN is NaN, wherever a kernel multiplies a dropped pair.
In pages of a cache, where a dropped key may belong to another request, no mask does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tilegen.masks.tiles.spans import visit
from tilegen.masks.usual import UNLISTED

if TYPE_CHECKING:
    from tilegen.kernels.spec import KernelSpec
    from tilegen.problem import AttentionProblem

Guard = Literal["", "end", "pairs"]


def guard_of(problem: AttentionProblem, spec: KernelSpec) -> Guard:
    """Choose how a kernel keeps NaN of dropped pairs from other pairs: by the interval of keys that
    a tile may see ("end"), by checking each tile ("pairs"), or not at all.

    Batch-invariant kernels of whole keys load the keys that those of pages load: the guard is a
    part of the code on which the order of sums depends.
    """
    mask = problem.mask
    kind = mask.apart if spec.masked else ""
    is_shared = spec.masked and ("pages" in spec.supports or spec.keeps_order(problem))
    if kind == "pairs" or not (kind or is_shared):
        return kind
    is_interval = visit(mask, spec.stationary).strategy == "single"
    is_interval &= all(part.form is not UNLISTED for part in mask.conjuncts)
    return "end" if is_interval or spec.stationary == "columns" else "pairs"
