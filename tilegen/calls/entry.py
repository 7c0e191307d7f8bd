"""Entry of all calls: through operators if PyTorch traces, counts or transforms the call, else
straight to the plan."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import has_torch_function_variadic

from tilegen.calls.masks import GivenMask, as_mask
from tilegen.errors import TilegenError, Unsupported
from tilegen.kernels.layout import public_lse
from tilegen.launch.changes import Changes, Pages
from tilegen.launch.derivatives import refuse_tangents
from tilegen.masks.kinds import FULL_MASK
from tilegen.masks.mask import Mask
from tilegen.masks.plain import check_plain
from tilegen.masks.score import Score
from tilegen.private_torch import count_modes, transform
from tilegen.runtime.call import ScoreFunction, describe, dropout_of, score_of
from tilegen.runtime.dispatch import planned

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that surely have elements; subclasses, such as fake tensors, may have none."""
_is_traced_by_jit: Any = torch.jit.is_tracing  # pyright: ignore[reportPrivateImportUsage]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: GivenMask | None = None,
    score: Score | ScoreFunction | None = None,
    kv_lengths: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    pages: Pages | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) of a call of `attention`, or of `attention_paged` if there are `pages`.
    Raises InvalidProblem or Unsupported, naming the call."""
    if _is_traced_by_jit():  # tested here too, since a function more takes longer than the test
        refuse_jit()
    try:
        if has_torch_function_variadic(q, k, v, kv_lengths):
            check_plain(q=q, k=k, v=v, kv_lengths=kv_lengths)
        if mask is not None and not (isinstance(mask, Mask) and mask.follows is None):
            mask = as_mask(mask)
        if is_watched(q):
            # Transforms raise an error of their own; dynamo cannot tell whether there are any.
            if is_dynamo_compiling() or transform() is None:
                refuse_tangents(q, k, v)
            call = mask, score, kv_lengths, scale, dropout_p, transform() is not None, pages
            out, lse = _watched(q, k, v, *call)
            return out, public_lse(lse)
        score = None if score is None else score_of(score)
        is_off = type(dropout_p) is float and dropout_p == 0  # a fast test for most calls
        dropout = None if is_off else dropout_of(dropout_p, q)
        changes = Changes(FULL_MASK if mask is None else mask, score, kv_lengths, dropout, pages)
        out, lse = planned(q, k, v, changes, scale)
        return out, public_lse(lse)
    except TilegenError as error:
        if is_dynamo_compiling():  # dynamo names the call, and cannot trace joined texts
            raise
        call = describe(q, k, v, mask, score, kv_lengths, scale, dropout_p, pages is not None)
        raise type(error)(f"{error}; the call was {call}") from None


def refuse_jit() -> None:
    """Raise Unsupported under torch.jit.trace, which would fix lengths and kernels of the traced
    call."""
    if _is_traced_by_jit():
        raise Unsupported(
            "torch.jit.trace would fix this call's lengths and kernels for all calls; use "
            "torch.export or torch.compile, which take the call as an operator"
        )


def is_watched(q: Any) -> bool:
    """Check whether PyTorch traces, counts or transforms a call with these queries."""
    return bool(
        is_dynamo_compiling()
        or transform() is not None
        or count_modes()
        or (type(q) not in _PLAIN and isinstance(q, torch.Tensor))
    )


def _watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *call: Any) -> tuple[Any, Any]:
    from tilegen.operators.call import attend_watched

    return attend_watched(q, k, v, *call)
