"""Masks that callers pass in other forms: functions, bool tensors, texts, PyTorch's causal bias."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from tilegen.errors import InvalidProblem
from tilegen.masks.constructors import from_bool, traced
from tilegen.masks.kinds import check_mask
from tilegen.masks.made import assume_constant_result, is_traced
from tilegen.masks.mask import Mask, Pending, causal
from tilegen.masks.notation import parse_mask
from tilegen.masks.plain import check_plain
from tilegen.masks.snapshots import TensorCache
from tilegen.masks.tracing.reads import Traces

GivenMask = Mask | str | torch.Tensor | Callable[[Any, Any, Any, Any], Any]
MAX_MASKS = 64
"""Masks of bool tensors cached for further layers."""


def as_mask(given: Any) -> Mask:
    """Return the mask of a function, a bool tensor, a text or PyTorch's causal bias. Raises
    InvalidProblem and Unsupported."""
    if isinstance(given, Mask):
        return given if given.follows is None or is_traced() else given.follows.now(given)
    if isinstance(given, str):
        return Pending(("notation", _notation(given))) if is_traced() else _of_text(given)
    if isinstance(given, torch.Tensor):
        known = causal_bias(given)
        return _of_bool(given) if known is None else known
    if not callable(given):
        check_mask(given)
    check_called(given)
    return traced(given) if is_traced() else _traces(given)


def causal_bias(given: Any) -> Mask | None:
    """Return the mask of torch.nn.attention.bias's `causal_upper_left` and `causal_lower_right`;
    None for another tensor."""
    module = getattr(torch.nn.attention, "bias", None)  # importing it would load torch._dynamo
    if module is None or not isinstance(given, module.CausalBias):
        return None
    # For equal lengths PyTorch takes the upper left corner too, whatever the lengths of a call.
    if given.variant == module.CausalVariant.UPPER_LEFT or given.seq_len_q == given.seq_len_kv:
        return causal("top_left")
    return causal("bottom_right")


@assume_constant_result
def _notation(text: str) -> str:
    return _of_text(text).notation


@lru_cache(1024)
def _of_text(text: str) -> Mask:
    mask = parse_mask(text)
    if mask.is_stand_in:
        raise InvalidProblem(
            f"mask {text!r} reads tensors, which a text does not hold; pass a mask such as "
            "tilegen.documents(ids), a function or a bool tensor"
        )
    return mask


def _of_bool(keep: torch.Tensor) -> Mask:
    """Return the mask of a bool tensor. All layers share the mask of one tensor."""
    check_plain(mask=keep)
    if keep.dtype is not torch.bool or keep.ndim not in (2, 3, 4):
        raise InvalidProblem(
            "a tensor as mask must be bool, (q, k), (heads, q, k) or (batch, heads, q, k), got "
            f"{keep.dtype} {tuple(keep.shape)}; for numbers to add pass score=tilegen.bias(tensor)"
        )
    if is_traced():
        return from_bool(keep)
    # An alias: the cache must not keep the tensor alive.
    return _masks.get((), (keep,), lambda: from_bool(keep.detach()))


def check_called(given: Any) -> None:
    """Raise InvalidProblem for a constructor of masks that is passed in place of its result."""
    if str(getattr(given, "__module__", "")).startswith("tilegen.masks."):
        needed = inspect.signature(given).parameters.values()
        names = ", ".join(one.name for one in needed if one.default is one.empty)
        raise InvalidProblem(
            f"mask is the function tilegen.{given.__name__} itself: call it, "
            f"mask=tilegen.{given.__name__}({names})"
        )


# A mask of a bool tensor reads its elements at each call.
_masks: TensorCache[Mask] = TensorCache(MAX_MASKS, elements=False)
_traces = Traces(traced)
