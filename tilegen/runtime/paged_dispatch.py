"""Calls over the pages of a cache, by the plan of their kind, and writes into pages: whoever
watches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilegen.check import interpreter
from tilegen.disk import say_once
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.kernels.layout import empty_like
from tilegen.kernels.split_kv import Requests
from tilegen.masks.score import Score
from tilegen.masks.shapes import Shape
from tilegen.masks.tensors import check_fit, score_tensors, tensors_of
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans
from tilegen.runtime.call import checked_scale, form_of, values_in_keys
from tilegen.runtime.changes import Changes
from tilegen.runtime.kernels import Kernels
from tilegen.runtime.paged_call import DTYPES, LAYOUTS, PagedCall
from tilegen.settings import settings


def attend_pages(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    q_starts: torch.Tensor | None,
    max_q_length: int | None,
    max_kv_length: int | None,
    changes: Changes,
    scale: float | None,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of a call of `attention_paged` in the form that kernels give: (1, heads,
    queries of all requests, d_v) and (1, heads, queries). Raises InvalidProblem or Unsupported."""
    where = block_table, kv_lengths, q_starts
    call = PagedCall.of(q, k_pages, v_pages, *where, max_q_length, layout)
    longest = call.longest_kv(max_kv_length)
    refuse_gradients(q, k_pages, v_pages, changes.score)
    key = call.key(longest, changes)
    known: _Plan | None = plans.by_call.known(key)
    plan = known or _planned(key, call, longest, changes)
    factor = plan.default_scale if scale is None else checked_scale(scale)
    if factor < 0:  # kernels take a row's maximum before scaling: the scale must keep the order
        call.q, factor = -call.q, -factor
    if plan.kernels is None or plan.checks_fit or changes.given.values:
        shape = Shape(call.requests, call.q.shape[1], call.longest_q, longest)
        if plan.checks_fit:
            check_fit(changes.given, changes.score, shape)
        tables = tensors_of(changes.given, shape, call.q.device)
        if plan.kernels is None:
            return _by_request(call, changes, factor)
    else:
        tables = ()
    reads: dict[str, torch.Tensor] = {}
    if changes.score is not None:
        changes = changes.on(call.q.device)
        reads = score_tensors(changes.captured, changes.sinks)
    its = call.block_table, call.lengths, call.q_starts, call.longest_q, longest
    return plan.kernels.forward_paged(call.q, call.k, call.v, factor, Requests(*its), tables, reads)


def refuse_gradients(q: Any, k: Any, v: Any, score: Score | None) -> None:
    """Raise Unsupported where anything would need a gradient."""
    if not torch.is_grad_enabled():
        return
    read = () if score is None else (*score.captured, score.sink_logits)
    if any(x is not None and x.requires_grad for x in (q, k, v, *read)):
        raise Unsupported(
            "no gradients reach what lies in pages: call under torch.no_grad(), or detach"
        )


@dataclass(frozen=True)
class _Plan:
    """How calls of one kind are computed."""

    kernels: Kernels | None
    """None: PyTorch computes."""
    default_scale: float
    checks_fit: bool
    """Whether sizes may not fit the mask or the score, which only a call shows."""


def _planned(key: Any, call: PagedCall, longest_kv: int, changes: Changes) -> _Plan:
    return plans.by_call.get(key, lambda: _new_plan(call, longest_kv, changes))


def _new_plan(call: PagedCall, longest_kv: int, changes: Changes) -> _Plan:
    q = call.q
    problem = AttentionProblem(
        batch=call.requests,
        num_heads_q=q.shape[1],
        num_heads_kv=call.k.shape[1],
        seqlen_q=call.longest_q,
        seqlen_kv=longest_kv,
        head_dim_qk=q.shape[3],
        head_dim_v=call.v.shape[3],
        dtype=DTYPES[q.dtype],  # type: ignore[arg-type]
        mask=changes.kind.mask,
        score=form_of(changes),
        page=call.k.shape[2],
        invariant=settings().batch_invariant,
        latent=values_in_keys(call.k, call.v),
    )
    checks_fit = changes.score is not None or changes.kind.checks_lengths
    scale = problem.head_dim_qk**-0.5
    if q.device.type == "cpu" and not interpreter.is_active():
        say_once(
            "CPU tensors: computing with PyTorch; "
            "set TRITON_INTERPRET=1 before Python starts to run the emitted kernels"
        )
        return _Plan(None, scale, checks_fit)
    if q.device.type == "cpu":
        interpreter.prepare()
    key = problem.bucket, q.device, call.is_aligned, False
    return _Plan(plans.by_problem.get(key, lambda: Kernels(*key)), scale, checks_fit)


def _by_request(
    call: PagedCall, changes: Changes, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) as PyTorch computes them, request after request, in fp32."""
    from tilegen.check.reference import attention_reference

    q, heads, page = call.q, call.q.shape[1], call.k.shape[2]
    out = empty_like(q, call.v.shape[3]).zero_()
    lse = torch.full((1, heads, q.shape[2]), float("-inf"), device=q.device)
    starts, lengths = call.q_starts.tolist(), call.lengths.tolist()
    for i, (first, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if first == end or not length:
            continue
        pages = call.block_table[i, : -(-length // page)].long()
        k, v = (x[pages].transpose(0, 1).flatten(1, 2)[None, :, :length] for x in (call.k, call.v))
        out[:, :, first:end], lse[:, :, first:end] = attention_reference(
            *(x.float() for x in (q[:, :, first:end], k, v)),
            mask=changes.given,
            score=changes.score,
            scale=scale,
            entry=i,
        )
    return out, lse


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    q_starts: torch.Tensor | None,
    layout: str,
) -> None:
    """Write keys and values as `append_paged` says. Raises InvalidProblem."""
    if layout not in LAYOUTS:
        raise InvalidProblem(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if k.shape[:-1] != v.shape[:-1] or k.ndim != (4 if q_starts is None else 3):
        raise InvalidProblem(
            "k and v must hold as many tokens and heads, (requests, heads, new, dim), or with "
            f"q_starts (total, heads, dim), got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    requests = len(kv_lengths)
    if q_starts is None:
        new = k.shape[2]
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        q_starts = torch.arange(0, (requests + 1) * new, new, device=k.device)
        if len(k) != requests * new:
            raise InvalidProblem(f"k must have {requests} requests, got {len(k) // new}")
    if len(block_table) != requests or len(q_starts) != requests + 1:
        raise InvalidProblem(
            f"block_table must have {requests} rows, as kv_lengths has, and q_starts one more, got "
            f"{len(block_table)} and {len(q_starts)}"
        )
    tokens = torch.arange(len(k), device=k.device)
    ends = q_starts[1:].to(torch.int64)
    # Tokens behind the last write again what the last one writes; where there is none, what is
    # there already.
    token = torch.minimum(tokens, ends[-1] - 1).clamp(min=0)
    request = torch.searchsorted(ends, token, right=True).clamp(max=requests - 1)
    at = (kv_lengths.to(torch.int64) - ends)[request] + token
    pages = [x if layout == "NHD" else x.transpose(1, 2) for x in (k_pages, v_pages)]
    page = pages[0].shape[1]
    at = at.clamp(0, block_table.shape[1] * page - 1)
    slots = block_table[request, at // page].long(), at % page
    is_new = (token < ends[-1])[:, None, None]
    for cache, x in zip(pages, (k, v), strict=True):
        cache.index_put_(slots, torch.where(is_new, x[token].to(cache.dtype), cache[slots]))
