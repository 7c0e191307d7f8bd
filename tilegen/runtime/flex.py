"""`flex_attention` with PyTorch's signature, so that existing code changes one import."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, noop_mask

from tilegen.errors import InvalidProblem
from tilegen.masks.constructors import block_sparse, predicate
from tilegen.masks.mask import Mask, full
from tilegen.masks.score import Score
from tilegen.masks.tracing.fingerprint import Traces
from tilegen.runtime.attention import attention
from tilegen.runtime.call import ScoreFunction, score_of
from tilegen.runtime.changes import Changes
from tilegen.runtime.maxima import row_maxima


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
    """Return what `torch.nn.attention.flex_attention.flex_attention` does, with tilegen's kernels.

    `score_mod` and `block_mask` are FlexAttention's, or a tilegen score and mask. kernel_options
    are ignored: tiles are tilegen's choice. The max_scores of `return_aux` are computed by a second
    pass, with PyTorch. Raises InvalidProblem or Unsupported, each in one line.
    """
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise InvalidProblem(f"return_aux must be an AuxRequest, got {type(return_aux).__name__}")
    if return_aux is not None and return_lse:
        raise InvalidProblem("expected return_lse or return_aux, got both")
    if query.ndim == 4 and key.ndim == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
        raise InvalidProblem(
            f"query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True"
        )
    if key.ndim == value.ndim == query.ndim == 4 and key.shape[0] == value.shape[0] == 1:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    mask = block_mask
    if block_mask is not None and not isinstance(block_mask, Mask):
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
    """Return the mask of a FlexAttention BlockMask; made once for each, while its blocks and what
    its mask_mod reads are the same.

    Where its blocks are those that its mask_mod leaves, as `create_block_mask` makes them, it is
    the mask_mod's, at any tile shape. Raises InvalidProblem or Unsupported.
    """
    reads = [getattr(block_mask, name, None) for name in _READS]
    versions = [
        one._version for one in reads if isinstance(one, torch.Tensor) and not one.is_inference()
    ]
    return _converted_masks(block_mask, (*reads, *versions))


_READS = (
    *("mask_mod", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("BLOCK_SIZE", "seq_lengths"),
)
"""What of a BlockMask its mask is made of."""


def _converted(block_mask: Any) -> Mask:
    if not isinstance(block_mask, BlockMask):
        raise InvalidProblem(
            "block_mask must be a FlexAttention BlockMask or a tilegen mask, "
            f"got {type(block_mask).__name__}"
        )
    rows, columns = block_mask.BLOCK_SIZE
    partial, whole = _layouts(block_mask)
    fn = block_mask.mask_mod
    inside = full() if fn is noop_mask else predicate(fn)
    if _same_blocks(inside, block_mask, partial | whole, whole):
        return inside
    side = math.gcd(rows, columns)
    whole, partial = (
        one.repeat_interleave(rows // side, -2).repeat_interleave(columns // side, -1)
        for one in (whole, partial)
    )
    return block_sparse(whole, side) | (block_sparse(partial, side) & inside)


_converted_masks = Traces(_converted)


def _layouts(block_mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which blocks are partial and which are full, bool (batch, heads, rows, columns)."""

    def layout(counts: torch.Tensor | None, indices: torch.Tensor | None) -> torch.Tensor:
        like = block_mask.kv_indices
        found = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
        if counts is None or indices is None:
            return found
        listed = torch.arange(indices.shape[-1], device=like.device) < counts[..., None]
        # What lies beyond the count may name a listed block again: it goes into a column of its
        # own.
        columns = torch.where(listed, indices.long(), found.shape[-1])
        return torch.nn.functional.pad(found, (0, 1)).scatter(-1, columns, True)[..., :-1]

    return (
        layout(block_mask.kv_num_blocks, block_mask.kv_indices),
        layout(block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    )


def _same_blocks(inside: Mask, block_mask: Any, visited: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a mask leaves exactly the blocks that are listed, and keeps all of those listed as
    whole, in which its mask_mod is not asked."""
    from tilegen.masks.shapes import Shape
    from tilegen.masks.tensors import tensors_of
    from tilegen.masks.tiles.closed_form import predicate as predicate_of
    from tilegen.masks.tiles.tile_lists import build

    batch, heads, rows, columns = visited.shape
    seqlen_q, seqlen_kv = (int(n) for n in block_mask.seq_lengths)
    block_m, block_n = block_mask.BLOCK_SIZE
    shape = Shape(batch, heads, seqlen_q, seqlen_kv).tiled(block_m, block_n)
    if (rows, columns) != (shape.rows, shape.columns):
        return False
    lists = build(
        cast("Any", predicate_of(inside)),
        tensors_of(inside, shape, visited.device),
        shape,
        device=visited.device,
        side="rows",
    )
    live, full = lists.flags(columns)
    return torch.equal(live.expand_as(visited), visited) and bool((whole <= full).all())


def _check_lengths(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    expected = tuple(int(n) for n in getattr(block_mask, "seq_lengths", ()))
    found = (query.shape[-2], key.shape[-2])
    if expected and expected != found:
        raise InvalidProblem(
            f"block_mask was made for lengths {expected}, got query and key of {found}; make one "
            "for these, or pass a tilegen mask, which holds at any length"
        )
