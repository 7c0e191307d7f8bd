"""PyTorch's own attention for a problem: SDPA, with or without a chosen back end, and
FlexAttention.

`sdpa` and `flex` return a differentiable function of tensors (batch, heads, seqlen, head_dim) to
time. They raise Unsupported with a reason where PyTorch cannot compute the problem.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilegen.errors import Unsupported
from tilegen.masks.form import Shape
from tilegen.masks.language.evaluation import evaluate
from tilegen.masks.mask import Mask
from tilegen.masks.tensors import tensors_of
from tilegen.masks.tiles.tile_ranges import counted_over
from tilegen.problem import AttentionProblem

if TYPE_CHECKING:
    from torch import Tensor

AttentionFunction = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]

MAX_DENSE_MASK = 2**28
"""Largest mask tensor that is made for SDPA [elements]."""
MAX_SCORES_BYTES = 16 * 2**30
"""Largest score matrix that the math back end may write to memory [bytes]."""


def sdpa(
    problem: AttentionProblem, device: str, *, backend: str | None = None
) -> AttentionFunction:
    """Return SDPA for a problem; `backend` names the torch.nn.attention.SDPBackend to use."""

    _refuse_score(problem, "SDPA")
    if backend == "MATH":
        _refuse_large_scores(problem)
    pinned = None if backend is None else getattr(SDPBackend, backend)
    mask = _sdpa_mask(problem, device, has_causal_bias=backend not in ("CUDNN_ATTENTION", "MATH"))
    enable_gqa = problem.group_size > 1

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with contextlib.nullcontext() if pinned is None else sdpa_kernel(pinned):
            return scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa, **mask)

    return attention


def _sdpa_mask(problem: AttentionProblem, device: str, *, has_causal_bias: bool) -> dict[str, Any]:
    """Return SDPA's arguments for the mask: its own causal forms, else a dense tensor."""
    from tilegen.check.reference import dense_mask

    mask = problem.mask
    if mask.is_full:
        return {}
    if mask.is_causal:
        if mask.args[0] == "top_left" or problem.seqlen_q == problem.seqlen_kv:
            return {"is_causal": True}
        if has_causal_bias:
            from torch.nn.attention.bias import causal_lower_right

            return {"attn_mask": causal_lower_right(problem.seqlen_q, problem.seqlen_kv)}
    elements = problem.seqlen_q * problem.seqlen_kv
    if elements > MAX_DENSE_MASK:
        raise Unsupported(f"needs a dense mask of {elements / 2**30:.2g} GiB; not tried")
    over = {"batch": problem.batch, "heads": problem.num_heads_q}
    return {"attn_mask": dense_mask(mask, problem.seqlen_q, problem.seqlen_kv, device, **over)}


def standard(problem: AttentionProblem, device: str) -> AttentionFunction:
    """Return attention by two products and a softmax, which writes all scores to memory."""
    from tilegen.check.reference import dense_mask

    _refuse_score(problem, "standard attention")
    _refuse_large_scores(problem)
    mask, group = problem.mask, problem.group_size
    over = {"batch": problem.batch, "heads": problem.num_heads_q}
    dropped = None
    if not mask.is_full:
        dropped = ~dense_mask(mask, problem.seqlen_q, problem.seqlen_kv, device, **over)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        if dropped is not None:
            scores = scores.masked_fill(dropped, float("-inf"))
        return scores.softmax(-1) @ v

    return attention


def _refuse_score(problem: AttentionProblem, name: str) -> None:
    if problem.score:
        raise Unsupported(f"{name} is compared on masks only; not with {problem.score.notation}")
    if problem.dropout:
        raise Unsupported(f"{name} is compared on masks only; not with dropout")


def _refuse_large_scores(problem: AttentionProblem) -> None:
    scores = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_kv
    size = scores * problem.element_bytes
    if size > MAX_SCORES_BYTES:
        raise Unsupported(f"writes {size / 2**30:.0f} GiB of scores to memory; not tried")


def flex(problem: AttentionProblem, device: str, *, mode: str = "default") -> AttentionFunction:
    """Return compiled FlexAttention for a problem, with the mask as a BlockMask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    _refuse_score(problem, "FlexAttention")
    mask, lengths = problem.mask, (problem.seqlen_q, problem.seqlen_kv)
    batch, heads = counted_over(mask, problem.batch, problem.num_heads_q)

    block_mask = (
        None
        if mask.is_full
        else create_block_mask(
            _mask_mod(mask, Shape(batch, heads, *lengths), device), batch, heads, *lengths, device
        )
    )
    return partial(
        torch.compile(flex_attention, mode=mode, dynamic=False),
        block_mask=block_mask,
        enable_gqa=problem.group_size > 1,
    )


def _mask_mod(mask: Mask, shape: Shape, device: str) -> Callable[..., Tensor]:
    """Return a mask as FlexAttention has it: a function of b, h, q and k that calls PyTorch
    alone."""

    keep, tables = mask.predicate(), tensors_of(mask, shape, torch.device(device))
    seqlen_q, seqlen_kv = shape.seqlen_q, shape.seqlen_kv

    def kept(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return evaluate(keep, tables, b=b, h=h, q=q, k=k, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)

    # PyTorch would ask for the value of an index without dimensions.
    graph = make_fx(kept)(*torch.zeros((4, 1), dtype=torch.int64, device=device))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        kept_pairs: Tensor = graph(b, h, q, k)
        return kept_pairs

    return mask_mod
