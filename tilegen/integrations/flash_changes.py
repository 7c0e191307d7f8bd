"""Masks and scores from flash-attn's arguments: windows, soft caps and slopes."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, NoReturn

import torch

from tilegen.calls.paged import attention_paged
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.integrations import windows
from tilegen.launch.autograd import NO_BACKWARD, needs_gradients
from tilegen.masks import score as scores
from tilegen.masks.made import is_traced, made_once
from tilegen.masks.mask import Mask
from tilegen.masks.plain import check_plain, plain_number
from tilegen.masks.score import Score
from tilegen.masks.values import Alignment, table_of
from tilegen.runtime.call import shown


def over_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: torch.Tensor,
    score: Score | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) by `attention_paged`. If an input needs a gradient, the backward raises
    Unsupported, not the call, as in flash-attn."""
    trained = not is_traced() and needs_gradients(q, k, v, score)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not trained):
        out, lse = attention_paged(q, k, v, *rest, score=score, return_lse=True, **options)
    if not trained:
        return out, lse
    read = () if score is None else (*score.captured, score.sink_logits)
    return _OverPages.apply(out, lse, q, k, v, *read)  # type: ignore[return-value]


class _OverPages(torch.autograd.Function):
    """The results of a call without a backward."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, lse: torch.Tensor, *_: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise Unsupported(NO_BACKWARD)


def mask_of(window_size: Sequence[int], causal: bool, alignment: Alignment) -> Mask:
    """Return the mask of a call. Raises InvalidProblem."""
    try:
        left, right = map(plain_number, window_size)
    except (TypeError, ValueError):
        raise InvalidProblem(
            f"window_size must be two distances (left, right), got {window_size!r}"
        ) from None
    return windows.flash_attn(left, right, bool(causal), alignment)


def score_of(
    softcap: float, alibi_slopes: torch.Tensor | None, alignment: Alignment
) -> Score | None:
    """Return the score of a call, None if it changes no scores. Raises InvalidProblem."""
    softcap = plain_number(softcap)
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
    return Score(text, (table_of(alibi_slopes, axes),))


_softcap = made_once(scores.softcap)


@made_once
def _text(softcap: float, axes: str, alignment: Alignment) -> str:
    """Return the text of a score: a soft cap if it is above 0, then minus slope times distance."""
    capped = scores.softcap(softcap).text if softcap else "s"
    distance = "k-q" if alignment == "top_left" else "k+seqlen_q-q-seqlen_kv"
    return f"{capped}-abs({distance})*t0[{','.join(axes)}]"
