"""Dilated masks without waste: rows and columns regrouped by their remainder.

`(q - k) % step == 0` keeps one pair in `step`, spread over every tile. Put those with the same
remainder side by side, and each group attends within itself, under the rest of the mask at a
step-th of its distances: `step` times fewer tiles, all as full as the rest of the mask leaves them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tilegen.masks.mask import And, Causal, Full, Mask, SlidingWindow, intersect
from tilegen.masks.usual import Dilated, KvPrefix
from tilegen.masks.values import Values

if TYPE_CHECKING:
    import torch

    from tilegen.masks.score import Score


def step_of(mask: Mask, score: Score | None) -> int:
    """Return the step by which a call can be regrouped; 1 where it cannot.

    The rest of the mask must be causal and windows from the top left, and the score must not know
    where in the sequence it is.
    """
    parts = mask.parts if isinstance(mask, And) else (mask,)
    steps = [part.step for part in parts if isinstance(part, Dilated)]
    if len(steps) != 1 or (score and re.search(r"\b(b|q|k|seqlen_q|seqlen_kv)\b", score.text)):
        return 1
    within = (_within_group(part, steps[0]) for part in parts)
    return 1 if any(part is None for part in within) else steps[0]


def grouped_mask(mask: Mask, step: int, seqlen_kv: int, groups: int, device: Any) -> Mask:
    """Return the mask within a group, `groups` of which (a multiple of step) are a batch."""
    parts = mask.parts if isinstance(mask, And) else (mask,)
    within = [one for part in parts if (one := _within_group(part, step)) is not None]
    if seqlen_kv % step:  # later groups have a column less
        within.append(_columns(seqlen_kv, step, groups, device))
    return intersect(*within)


def group(x: torch.Tensor, step: int) -> torch.Tensor:
    """Return (batch * step, heads, ceil(seqlen / step), dim): batch b's group r is b * step + r."""
    import torch

    batch, heads, seqlen, dim = x.shape
    if seqlen % step:
        x = torch.nn.functional.pad(x, (0, 0, 0, -seqlen % step))
    x = x.view(batch, heads, -1, step, dim) if x.is_contiguous() else x.unflatten(2, (-1, step))
    return x.permute(0, 3, 1, 2, 4).flatten(0, 1)


def ungroup(x: torch.Tensor, step: int, seqlen: int) -> torch.Tensor:
    """Undo `group`: (batch, heads, seqlen, ...)."""
    x = x.unflatten(0, (-1, step)).movedim(1, 3)
    return x.flatten(2, 3)[:, :, :seqlen]


def _within_group(part: Mask, step: int) -> Mask | None:
    """Return a part of a mask at the distances within a group; None if it has no such."""
    match part:
        case Full() | Dilated():
            return Full()
        case Causal(alignment="top_left"):
            return part
        case SlidingWindow(left=int() | None as left, right=int() | None as right):
            if part.alignment != "top_left":
                return None
            left, right = (None if side is None else side // step for side in (left, right))
            return SlidingWindow(left, right)
        case _:
            return None


@lru_cache(maxsize=64)
def _columns(seqlen_kv: int, step: int, groups: int, device: Any) -> Mask:
    """Return `k < columns of the group`."""
    import torch

    each = [-(-(seqlen_kv - remainder) // step) for remainder in range(step)]
    lengths = torch.tensor(each * (groups // step), dtype=torch.int32, device=device)
    return KvPrefix(Values(axes="b", typical=max(each), tensor=lengths))
