"""Masks and scores from flash-attn's arguments: windows, soft caps and slopes."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import torch

from tilegen.errors import InvalidProblem
from tilegen.integrations import windows
from tilegen.masks import score as scores
from tilegen.masks.made import made_once
from tilegen.masks.mask import Mask
from tilegen.masks.score import Score
from tilegen.masks.values import Alignment, check_plain
from tilegen.runtime.call import shown


def mask_of(window_size: Sequence[int], causal: bool, alignment: Alignment) -> Mask:
    """Return the mask of a call. Raises InvalidProblem."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise InvalidProblem(
            f"window_size must be two distances (left, right), got {window_size!r}"
        ) from None
    return windows.flash_attn(left, right, bool(causal), alignment)


def score_of(
    softcap: float, alibi_slopes: torch.Tensor | None, alignment: Alignment
) -> Score | None:
    """Return the score of a call, None if it changes no scores. Raises InvalidProblem."""
    if not isinstance(softcap, Real):
        raise InvalidProblem(f"softcap must be a number, 0 for none, got {shown(softcap)}")
    if alibi_slopes is None:
        return None if softcap <= 0 else _softcap(softcap)
    if not isinstance(alibi_slopes, torch.Tensor) or alibi_slopes.ndim not in (1, 2):
        raise InvalidProblem(
            f"alibi_slopes must be (heads,) or (batch, heads), got {shown(alibi_slopes)}"
        )
    check_plain(alibi_slopes=alibi_slopes)
    axes = "h" if alibi_slopes.ndim == 1 else "bh"
    text = _text(0.0 if softcap <= 0 else softcap, axes, alignment)
    return Score(text, (alibi_slopes,), sizes=((0, axes),))


_softcap = made_once(scores.softcap)


@made_once
def _text(softcap: float, axes: str, alignment: Alignment) -> str:
    """Return the text of a score: a soft cap if it is above 0, then minus slope times distance."""
    capped = scores.softcap(softcap).text if softcap else "s"
    distance = "k-q" if alignment == "top_left" else "k+seqlen_q-q-seqlen_kv"
    return f"{capped}-abs({distance})*t0[{','.join(axes)}]"
