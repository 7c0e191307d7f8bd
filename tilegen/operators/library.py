"""`tilegen::forward` and `tilegen::backward`, and what PyTorch asks of an operator: shapes without
data, gradients, a rule for vmap, and how many operations it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.utils.flop_counter import register_flop_formula

from tilegen.kernels.layout import empty_like, laid_like, public_lse
from tilegen.launch.autograd import gradients
from tilegen.launch.changes import Changes, Wanted
from tilegen.launch.kernels import Kernels
from tilegen.masks.dropout import Dropout
from tilegen.operators.rebuilding import rebuilt, trained_places
from tilegen.runtime.dispatch import plan_of, planned


@torch.library.custom_op("tilegen::forward", mutates_args=())
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    changes: str,
    tensors: list[torch.Tensor],
    scale: float,
    dropout_p: float,
    dropout_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of `attention`, lse (batch, heads, 2, seqlen_q) where there is a score: see
    `public_lse`; `changes` and `tensors` are a crossing."""
    its, _ = rebuilt(changes, tensors, (), _lengths(q, k), _dropout(dropout_p, dropout_state))
    with torch.no_grad():
        out, lse = planned(q, k, v, its, scale)
    if _has_score(changes) and lse.dim() == 3:
        lse = torch.stack([lse, torch.zeros_like(lse)], 2)
    return _as_promised(out, q), lse.contiguous()


@forward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, changes: str, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows = q.shape[:3]
    pair = (2,) if _has_score(changes) else ()
    return empty_like(q, v.shape[3]), q.new_empty((batch, heads, *pair, rows), dtype=torch.float32)


@torch.library.custom_op("tilegen::backward", mutates_args=())
def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    changes: str,
    tensors: list[torch.Tensor],
    scale: float,
    dropout_p: float,
    dropout_state: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Return dq, dk, dv, and the gradients of the tensors that the crossing says are trained."""
    dropout, trained = _dropout(dropout_p, dropout_state), trained_places(changes)
    its, read = rebuilt(changes, tensors, trained, _lengths(q, k), dropout)
    given = [q, k, v, *(read[i] for i in trained)]
    found = differentiated(given, (out, lse), dout, dlse, its, scale)
    return [
        _as_promised(torch.zeros_like(one) if grad is None else grad, one if i < 3 else None)
        for i, (one, grad) in enumerate(zip(given, found, strict=True))
    ]


@backward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    changes, tensors = rest[4], rest[5]
    return [
        *(empty_like(one, one.shape[3]) for one in (q, k, v)),
        *(
            torch.empty_like(tensors[i], memory_format=torch.contiguous_format)
            for i in trained_places(changes)
        ),
    ]


def differentiated(
    given: Sequence[torch.Tensor],
    results: tuple[torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    changes: Changes,
    scale: float,
) -> list[torch.Tensor | None]:
    """Return the gradients of what is given: q, k, v, and trained tensors of a score; `results` are
    out and lse."""
    with torch.enable_grad():
        plan = plan_of(given[0], given[1], given[2], changes)
    if plan.kernels is None or scale < 0:
        return _computed_again(given, dout, dlse, changes, scale)
    with torch.no_grad():
        return _by_kernels(plan.kernels, given, results, dout, dlse, changes, scale)


def _by_kernels(
    kernels: Kernels,
    given: Sequence[torch.Tensor],
    results: tuple[torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    changes: Changes,
    scale: float,
) -> list[torch.Tensor | None]:
    wanted = Wanted(
        dq=True,
        dkdv=True,
        sinks=any(one is changes.sinks for one in given),
        captured=tuple(slot for slot, one in enumerate(changes.captured) if one.requires_grad),
    )
    out, lse = results
    lse = lse if kernels.problem.pair_lse else public_lse(lse).contiguous()
    its = gradients(
        kernels, (*given[:3], out, lse), dout, dlse, scale, changes.on(given[0].device), wanted
    )
    found: list[torch.Tensor | None] = [its.dq, its.dk, its.dv]
    for one in given[3:]:
        parts = [its.captured.get(i) for i, read in enumerate(changes.captured) if read is one]
        parts += [its.sinks] * (one is changes.sinks)
        parts = [part.to(one.device) for part in parts if part is not None]
        found.append(sum(parts[1:], parts[0]) if parts else None)
    return found


def _computed_again(
    given: Sequence[torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    changes: Changes,
    scale: float,
) -> list[torch.Tensor | None]:
    """Return the gradients of a call that is brought into another form, by autograd."""
    with torch.inference_mode(False), torch.enable_grad():  # autograd is excluded in an operator
        q, k, v = (one.detach().requires_grad_() for one in given[:3])
        out, lse = planned(q, k, v, changes, scale)
        results, grads = [out], [dout]
        if dlse is not None:
            results, grads = [out, public_lse(lse)], [dout, public_lse(dlse)]
        return list(torch.autograd.grad(results, [q, k, v, *given[3:]], grads, allow_unused=True))


def _has_score(changes: str) -> bool:
    """True where a crossing has a score: then the operators' lse is in pairs, whatever computes."""
    return '"score":' in changes


def _lengths(q: torch.Tensor, k: torch.Tensor) -> tuple[int, int]:
    return q.shape[2], k.shape[2]


def _dropout(p: float, state: torch.Tensor | None) -> Dropout | None:
    return None if state is None else Dropout(p, state)


def _as_promised(found: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """Return a result with the strides that were promised for it: as q, k or v lie, or dense."""
    return found.contiguous() if like is None else laid_like(found, like)


# --------------------------------------------------------------------------------------------------
# Gradients of the operator itself, for graphs


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, changes, tensors, scale, dropout_p, state = inputs
    ctx.call = changes, scale, dropout_p, state is not None
    ctx.save_for_backward(q, k, v, *output, *([] if state is None else [state]), *tensors)
    ctx.set_materialize_grads(False)


def _give(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    changes, scale, dropout_p, drops = ctx.call
    q, k, v, out, lse, *rest = ctx.saved_tensors
    state, tensors = rest[0] if drops else None, list(rest[drops:])
    found = torch.ops.tilegen.backward(
        *(q, k, v, out, lse, torch.zeros_like(out) if dout is None else dout, dlse),
        *(changes, tensors, scale, dropout_p, state),
    )
    of_tensors = by_place(changes, found[3:], len(tensors))
    return *found[:3], None, of_tensors, None, None, None


def by_place(
    changes: str, gradients: Sequence[torch.Tensor], count: int
) -> list[torch.Tensor | None]:
    """Return the gradients of the `count` tensors of a crossing, of which some are trained."""
    found: list[torch.Tensor | None] = [None] * count
    for i, one in zip(trained_places(changes), gradients, strict=True):
        found[i] = one
    return found


forward.register_autograd(_give, setup_context=_keep)


# --------------------------------------------------------------------------------------------------
# vmap


def mapped(run: Callable[..., Any], info: Any, in_dims: Any, given: Any) -> tuple[Any, Any]:
    """Return the results of calls, one for each entry of the mapped dimension, and where it is in
    them: masks and scores may read the batch, so that entries cannot become more of it."""

    def entry(dims: Any, value: Any, i: int) -> Any:
        if isinstance(dims, list | tuple):
            return [entry(*one, i) for one in zip(cast("Any", dims), value, strict=True)]
        return value if dims is None else value.select(dims, i)

    each = [
        run(*(entry(*one, i) for one in zip(in_dims, given, strict=True)))
        for i in range(info.batch_size)
    ]
    results = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    return results, (0,) * len(results)


@forward.register_vmap
def _(info: Any, in_dims: Any, *given: Any) -> tuple[Any, Any]:
    return mapped(torch.ops.tilegen.forward, info, in_dims, given)


@backward.register_vmap
def _(info: Any, in_dims: Any, *given: Any) -> tuple[Any, Any]:
    results, dims = mapped(torch.ops.tilegen.backward, info, in_dims, given)
    return list(results), list(dims)


# --------------------------------------------------------------------------------------------------
# Operations done, as PyTorch counts those of its own attention: of all pairs, whatever the mask


@register_flop_formula(torch.ops.tilegen.forward)
def _operations(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    batch, heads, rows, width = q
    return 2 * batch * heads * rows * k[2] * (width + v[3])


@register_flop_formula(torch.ops.tilegen.backward)
def _operations_backward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    batch, heads, rows, width = q
    return 2 * batch * heads * rows * k[2] * (3 * width + 2 * v[3])
