"""Attention in plain PyTorch, which defines the result of every kernel. Tests, `verify` and
benchmarks compare with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilegen.check import kept
from tilegen.masks.dropout import Dropout
from tilegen.masks.mask import Mask, full
from tilegen.masks.score import Score
from tilegen.problem import AttentionProblem

TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Inputs:
    """q (b, hq, nq, d_qk), k (b, hkv, nkv, d_qk), v (b, hkv, nkv, d_v), dout (b, hq, nq, d_v)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """Return the same values in another dtype, detached."""
        return Inputs(*(t.detach().to(dtype) for t in (self.q, self.k, self.v, self.dout)))


def make_inputs(
    problem: AttentionProblem,
    *,
    device: str | torch.device = "cpu",
    seed: int = 0,
    heads_inside: bool = False,
    sigma: float = 1.0,
) -> Inputs:
    """Make random normal inputs.

    With `heads_inside` they are in memory as (batch, seqlen, heads, dim). `sigma` is the standard
    deviation of q, and scales the logits.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = TORCH_DTYPES[problem.dtype]

    def tensor(heads: int, seqlen: int, dim: int, scale: float = 1.0) -> torch.Tensor:
        shape = (
            (problem.batch, seqlen, heads, dim)
            if heads_inside
            else (problem.batch, heads, seqlen, dim)
        )
        values = (torch.randn(shape, generator=generator) * scale).to(device=device, dtype=dtype)
        return values.transpose(1, 2) if heads_inside else values

    q = tensor(problem.num_heads_q, problem.seqlen_q, problem.head_dim_qk, sigma)
    k = tensor(problem.num_heads_kv, problem.seqlen_kv, problem.head_dim_qk)
    v = tensor(problem.num_heads_kv, problem.seqlen_kv, problem.head_dim_v)
    return Inputs(
        q=q,
        k=k,
        v=k[..., : problem.head_dim_v] if problem.latent else v,
        dout=tensor(problem.num_heads_q, problem.seqlen_q, problem.head_dim_v),
    )


def dense_mask(
    mask: Mask,
    seqlen_q: int,
    seqlen_kv: int,
    device: str | torch.device = "cpu",
    *,
    batch: int = 1,
    heads: int = 1,
    entry: int = 0,
) -> torch.Tensor:
    """Compute the mask as a bool tensor: True where a pair is kept.

    The shape is (seqlen_q, seqlen_kv) for a mask that depends on neither batch nor head, else
    (1 or batch, 1 or heads, seqlen_q, seqlen_kv). Batch entries are numbered from `entry`.
    """
    b = torch.arange(entry, entry + batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[:, None, None]
    q = torch.arange(seqlen_q, device=device)[:, None]
    k = torch.arange(seqlen_kv, device=device)[None, :]
    keep = mask.kept(q, k, seqlen_q, seqlen_kv, b, h)
    return keep.expand(*keep.shape[:-2], seqlen_q, seqlen_kv)


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    entry: int = 0,
    shared: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) in the dtype of the inputs, differentiably, with memory for all pairs.

    A row without kept keys has out 0, lse -inf and zero gradients. lse is that of the weights
    before dropout. `scale` defaults to head_dim_qk ** -0.5. For mask and score, the first batch
    entry has number `entry`. NaN spreads neither between documents nor from keys beyond the lengths
    of a padded batch, nor from any dropped key if keys are `shared` by requests, as in the pages of
    a cache. Under other masks a dropped pair counts as in PyTorch: 0 times NaN is NaN.
    """
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    softmax = softmax_of(q, k, mask, score, factor, entry, shared=shared)
    weights = softmax.weights
    if dropout is not None:
        weights = weights * dropout.factors(*weights.shape).to(weights)
    rows = for_each_query_head(v, q)
    if not shared and (mask is None or not mask.apart):
        return weights @ rows, softmax.lse
    return kept.weighed(weights, rows, softmax.keep), softmax.lse


@dataclass(frozen=True)
class Softmax:
    """Scores and softmax of attention: everything before the product with v."""

    scores: torch.Tensor
    """Scaled products q k^T: (batch, heads, seqlen_q, seqlen_kv), as `changed` and `weights`."""
    keep: torch.Tensor
    """True where the mask keeps a pair, broadcast to the shape of `scores`."""
    changed: torch.Tensor
    """Scores after the score change; -inf where the mask drops a pair."""
    weights: torch.Tensor
    """Softmax of `changed` over the keys."""
    lse: torch.Tensor
    """Logarithm of the sum of exponentials of each row: (batch, heads, seqlen_q)."""


def softmax_of(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: Mask | None,
    score: Score | None,
    scale: float,
    entry: int = 0,
    *,
    shared: bool = False,
) -> Softmax:
    """Compute the softmax weights of all pairs and the values they derive from, differentiably. See
    `attention_reference` for `entry` and `shared`."""
    k = for_each_query_head(k, q)
    mask = full() if mask is None else mask
    isolated = shared or bool(mask.apart)
    keep = _dense(mask, q, k, entry)
    changed = scores = (kept.scores(q, k, keep) if isolated else q @ k.mT) * scale
    if score is not None and score.form.changes:
        changed = _changed(score, scores, entry)
    changed = changed.masked_fill(~keep, float("-inf"))
    # Not exp(changed - lse): if a row is far from 0, rounding in lse would lose log(sum).
    top = changed.detach().amax(-1)
    sinks = None
    if score is not None and score.sink_logits is not None:
        sinks = score.sink_logits.to(top)[:, None]
        top = torch.maximum(top, sinks.detach())
    empty = top == float("-inf")
    top = top.masked_fill(empty, 0.0)
    weights = (changed - top[..., None]).exp()
    sums = weights.sum(-1)
    if sinks is not None:
        sums = sums + (sinks - top).exp()
    sums = sums.masked_fill(empty, 1.0)
    lse = (top + sums.log()).masked_fill(empty, float("-inf"))
    weights = weights / sums[..., None]
    if isolated:  # dropped pairs are 0 even in rows whose sum is NaN
        weights = weights.masked_fill(~keep, 0.0)
    return Softmax(scores, keep, changed, weights, lse)


def for_each_query_head(rows: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Repeat keys or values (batch, heads_kv, seqlen_kv, dim) for the heads of q."""
    return rows.repeat_interleave(q.shape[1] // rows.shape[1], 1)


def _changed(score: Score, scores: torch.Tensor, entry: int) -> torch.Tensor:
    from tilegen.masks.language.evaluation import evaluate

    batch, heads, seqlen_q, seqlen_kv = scores.shape
    b, h, q, k = (
        torch.arange(size, device=scores.device).view(-1, *[1] * (3 - axis))
        for axis, size in enumerate(scores.shape)
    )
    captured = [tensor.to(scores.device) for tensor in score.captured]
    return evaluate(
        score.expression(),
        captured,
        **{"b": b + entry, "h": h, "q": q, "k": k, "s": scores},
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
    ).expand(batch, heads, seqlen_q, seqlen_kv)


def torch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute SDPA's out in the inputs' dtype, with 0 in rows without kept keys."""
    keep = None if mask is None or mask.is_full else _dense(mask, q, k)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=keep, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out if keep is None else out.masked_fill(~keep.any(-1)[..., None], 0.0)


def _dense(mask: Mask, q: torch.Tensor, k: torch.Tensor, entry: int = 0) -> torch.Tensor:
    batch, heads = q.shape[:2]
    lengths = q.shape[2], k.shape[2]
    return dense_mask(mask, *lengths, q.device, batch=batch, heads=heads, entry=entry)
