"""`flex_attention` with PyTorch's signature, so that existing code changes one import."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, noop_mask

from tilegen.calls.attention import attention
from tilegen.calls.maxima import row_maxima
from tilegen.errors import InvalidProblem
from tilegen.launch.changes import Changes
from tilegen.masks.blocks import Blocks
from tilegen.masks.constructors import traced
from tilegen.masks.made import is_traced
from tilegen.masks.mask import Mask, Pending, full
from tilegen.masks.score import Score
from tilegen.masks.tracing.reads import Traces
from tilegen.private_torch import largest_block
from tilegen.runtime.call import AXES, ScoreFunction, check_axes, score_of


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Score | ScoreFunction | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Compute `torch.nn.attention.flex_attention.flex_attention` with tilegen's kernels.

    `score_mod` and `block_mask` are FlexAttention's, or a tilegen score and mask. `kernel_options`
    is ignored: tilegen chooses the tiles. The max_scores of `return_aux` are computed by a second
    pass, with PyTorch. Raises InvalidProblem or Unsupported, with a message of one line.
    """
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise InvalidProblem(f"return_aux must be an AuxRequest, got {type(return_aux).__name__}")
    if return_aux is not None and return_lse:
        raise InvalidProblem("expected return_lse or return_aux, got both")
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_axes(name, x, AXES)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise InvalidProblem(
            f"query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True"
        )
    if key.shape[0] == value.shape[0] == 1:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    mask = block_mask
    if block_mask is not None and not isinstance(block_mask, Mask):
        if not is_traced():
            _check_lengths(block_mask, query, key)
        mask = from_block_mask(block_mask)
    out, lse = attention(
        query, key, value, mask=mask, score=score_mod, scale=scale, return_lse=True
    )
    if return_aux is None:
        return (out, lse) if return_lse else out
    maxima = None
    if return_aux.max_scores:
        changes = Changes(full() if mask is None else mask, score_of(score_mod))
        maxima = row_maxima(query, key, changes, scale)
    return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=maxima)


def from_block_mask(block_mask: Any) -> Mask:
    """Convert a FlexAttention BlockMask to a tilegen mask.

    The mask is reused while the blocks and the tensors that mask_mod reads are the same. If the
    blocks are exactly those that mask_mod keeps, as `create_block_mask` makes them, the mask is
    that of mask_mod, for tiles of any shape. Raises InvalidProblem or Unsupported.
    """
    if is_traced():
        listed = (block_mask.kv_num_blocks, block_mask.kv_indices, *(_whole(block_mask) or ()))
        return Pending(("blocks", listed, block_mask.BLOCK_SIZE, _inside(block_mask)))
    return _converted_masks(block_mask)


_READS = (
    *("mask_mod", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("BLOCK_SIZE", "seq_lengths"),
)
"""The attributes of a BlockMask that determine its mask."""


def _converted(block_mask: Any) -> Mask:
    if not isinstance(block_mask, BlockMask):
        raise InvalidProblem(
            "block_mask must be a FlexAttention BlockMask or a tilegen mask, "
            f"got {type(block_mask).__name__}"
        )
    listed: Any = block_mask  # whose attributes have no types
    blocks = Blocks(listed.kv_num_blocks, listed.kv_indices, _whole(listed), listed.BLOCK_SIZE)
    lengths = int(listed.seq_lengths[0]), int(listed.seq_lengths[1])
    return blocks.mask(_inside(listed), lengths)


def _whole(block_mask: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    counts, indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    return None if counts is None or indices is None else (counts, indices)


def _inside(block_mask: Any) -> Mask:
    fn = block_mask.mask_mod
    return full() if fn is noop_mask else traced(fn)


_converted_masks = Traces(_converted, attributes=_READS)


def _check_lengths(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    if tuple(getattr(block_mask, "BLOCK_SIZE", ())) == (largest_block(),) * 2:
        return  # one block, for sequences of any lengths
    expected = tuple(int(n) for n in getattr(block_mask, "seq_lengths", ()))
    lengths = (query.shape[-2], key.shape[-2])
    if expected and expected != lengths:
        raise InvalidProblem(
            f"block_mask was made for lengths {expected}, got query and key of {lengths}; make one "
            "for these, or pass a tilegen mask, which holds at any length"
        )
