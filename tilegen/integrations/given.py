"""Masks and scores from tensors that callers pass besides q, k and v."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from tilegen.integrations import tables
from tilegen.masks import score as scores
from tilegen.masks.made import is_traced
from tilegen.masks.mask import Mask
from tilegen.masks.score import Score
from tilegen.masks.snapshots import TensorCache
from tilegen.masks.values import is_captured, table_of

MAX_MASKS = 4
"""Masks of tensors cached for further layers of a forward that pass the same tensors. Each may be
as large as the scores of a head."""
Given = tuple[Mask, torch.Tensor | None]
"""A mask, and a tensor to add to the scores of the pairs that it keeps."""


def is_mask(given: Any) -> bool:
    """Check whether a value may be a mask: a bool or floating tensor."""
    return isinstance(given, torch.Tensor) and (
        given.dtype == torch.bool or given.is_floating_point()
    )


def of_tensor(given: torch.Tensor, batch: int, lengths: tuple[int, int]) -> Given:
    """Convert a mask tensor of four dimensions, each as large as the call's or 1.

    A bool tensor keeps pairs. A floating tensor is added to their scores; -inf or the lowest number
    of its dtype drops them.
    """
    # A CUDA graph would replay masks of an earlier call. Views of inference tensors have no base.
    if given.requires_grad or is_traced() or is_captured(given.device) or given.is_inference():
        return _of_tensor(given, batch, lengths)
    # Each layer passes another view, of the same base.
    base = given if given._base is None else given._base
    alias = given.detach()  # the mask must not hold the base, with which the entry is dropped
    key = (given.shape, given.stride(), given.storage_offset(), given.dtype, batch, lengths)
    return _masks.get(key, (base,), lambda: _of_tensor(alias, batch, lengths), views=(given,))


_masks: TensorCache[Given] = TensorCache(MAX_MASKS)


def _of_tensor(given: torch.Tensor, batch: int, lengths: tuple[int, int]) -> Given:
    if given.dtype == torch.bool:
        return _kept(given, batch, lengths), None
    keep = given > torch.finfo(given.dtype).min
    return _kept(keep.detach(), batch, lengths), given.masked_fill(~keep, 0.0)


def _kept(keep: torch.Tensor, batch: int, lengths: tuple[int, int]) -> Mask:
    """Return the mask of a bool tensor. A tensor that is the same for all heads and rows is
    padding."""
    if keep.shape[1] == keep.shape[2] == 1 and lengths[0] > 1:
        return tables.padding(keep[:, 0, 0].expand(batch, lengths[1]), lengths[0])
    return tables.dense(keep.expand(*keep.shape[:2], *lengths))


def score_of(
    softcap: float | None,
    added: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lengths: tuple[int, int],
) -> Score | None:
    """Return the score of a call: a soft cap, then a tensor `added` of four dimensions, then sinks.
    Scores of one form are built once."""
    if softcap is None and added is None and sinks is None:
        return None
    if added is not None:
        # Expanded even if it is 1, so that all steps of a generation have the same form.
        added = added.expand(*added.shape[:3], lengths[1])
    if is_traced():  # the compiler caches the result
        return _composed(softcap, added, sinks)
    varies = None
    if added is not None:
        batch, heads, rows, _ = added.shape
        varies = batch != 1, heads != 1, rows == lengths[0], True
    form = _form(None if softcap is None else float(softcap), varies)
    score = form.with_tensors(lambda _: added)
    return score if sinks is None else replace(score, sinks=table_of(sinks, "h"))


@lru_cache(maxsize=64)
def _form(softcap: float | None, varies: tuple[bool, ...] | None) -> Score:
    """Return a score without its tensors; `varies` tells along which axes `added` varies."""
    added = None if varies is None else torch.zeros([1 + axis_varies for axis_varies in varies])
    return Score() if softcap is None and added is None else _composed(softcap, added, None)


def _composed(
    softcap: float | None, added: torch.Tensor | None, sinks: torch.Tensor | None
) -> Score:
    parts: list[Score] = []
    if softcap is not None:
        parts.append(scores.softcap(softcap))
    if added is not None:
        parts.append(scores.bias(added))
    if sinks is not None:
        parts.append(scores.sinks(sinks))
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.then(part)
    return whole
