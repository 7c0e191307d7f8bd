"""Run a call of `attention` by a plan, which the first call of a kind makes.

The first call of a kind chooses configs, from records or by the model, and loads the emitted
kernels. Every further call is a dictionary look-up and a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tilegen import bundles, cpu
from tilegen.disk import say_once
from tilegen.emit.identity import is_aligned
from tilegen.environment import BATCH_INVARIANT, current
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.kernels.config import BLOCK_SIZES
from tilegen.kernels.descriptors import is_describable
from tilegen.kernels.layout import laid_like, public_lse
from tilegen.kernels.spec import Direction
from tilegen.launch import autograd
from tilegen.launch.autograd import (
    addressable,
    computes_by_torch,
    reaching,
    torch_run,
    without_pairs,
)
from tilegen.launch.changes import Changes
from tilegen.launch.kernels import Kernels
from tilegen.masks.dilation import grouped_mask, step_of
from tilegen.masks.form import Shape
from tilegen.masks.kinds import kind_of_mask
from tilegen.masks.tensors import are_readable, check_columns, check_fit, check_kv_lengths
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans
from tilegen.runtime.call import (
    MAX_PROGRAMS,
    autocast,
    autocast_dtype,
    call_key,
    checked_scale,
    facts_of,
    is_narrow,
    problem_of,
    problem_of_sizes,
    widened,
)
from tilegen.runtime.dilation import group, ungroup
from tilegen.runtime.paged_call import PagedForm, checked_pages, run_pages, run_without_pairs


def planned(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, changes: Changes, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) by the plan of calls of this kind."""
    plan = plan_of(q, k, v, changes)
    factor = plan.default_scale if scale is None else checked_scale(scale)
    if factor < 0:  # kernels take a row's maximum before scaling: the scale must keep the order
        return planned(-q, k, v, changes, -factor)
    if plan.checks_fit:
        check_fit(changes.given, changes.score, plan.shape or Shape.of(q, k))
    if changes.kv_lengths is not None and not plan.rewrites:
        check_columns(changes.kv_lengths, k.shape[2])
    if plan.laid is None or plan.kernels is None:
        result = plan.run(q, k, v, factor, changes)
    else:
        result = autograd.run(plan.kernels, q, k, v, factor, changes, plan.laid)
    if changes.score is None or plan.rewrites or plan.shape is not None:
        return result
    return reaching(*result, [table.tensor for table in changes.score.unused])


def plan_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, changes: Changes) -> Plan:
    """Return the plan of calls of this kind, making it for the first call."""
    try:
        facts = facts_of(q, k, v, changes)
    except InvalidProblem:
        if changes.pages is not None:
            checked_pages(q, k, v, changes.pages)  # raises, with the name of the argument
        raise
    recent: Plan | None = plans.by_call.recall(facts)
    if recent is not None:  # the same facts as a recent call, usually that of the layer before
        return recent
    form = None if changes.pages is None else PagedForm.of(q, k, v, changes.pages)
    key = call_key(facts) if form is None else form.key(q, changes)
    known: Plan | None = plans.by_call.known(key)
    plan = known or plans.by_call.get(key, partial(_new_plan, q, k, v, changes, form))
    if form is not None:
        plan = replace(plan, run=partial(run_pages, plan.kernels, form), shape=form.shape)
    elif plan.kernels is not None:
        plan = replace(plan, laid=facts[0])
    plans.by_call.note(facts, key, plan)
    return plan


Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, Changes], tuple[Any, Any]]


@dataclass(frozen=True)
class Plan:
    """The plan of calls of one kind: everything that the plan-cache key determines."""

    run: Run
    default_scale: float
    rewrites: bool = False
    """True if `run` rewrites the call into another call, which has a plan too."""
    kernels: Kernels | None = None
    """The kernels, if `run` launches them on the call's tensors; None if it copies or rewrites."""
    checks_fit: bool = False
    """True if each call must check that the mask and the score fit its sizes."""
    shape: Shape | None = None
    """The sizes of a call over pages."""
    laid: Any = None
    """The shapes of q, k and v, then their strides, if `run` launches kernels on these tensors. So
    a launch does not ask for them again."""


def _laid_out(
    run: Run,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    changes: Changes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) by a function, with the strides of out and gradients that kernels give."""
    inputs = _with_laid_gradient(q), _with_laid_gradient(k), _with_laid_gradient(v)
    out, lse = run(*inputs, scale, changes)
    return laid_like(out, q), lse


def _with_laid_gradient(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose gradient reaches `x` with the strides that kernels give."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    # A hook of the tensor itself would outlive the call. `view_as` would change strides again.
    alias = torch.ops.aten.alias(x)
    alias.register_hook(lambda gradient: laid_like(gradient, x))
    return alias


def _rewritten(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, changes: Changes
) -> tuple[Run, float] | None:
    """Return a function that rewrites a call that kernels cannot run unchanged, and the default
    scale. Returns None if no rewrite is needed."""
    default = q.shape[-1] ** -0.5 if q.ndim and q.shape[-1] else 1.0
    if (dtype := autocast_dtype(q.device)) is not None:
        return partial(_cast, dtype), default
    if is_narrow(q, k, v):
        return _widened, default
    if not (q.numel() and k.numel()):
        problem_of(q, k, v, changes)  # raises if the tensors do not fit together
        return without_pairs, default
    form = changes.score.form if changes.score else None
    invariant = current().batch_invariant
    step = step_of(changes.kind.mask, form, q.shape[0], invariant=invariant) if q.ndim else 1
    if step > 1:
        problem_of(q, k, v, changes)  # raises if the tensors do not fit together
        return partial(_regrouped, step), default
    return None


def _cast(
    dtype: torch.dtype,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    changes: Changes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) with q, k and v cast to the dtype of torch.autocast."""
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (autocast(tensor, dtype) for tensor in (q, k, v))
        return planned(q, k, v, changes, scale)


def _widened(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, changes: Changes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) for head dims below the smallest that kernels support."""
    out, lse = planned(widened(q), widened(k), widened(v), changes, scale)
    return out[..., : v.shape[3]], lse


def _regrouped(
    step: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    changes: Changes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) for a dilated mask, with rows and columns regrouped by their remainder.
    `AttentionProblem.normal` rewrites the problem in the same way."""
    groups = q.shape[0] * step
    mask = grouped_mask(changes.mask, step, k.shape[2], groups, q.device)
    rows = q.shape[2]
    q, k, v = (group(x, step) for x in (q, k, v))
    out, lse = planned(q, k, v, Changes(mask, changes.score, dropout=changes.dropout), scale)
    return ungroup(out, step, rows), ungroup(public_lse(lse), step, rows)


def _new_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, changes: Changes, form: PagedForm | None
) -> Plan:
    if changes.pages is not None and form is None:
        return Plan(run_without_pairs, q.shape[-1] ** -0.5, rewrites=True)
    checks_fit = changes.score is not None or kind_of_mask(changes.given).checks_lengths
    if form is not None:
        q, k, v = form.seen(q, k, v)
        problem, kernels = problem_of_sizes(form.shape, q, k, v, changes, page=k.shape[2]), None
        served = _is_served(problem, "forward", q.device, form.is_aligned)
        if served or not computes_by_torch(q.device):
            key = problem.bucket, q.device, form.is_aligned, False, form.integers
            kernels = kernels_of(*key)
        run = partial(run_pages, kernels, form)
        return Plan(run, problem.head_dim_qk**-0.5, kernels=kernels, checks_fit=checks_fit)
    lengths = changes.kv_lengths
    if lengths is not None:
        check_kv_lengths(lengths)
        if lengths.is_meta:
            raise InvalidProblem("kv_lengths must hold values, got a tensor on the meta device")
    if (rewritten := _rewritten(q, k, v, changes)) is not None:
        run, default = rewritten
        return Plan(partial(_laid_out, run), default, rewrites=True)
    problem = problem_of(q, k, v, changes)
    scale = problem.head_dim_qk**-0.5
    integers: tuple[torch.dtype, ...] = ()
    if lengths is not None and are_readable(lengths, problem.batch, q.device):
        integers = (lengths.dtype,)
    aligned = all(map(is_aligned, (q, k, v)))
    served = _is_served(problem, "forward", q.device, aligned)
    if not served and computes_by_torch(q.device):
        return Plan(partial(_laid_out, torch_run), scale, checks_fit=checks_fit)
    if problem.invariant and problem.mask.apart == "pairs":
        raise Unsupported(
            f"mask {problem.mask} packs documents, whose last bits would depend on the documents "
            f"before them: unset {BATCH_INVARIANT}, or call tilegen.attention_varlen under "
            "torch.no_grad(), neither traced nor with dropout, which begins tiles at each document"
        )
    if q.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"q must be on a CUDA or CPU device, got {q.device}")
    run, kernels = _kernel_run(problem, integers, q, k, v)
    if served and not _is_served(problem, "backward", q.device, aligned):
        return Plan(partial(_without_gradients, run), scale, checks_fit=checks_fit)
    return Plan(run, scale, kernels=kernels, checks_fit=checks_fit)


def _is_served(
    problem: AttentionProblem, direction: Direction, device: torch.device, aligned: bool
) -> bool:
    """Check whether a bundle has a pass for this machine's processor."""
    if not bundles.loaded or not cpu.runs_compiled(device) or current().cpu == "torch":
        return False
    if direction == "backward":
        problem = replace(problem, latent=False)
    served = (bundle.find(problem, None, direction, aligned=aligned) for bundle in bundles.loaded)
    return any(served)


def _without_gradients(
    run: Run,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    changes: Changes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) by a bundle that has no backward. Calls that need gradients run in PyTorch
    if no backward can be compiled."""
    trains = autograd.needs_gradients(q, k, v, changes.score)
    by_torch = trains and computes_by_torch(q.device)
    run = partial(_laid_out, torch_run) if by_torch else run
    return run(q, k, v, scale, changes)


def kernels_of(*key: Any) -> Kernels:
    """Return the kernels of a problem under the current settings, made once."""
    return plans.by_problem.get((*key, current()), lambda: Kernels(*key))


def _kernel_run(
    problem: AttentionProblem, integers: tuple[torch.dtype, ...], *tensors: torch.Tensor
) -> tuple[Run, Kernels | None]:
    """Return a function that runs a problem with emitted kernels, copying tensors that kernels
    cannot address. Also returns the kernels, or None if tensors are copied."""
    tiles = -(-max(problem.seqlen_q, problem.seqlen_kv) // min(BLOCK_SIZES))
    if problem.batch * problem.num_heads_q * tiles > MAX_PROGRAMS:
        raise Unsupported(
            f"batch * heads * tiles must be at most {MAX_PROGRAMS}, got {problem.batch} * "
            f"{problem.num_heads_q} * {tiles}; split the batch"
        )
    copied = [not addressable(tensor) for tensor in tensors]
    if any(copied):
        names = ", ".join(name for name, copy in zip("qkv", copied, strict=True) if copy)
        say_once(
            f"{names}: copied on every call, since kernels need a dense last dimension; "
            "pass a contiguous tensor"
        )
        problem = replace(problem, latent=False)  # the copies of k and v share no memory
    tensors = tuple(t.contiguous() if copy else t for t, copy in zip(tensors, copied, strict=True))
    aligned = all(map(is_aligned, tensors))
    describable = aligned and all(map(is_describable, tensors))
    key = problem.bucket, tensors[0].device, aligned, describable, integers
    kernels = kernels_of(*key)
    if not any(copied):
        return partial(autograd.run, kernels), kernels

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, changes: Changes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (t.contiguous() if copy else t for t, copy in zip((q, k, v), copied, strict=True))
        return autograd.run(kernels, q, k, v, scale, changes)

    return partial(_laid_out, run), None
