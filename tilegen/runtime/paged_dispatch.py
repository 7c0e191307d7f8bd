"""Run calls over the pages of a cache by their plan, called directly or by an operator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilegen.errors import Unsupported
from tilegen.kernels.layout import empty_like
from tilegen.kernels.split_kv import Requests
from tilegen.launch.autograd import computes_by_torch
from tilegen.launch.changes import Changes
from tilegen.launch.derivatives import refuse_tangents
from tilegen.launch.kernels import Kernels
from tilegen.masks.score import Score
from tilegen.masks.shapes import Shape
from tilegen.masks.tensors import check_fit, score_tensors, tensors_of
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans
from tilegen.runtime.call import DTYPES, checked_scale, form_of, values_in_keys
from tilegen.runtime.paged_call import Form, PagedCall, facts_of_pages
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
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) of a call of `attention_paged` in the form that kernels write.

    Shapes: out (1, heads, queries of all requests, d_v), lse (1, heads, queries of all requests).
    If `out` is given, the result is written to it. Raises InvalidProblem or Unsupported.
    """
    where = block_table, kv_lengths, q_starts
    bounds = max_q_length, max_kv_length, layout
    facts = facts_of_pages((q, k_pages, v_pages, *where, out), bounds, changes)
    recalled: _Recalled | None = None if facts is None else plans.by_call.recall(facts)
    if recalled is not None:  # the same facts as a recent call, usually that of the layer before
        refuse_gradients(q, k_pages, v_pages, changes.score)
        call = recalled.form.applied(q, k_pages, v_pages, *where, out)
        longest, plan = recalled.longest, recalled.plan
    else:
        call = PagedCall.of(q, k_pages, v_pages, *where, max_q_length, layout)
        if out is not None:
            call.out = call.rows_of(out, is_packed=q_starts is not None)
        longest = call.longest_kv(max_kv_length)
        refuse_gradients(q, k_pages, v_pages, changes.score)  # after the checks: reads tensors
        key = call.key(longest, changes)
        known: _Plan | None = plans.by_call.known(key)
        plan = known or plans.by_call.get(key, partial(_new_plan, call, longest, changes))
        if facts is not None and (form := call.form_of(q, *where, out)) is not None:
            plans.by_call.note(facts, key, _Recalled(form, longest, plan))
    factor = plan.default_scale if scale is None else checked_scale(scale)
    if factor < 0:  # kernels take a row's maximum before scaling: the scale must keep the order
        call.q, factor = -call.q, -factor
    if plan.kernels is None or plan.checks_fit or changes.given.values:
        shape = Shape(call.requests, call.q.shape[1], call.longest_q, longest)
        if plan.checks_fit:
            check_fit(changes.given, changes.score, shape)
        tables = tensors_of(changes.given, shape, call.q.device)
        if plan.kernels is None:
            result, lse = _by_request(call, changes, factor)
            return (result if call.out is None else call.out.copy_(result)), lse
    else:
        tables = ()
    reads: dict[str, torch.Tensor] = {}
    if changes.score is not None:
        changes = changes.on(call.q.device)
        reads = score_tensors(changes.captured, changes.sinks)
    requests = Requests(call.block_table, call.lengths, call.q_starts, call.longest_q, longest)
    return plan.kernels.forward_paged(
        *(call.q, call.k, call.v, factor, requests, tables, reads, call.out)
    )


def refuse_gradients(q: Any, k: Any, v: Any, score: Score | None) -> None:
    """Raise Unsupported if any input needs a gradient."""
    refuse_tangents(q, k, v)
    if needs_gradients(q, k, v, score):
        raise Unsupported(
            "no gradients reach what lies in pages: call under torch.no_grad(), or detach"
        )


def needs_gradients(q: Any, k: Any, v: Any, score: Score | None) -> bool:
    """Check whether any tensor that a call reads needs a gradient."""
    if not torch.is_grad_enabled():
        return False
    if score is None:
        return q.requires_grad or k.requires_grad or v.requires_grad
    read = (*score.captured, score.sink_logits)
    return any(x is not None and x.requires_grad for x in (q, k, v, *read))


@dataclass(frozen=True, slots=True)
class _Recalled:
    """The views and the plan of calls with the same facts."""

    form: Form
    longest: int
    plan: _Plan


@dataclass(frozen=True)
class _Plan:
    """The plan of calls of one kind."""

    kernels: Kernels | None
    """The kernels of the calls; None if PyTorch computes them."""
    default_scale: float
    checks_fit: bool
    """Whether each call must check that the mask and the score fit its sizes."""


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
        dtype=DTYPES[q.dtype],
        mask=changes.kind.mask,
        score=form_of(changes),
        page=call.k.shape[2],
        invariant=settings().batch_invariant,
        latent=values_in_keys(call.q, call.k, call.v),
    )
    checks_fit = changes.score is not None or changes.kind.checks_lengths
    scale = problem.head_dim_qk**-0.5
    if computes_by_torch(q.device):
        return _Plan(None, scale, checks_fit)
    key = problem.bucket, q.device, call.is_aligned, False, call.integers
    return _Plan(plans.by_problem.get(key, lambda: Kernels(*key)), scale, checks_fit)


def _by_request(
    call: PagedCall, changes: Changes, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) with PyTorch in fp32, request by request."""
    from tilegen.check.reference import attention_reference

    q, heads, page = call.q, call.q.shape[1], call.k.shape[2]
    out = empty_like(q, call.v.shape[3]).zero_()
    lse = torch.full((1, heads, q.shape[2]), float("-inf"), device=q.device)
    starts, lengths = call.q_starts.tolist(), call.lengths.tolist()
    for i, (first, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if first == end:
            continue
        if not length:
            if changes.sinks is not None:
                lse[0, :, first:end] = changes.sinks.float()[:, None]
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
