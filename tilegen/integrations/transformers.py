"""tilegen as an attention of transformers' models: `attn_implementation="tilegen"`.

Importing this module registers it. Masks of models become tilegen masks with their structure
(model_masks.py). So no mask tensor of seqlen x seqlen exists, and a step of a generation reuses the
kernels of the last step.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tilegen.calls.attention import attention
from tilegen.calls.flex import from_block_mask
from tilegen.calls.varlen import packed_mask
from tilegen.disk import say_once
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.integrations import windows
from tilegen.integrations.given import is_mask, of_tensor, score_of
from tilegen.integrations.model_masks import ModelMask, model_mask
from tilegen.masks.mask import Mask, causal, full
from tilegen.masks.values import Alignment
from tilegen.runtime.call import shown

NAME = "tilegen"
CHOICES = ("indices", "block_indices", "sinks")
"""Arguments that layers of some models pass and that tilegen does not support: keys or blocks that
an indexer chooses for each query, and logits of each query beside its scores."""


def register() -> None:
    """Register `attn_implementation="tilegen"` with transformers."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, model_mask)
    known = PreTrainedModel.get_correct_attn_implementation
    if known.__module__ != __name__:
        PreTrainedModel.get_correct_attn_implementation = _refusing(known)


def _refusing(known: Any) -> Any:
    """Wrap transformers' check of `attn_implementation`.

    Models that look up their attention among classes of their own would raise a KeyError; the
    wrapper raises Unsupported for them.
    """

    def checked(self: Any, requested_attention: str | None, *args: Any, **options: Any) -> str:
        if requested_attention == NAME:
            module = sys.modules[type(self).__module__]
            if own := [name for name in vars(module) if name.endswith("ATTENTION_CLASSES")]:
                raise Unsupported(
                    f"{type(self).__name__} takes its attention from {own[0]}, not from the "
                    "interface that tilegen is registered with; attn_implementation may be "
                    f"{', '.join(vars(module)[own[0]])}"
                )
        return known(self, requested_attention, *args, **options)

    return checked


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    position_ids: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Compute (out, None), out (batch, seqlen, heads, dim), in the interface of transformers.

    q, k and v are (batch, heads, seqlen, dim). `attention_mask` is a mask made by `model_mask`, a
    bool or additive tensor of the user's (batch, heads, seqlen_q, seqlen_kv), or a BlockMask.
    Without it `is_causal` and `sliding_window` determine the mask. cu_seq_lens describe packed
    documents. A row without kept keys has out 0. Raises InvalidProblem and Unsupported.
    """
    if cache is not None:
        raise Unsupported(
            "expected keys and values as tensors, got a paged cache; use "
            'attn_implementation="paged|sdpa" for continuous batching'
        )
    for name in CHOICES:
        if rest.get(name) is not None:
            raise Unsupported(
                f"expected no {name}, which a layer of this model makes for each query; use "
                'attn_implementation="eager"'
            )
    lengths = query.shape[2], key.shape[2]
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    batch = max(query.shape[0], key.shape[0])
    mask, additive = _mask_of(attention_mask, batch, lengths, bool(is_causal), sliding_window)
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        inside = _default_mask(lengths, bool(is_causal), sliding_window, "bottom_right")
        documents = _documents(cu_seq_lens_q, cu_seq_lens_k, inside, query)
        mask = mask & documents if lengths[0] == lengths[1] else documents
    elif isinstance(attention_mask, ModelMask) and position_ids is not None:
        _warn_of_lost_documents(module, attention_mask, position_ids)
    if position_bias is not None:
        bias = position_bias[..., : lengths[1]]
        additive = bias if additive is None else bias + additive
    out = attention(
        *(x if x.shape[0] == batch else x.expand(batch, -1, -1, -1) for x in (query, key, value)),
        mask=mask,
        score=score_of(softcap, additive, s_aux, lengths),
        scale=scaling,
        dropout_p=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


# --------------------------------------------------------------------------------------------------
# Masks


def _mask_of(
    given: Any, batch: int, lengths: tuple[int, int], is_causal: bool, window: int | None
) -> tuple[Mask, torch.Tensor | None]:
    """Return a mask, and a tensor to add to the scores or None."""
    if given is None:
        alignment = "top_left" if window is None else windows.alignment_of(*lengths)
        return _default_mask(lengths, is_causal, window, alignment), None
    if isinstance(given, ModelMask):
        if given.lengths != lengths:
            raise InvalidProblem(
                f"expected {given.lengths[0]} queries and {given.lengths[1]} keys, for which the "
                f"model made its mask, got {lengths[0]} and {lengths[1]}"
            )
        return given.mask, None
    if isinstance(given, BlockMask):
        return from_block_mask(given), None
    if not is_mask(given) or given.ndim != 4:
        raise InvalidProblem(
            "expected attention_mask to be a bool or floating tensor (batch, heads, seqlen_q, "
            f"seqlen_kv), a BlockMask, or what the model makes; got {shown(given)}"
        )
    return of_tensor(given[..., : lengths[1]], batch, lengths)


def _default_mask(
    lengths: tuple[int, int], is_causal: bool, window: int | None, alignment: Alignment
) -> Mask:
    """Return the mask of a call without one, as transformers' other functions define it.

    A single query sees everything. A window of w tokens includes the query; models that are not
    causal see as many tokens after the query.
    """
    if window is not None:
        return windows.vllm(window, is_causal, alignment)
    return causal(alignment) if is_causal and lengths[0] > 1 else full()


def _documents(cu_q: Any, cu_kv: Any, inside: Mask, query: torch.Tensor) -> Mask:
    """Return a mask within packed documents, cached for all layers."""
    if not isinstance(cu_q, torch.Tensor) or not isinstance(cu_kv, torch.Tensor):
        raise Unsupported(
            "expected cu_seq_lens_q and cu_seq_lens_k to be tensors, got "
            f"{type(cu_q).__name__} and {type(cu_kv).__name__}"
        )
    if query.shape[0] != 1:
        raise InvalidProblem(
            "expected one row of packed documents beside cu_seq_lens_q, got a batch of "
            f"{query.shape[0]}"
        )
    return packed_mask(cu_q, cu_kv, inside, query.shape[2])


def _warn_of_lost_documents(
    module: torch.nn.Module, made: ModelMask, position_ids: torch.Tensor
) -> None:
    """Warn once if positions restart, but transformers has made a mask that does not.

    Positions are checked once per model, since reading them waits for the device.
    """
    if torch.compiler.is_compiling() or getattr(module, "layer_idx", 0) != 0:
        return
    seqlen = made.lengths[0]
    if seqlen == 1 or made.is_padded or made.lengths[1] != seqlen or module in _looked_at:
        return
    _looked_at.add(module)
    restarts = position_ids.diff(dim=-1) != 1
    if made.mask.is_causal and bool(restarts.any()):
        say_once(
            "position_ids restart, as for packed documents, but the model was called with a cache, "
            "for which transformers makes a mask across documents; pass use_cache=False, or "
            "cu_seq_lens_q and cu_seq_lens_k, to keep them apart"
        )


_looked_at: WeakSet[torch.nn.Module] = WeakSet()


register()
