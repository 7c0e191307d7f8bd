"""tilegen as one of PyTorch's flash attention implementations, beside FA3 and FA4. It computes the
calls that SDPA and `varlen_attn` route to flash on a GPU.

The five operators of PyTorch's flash attention are overridden, with the contracts of `aten`:
layouts (batch, seqlen, heads, dim) or packed (tokens, heads, dim), lse by head, and a random state
that is unused without dropout. Calls that tilegen does not support reach the kernel registered
before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from tilegen.calls.varlen import packed_mask
from tilegen.disk import say_once
from tilegen.errors import TilegenError, Unsupported
from tilegen.integrations import windows
from tilegen.launch.changes import Changes
from tilegen.masks.dropout import Dropout
from tilegen.masks.mask import Mask
from tilegen.operators.library import differentiated, noted
from tilegen.runtime import dispatch

NAME = "tilegen"
"""The name in PyTorch's registry."""


def activate() -> None:
    """Compute with tilegen the calls that PyTorch's SDPA and `varlen_attn` route to flash on a GPU.

    These are calls in fp16 and bf16 with head dims up to 256 and no explicit mask; for all others
    see `tilegen.integrations.sdpa.everywhere`. The same as
    `torch.nn.attention.activate_flash_attention_impl("tilegen")` after importing this module.
    """
    activate_flash_attention_impl(NAME)


def deactivate() -> None:
    """Restore PyTorch's own flash attention; does nothing if tilegen is not active."""
    if current_flash_attention_impl() == NAME:
        restore_flash_attention_impl()


class Overrides:
    """The overrides of the five operators, in place until removed."""

    def __init__(self, device: str = "CUDA") -> None:
        """`device` is the dispatch key of the overrides."""
        self._library: Library | None = Library("aten", "IMPL", device)
        for name, function in OPERATORS.items():
            if not hasattr(torch.ops.aten, name):  # PyTorch 2.11 has no in-place forward
                continue
            before = _kernel(f"aten::{name}", device)
            self._library.impl(name, _or_before(function, before), device, with_keyset=True)

    def remove(self) -> None:
        """Restore the operators."""
        self._library = None


def _kernel(name: str, device: str) -> Any:
    """Return the kernel of an operator on a device, or None."""
    try:
        return torch.library.get_kernel(name, device)
    except RuntimeError:
        return None


def _or_before(function: Callable[..., Any], before: Any) -> Callable[..., Any]:
    """Return a function that falls back to the kernel registered before if tilegen does not support
    a call."""

    def override(keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with torch.no_grad():  # PyTorch's autograd calls the backward operator
                return function(*args, **kwargs)
        except TilegenError as error:
            if before is None:
                raise
            reason, *_ = str(error).split("; the call was")
            say_once(f"flash attention: PyTorch's own kernel computes instead: {reason}")
            return before.call_boxed(keys, *args, **kwargs)

    return override


# --------------------------------------------------------------------------------------------------
# Operators


def flash_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute attention of query, key and value (batch, seqlen, heads, dim), or packed.

    Returns out, lse, two random states and an empty debug mask. Raises InvalidProblem or
    Unsupported.
    """
    given = {
        "return_debug_mask": return_debug_mask or None,
        "seqused_k": seqused_k,
        "alibi_slopes": alibi_slopes,
        "block_table": block_table,
    }
    refused = [name for name, value in given.items() if value is not None]
    if refused:
        raise Unsupported(f"tilegen's flash attention has no {', '.join(refused)}")
    q = _heads_first(query, cum_seq_q)
    k, v = (_heads_first(x, cum_seq_k) for x in (key, value))
    window = window_size_left, window_size_right
    mask = _mask(q, k, cum_seq_q, cum_seq_k, is_causal, window)
    dropout = Dropout.drawn(dropout_p, q.device) if dropout_p else None
    out, lse = dispatch.planned(q, k, v, Changes(mask, dropout=dropout), scale)
    if cum_seq_q is not None:
        lse = lse[0]
    state = torch.empty(2, dtype=torch.int64, device=q.device) if dropout is None else dropout.state
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    debug_mask = query.new_empty(0)
    out = _laid_out(_heads_back(out, cum_seq_q), query)
    return out, noted(lse.contiguous()), state.view(torch.uint64), unused, debug_mask


def flash_attention_forward_inplace(out: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute attention into `out` and return lse; arguments are those of
    `flash_attention_forward`."""
    result, lse, *_ = flash_attention_forward(*args, **kwargs)
    out.copy_(result)
    return lse


def flash_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of query, key and value. Raises InvalidProblem or Unsupported."""
    window = window_size_left, window_size_right
    q, dout, o = (_heads_first(x, cum_seq_q) for x in (query, grad_out, out))
    k, v = (_heads_first(x, cum_seq_k) for x in (key, value))
    mask = _mask(q, k, cum_seq_q, cum_seq_k, is_causal, window)
    dropout = Dropout(dropout_p, rng_state.view(torch.int64)) if dropout_p else None
    lse = logsumexp if cum_seq_q is None else logsumexp[None]
    changes = Changes(mask, dropout=dropout)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    grads: Any = differentiated((q, k, v), (o, lse), dout, None, changes, factor)
    return tuple(
        _laid_out(_heads_back(grad, cum_seq), like)
        for grad, cum_seq, like in zip(
            grads, (cum_seq_q, cum_seq_k, cum_seq_k), (query, key, value), strict=True
        )
    )


def sdpa_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute SDPA's operator on query, key and value (batch, heads, seqlen, dim)."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    rows, columns = query.shape[2], key.shape[2]
    out, lse, *rest = flash_attention_forward(
        q, k, v, None, None, rows, columns, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return _laid_out(out.transpose(1, 2), query), lse, None, None, rows, columns, *rest


def sdpa_flash_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of SDPA's operator by query, key and value (batch, heads, seqlen,
    dim)."""
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    grads = flash_attention_backward(
        dout,
        q,
        k,
        v,
        o,
        logsumexp,
        None,
        None,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        philox_seed,
        philox_offset,
        scale=scale,
    )
    return tuple(
        _laid_out(grad.transpose(1, 2), like)
        for grad, like in zip(grads, (query, key, value), strict=True)
    )


OPERATORS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_inplace,
    "_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_flash_attention": sdpa_flash_attention,
    "_scaled_dot_product_flash_attention_backward": sdpa_flash_attention_backward,
}
"""Functions that replace operators of `aten`, by operator name."""


# --------------------------------------------------------------------------------------------------
# Between aten's layouts and tilegen's


def _mask(
    q: torch.Tensor,
    k: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    is_causal: bool,
    window: tuple[int | None, int | None],
) -> Mask:
    """Return the mask of a call, restricted to documents if there are any."""
    if (cum_seq_q is None) != (cum_seq_k is None):
        raise Unsupported("tilegen's flash attention needs cum_seq_q and cum_seq_k, or neither")
    if cum_seq_q is None or cum_seq_k is None:
        alignment = windows.alignment_of(q.shape[2], k.shape[2])
        return windows.flash_attn(*window, is_causal, alignment)
    mask = windows.flash_attn(*window, is_causal, "bottom_right")
    return packed_mask(cum_seq_q, cum_seq_k, mask, k.shape[2])


def _heads_first(x: torch.Tensor, cum_seq: torch.Tensor | None) -> torch.Tensor:
    """View x as (batch, heads, seqlen, dim)."""
    return x.transpose(1, 2) if cum_seq is None else x.transpose(0, 1)[None]


def _heads_back(x: torch.Tensor, cum_seq: torch.Tensor | None) -> torch.Tensor:
    """View x as (batch, seqlen, heads, dim), or packed (tokens, heads, dim)."""
    return x.transpose(1, 2) if cum_seq is None else x[0].transpose(0, 1)


def _laid_out(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the strides of `torch.empty_like(like)`, which tracing has assumed."""
    if x.stride() == like.stride():  # x is dense, so these are the assumed strides
        return x
    promised = torch.empty_like(like, device="meta").stride()
    return x if x.stride() == promised else torch.empty_like(like).copy_(x)


register_flash_attention_impl(NAME, register_fn=Overrides)
