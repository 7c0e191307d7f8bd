"""Dilated masks in normal form: rows and columns regrouped by their remainder.

`(q - k) % step == 0` keeps one pair in `step`, spread over every tile. Put those with the same
remainder side by side, and each group attends within itself, under the rest of the mask at a
step-th of its distances: `step` times fewer tiles, all as full as the rest of the mask leaves them.
The groups are batch entries. `AttentionProblem.normal` rewrites problems so, and calls do the same
to their tensors.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tilegen.masks.mask import Mask, full, intersect, sliding_window
from tilegen.masks.score import ScoreForm
from tilegen.masks.usual import DILATED, kv_prefix
from tilegen.masks.values import Table, power_of_two_near

MAX_GROUPS = 2**20
"""Most groups of all batch entries together: groups are batch entries of the kernel."""


def step_of(mask: Mask, score: ScoreForm | None, batch: int, *, invariant: bool = False) -> int:
    """Return the step by which a call can be regrouped; 1 where it cannot.

    The rest of the mask must be causal and windows from the top left, and the score must not read
    positions, lengths or the batch. Batch-invariant calls keep the order in which keys are
    summed, which groups change.
    """
    if invariant:
        return 1
    parts = mask.conjuncts
    steps = [part.args[0] for part in parts if part.form is DILATED]
    if len(steps) != 1 or batch * steps[0] > MAX_GROUPS:
        return 1
    if score is not None and _reads_positions(score):
        return 1
    within = (_within_group(part, steps[0]) for part in parts)
    return 1 if any(part is None for part in within) else steps[0]


def _reads_positions(score: ScoreForm) -> bool:
    from tilegen.masks.language.expr import PAIR, H

    return not score.expression().free.isdisjoint({*PAIR} - {H})


def grouped_mask(mask: Mask, step: int, seqlen_kv: int, groups: int, device: Any = None) -> Mask:
    """Return the mask within a group; `groups`, a multiple of step, is the number of groups in a
    batch.

    Without a device the mask is a stand-in where it reads how many columns each group has.
    """
    parts = (_within_group(part, step) for part in mask.conjuncts)
    within = [part for part in parts if part is not None]
    if seqlen_kv % step:  # later groups have a column less
        within.append(_columns(seqlen_kv, step, groups, device))
    return intersect(*within)


def grouped_length(length: int, step: int) -> int:
    """Return the rows or columns of the longest group."""
    return -(-length // step)


def _within_group(part: Mask, step: int) -> Mask | None:
    """Return a part of a mask at the distances within a group; None if it has no such."""
    if part.form is DILATED:
        return full()
    if (window := part.window) is None or window.alignment != "top_left" or part.tables:
        return None
    if part.is_causal:
        return part
    left, right = (None if side is None else side // step for side in window[:2])  # type: ignore[operator]
    return sliding_window(left, right)


@lru_cache(maxsize=64)
def _columns(seqlen_kv: int, step: int, groups: int, device: Any) -> Mask:
    """Return `k < columns of the group`."""
    each = [grouped_length(seqlen_kv - remainder, step) for remainder in range(step)]
    # All lengths of a bucket have one stand-in: groups as long as the bucket's.
    values = Table(axes="b", typical=power_of_two_near(max(each)))
    if device is not None:
        import torch

        lengths = torch.tensor(each * (groups // step), dtype=torch.int32, device=device)
        values = values.but(tensor=lengths)
    return kv_prefix(values)
