"""Register `tilegen::forward` and `tilegen::backward` with PyTorch: shapes for tracing, gradients,
a rule for vmap, and counts of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.utils.flop_counter import register_flop_formula

from tilegen.environment import Settings, chosen, current, of_environment, using
from tilegen.kernels.layout import empty_like, laid_like, public_lse
from tilegen.launch.autograd import gradients
from tilegen.launch.changes import Changes, Pages, Wanted
from tilegen.launch.derivatives import refuse_tangents
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
    """Compute (out, lse) of `attention`; `changes` and `tensors` are a crossing.

    With a score, lse is (batch, heads, 2, seqlen_q): see `public_lse`.
    """
    dropout = _dropout(dropout_p, dropout_state)
    out, lse = computed(q, k, v, changes, tensors, _lengths(q, k), scale, dropout=dropout)
    if _has_score(changes) and lse.dim() == 3:
        lse = torch.stack([lse, torch.zeros_like(lse)], 2)
    return _as_promised(out, q), noted(lse.contiguous())


def computed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    changes: str,
    tensors: list[torch.Tensor],
    lengths: tuple[int, int],
    scale: float,
    *,
    dropout: Dropout | None = None,
    pages: Pages | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) of a call by its plan; `changes` and `tensors` are a crossing, `lengths`
    bound queries and keys."""
    refuse_tangents(q, k, v, *tensors)  # which a compiled graph passes on
    decoded, _ = rebuilt(changes, tensors, (), lengths, dropout, pages)
    with torch.no_grad():
        return planned(q, k, v, decoded, scale)


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
    """Compute dq, dk, dv, and the gradients of the trained tensors of the crossing."""
    dropout, trained = _dropout(dropout_p, dropout_state), trained_places(changes)
    decoded, read = rebuilt(changes, tensors, trained, _lengths(q, k), dropout)
    inputs = [q, k, v, *(read[i] for i in trained)]
    grads = differentiated(inputs, (out, lse), dout, dlse, decoded, scale)
    return [
        _as_promised(torch.zeros_like(x) if grad is None else grad, x if i < 3 else None)
        for i, (x, grad) in enumerate(zip(inputs, grads, strict=True))
    ]


@backward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    changes, tensors = rest[4], rest[5]
    return [
        *(empty_like(x, x.shape[3]) for x in (q, k, v)),
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
    """Compute the gradients of the inputs `given`: q, k, v and trained tensors of a score.
    `results` are out and lse."""
    with using(_noted.get(_place(results[1])) or of_environment()):
        with torch.enable_grad():
            plan = plan_of(given[0], given[1], given[2], changes)
        if plan.kernels is None or scale < 0:
            return _computed_again(given, dout, dlse, changes, scale)
        with torch.no_grad():
            return _by_kernels(plan.kernels, given, results, dout, dlse, changes, scale)


def noted(lse: torch.Tensor) -> torch.Tensor:
    """Return the lse of a forward, whose settings are noted for the backward.

    A backward runs in another thread, or in a compiled graph after a `with` block. Of all that it
    gets from its forward, only tensors differ between two runs of a graph.
    """
    if chosen() or _noted:
        _noted.pop(_place(lse), None)  # of an earlier tensor at this address
    if chosen():
        if len(_noted) >= MAX_NOTED:
            _noted.clear()
        _noted[_place(lse)] = current()
    return lse


def _place(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.data_ptr()


MAX_NOTED = 1024
_noted: dict[tuple[torch.device, int], Settings] = {}
"""The settings of forwards that differ from those of the environment, by the place of lse."""


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
        sinks=any(tensor is changes.sinks for tensor in given),
        captured=tuple(slot for slot, x in enumerate(changes.captured) if x.requires_grad),
    )
    out, lse = results
    lse = lse if kernels.problem.pair_lse else public_lse(lse).contiguous()
    grads = gradients(
        kernels, (*given[:3], out, lse), dout, dlse, scale, changes.on(given[0].device), wanted
    )
    by_input: list[torch.Tensor | None] = [grads.dq, grads.dk, grads.dv]
    for tensor in given[3:]:  # a score may read a tensor in several slots: add their gradients
        parts = [grads.captured.get(i) for i, x in enumerate(changes.captured) if x is tensor]
        parts += [grads.sinks] * (tensor is changes.sinks)
        parts = [part.to(tensor.device) for part in parts if part is not None]
        by_input.append(sum(parts[1:], parts[0]) if parts else None)
    return by_input


def _computed_again(
    given: Sequence[torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    changes: Changes,
    scale: float,
) -> list[torch.Tensor | None]:
    """Compute gradients by autograd, running the forward again: for calls that a plan rewrites."""
    with torch.inference_mode(False), torch.enable_grad():  # off inside of an operator
        q, k, v = (x.detach().requires_grad_() for x in given[:3])
        out, lse = planned(q, k, v, changes, scale)
        results, grads = [out], [dout]
        if dlse is not None:
            results, grads = [out, public_lse(lse)], [dout, public_lse(dlse)]
        return list(torch.autograd.grad(results, [q, k, v, *given[3:]], grads, allow_unused=True))


def _has_score(changes: str) -> bool:
    """Check whether a crossing has a score. Then the operators' lse is in pairs, whatever kernel
    computes it."""
    return '"score":' in changes


def _lengths(q: torch.Tensor, k: torch.Tensor) -> tuple[int, int]:
    return q.shape[2], k.shape[2]


def _dropout(p: float, state: torch.Tensor | None) -> Dropout | None:
    return None if state is None else Dropout(p, state)


def _as_promised(result: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """Return a result with the strides that the fake operator promised: those of `like`, or
    dense."""
    return result.contiguous() if like is None else laid_like(result, like)


# --------------------------------------------------------------------------------------------------
# Gradients of the operator, for traced graphs


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, changes, tensors, scale, dropout_p, state = inputs
    ctx.call = changes, scale, dropout_p, state is not None
    ctx.save_for_backward(q, k, v, *output, *([] if state is None else [state]), *tensors)
    ctx.set_materialize_grads(False)


def _give(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    refuse_tangents(dout, dlse)
    changes, scale, dropout_p, drops = ctx.call
    q, k, v, out, lse, *rest = ctx.saved_tensors
    state, tensors = rest[0] if drops else None, list(rest[drops:])
    grads = torch.ops.tilegen.backward(
        *(q, k, v, out, lse, torch.zeros_like(out) if dout is None else dout, dlse),
        *(changes, tensors, scale, dropout_p, state),
    )
    of_tensors = by_place(changes, grads[3:], len(tensors))
    return *grads[:3], None, of_tensors, None, None, None


def by_place(
    changes: str, gradients: Sequence[torch.Tensor], count: int
) -> list[torch.Tensor | None]:
    """Return gradients for the `count` tensors of a crossing, None for tensors that are not
    trained. `gradients` are those of the trained tensors."""
    by_tensor: list[torch.Tensor | None] = [None] * count
    for i, grad in zip(trained_places(changes), gradients, strict=True):
        by_tensor[i] = grad
    return by_tensor


forward.register_autograd(_give, setup_context=_keep)


# --------------------------------------------------------------------------------------------------
# vmap


def mapped(run: Callable[..., Any], info: Any, in_dims: Any, given: Any) -> tuple[Any, Any]:
    """Run a call for each entry of the mapped dimension; return stacked results and the positions
    of that dimension in them.

    Entries cannot be folded into the batch, since masks and scores may read the batch index.
    """

    def entry(dims: Any, value: Any, i: int) -> Any:
        if isinstance(dims, list | tuple):
            return [entry(*pair, i) for pair in zip(cast("Any", dims), value, strict=True)]
        return value if dims is None else value.select(dims, i)

    by_entry = [
        run(*(entry(*pair, i) for pair in zip(in_dims, given, strict=True)))
        for i in range(info.batch_size)
    ]
    results = tuple(torch.stack(parts) for parts in zip(*by_entry, strict=True))
    return results, (0,) * len(results)


@forward.register_vmap
def _(info: Any, in_dims: Any, *given: Any) -> tuple[Any, Any]:
    return mapped(torch.ops.tilegen.forward, info, in_dims, given)


@backward.register_vmap
def _(info: Any, in_dims: Any, *given: Any) -> tuple[Any, Any]:
    results, dims = mapped(torch.ops.tilegen.backward, info, in_dims, given)
    return list(results), list(dims)


# --------------------------------------------------------------------------------------------------
# Operations, counted as for PyTorch's own attention: of all pairs, whatever the mask


@register_flop_formula(torch.ops.tilegen.forward)
def _operations(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    batch, heads, rows, width = q
    return 2 * batch * heads * rows * k[2] * (width + v[3])


@register_flop_formula(torch.ops.tilegen.backward)
def _operations_backward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    batch, heads, rows, width = q
    return 2 * batch * heads * rows * k[2] * (3 * width + 2 * v[3])
