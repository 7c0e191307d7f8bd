"""Run forward and backward of a call with chosen kernels as one differentiable step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from tilegen import cpu
from tilegen.disk import say_once
from tilegen.emit.identity import is_aligned
from tilegen.environment import current, using
from tilegen.errors import Unsupported
from tilegen.kernels.descriptors import is_describable
from tilegen.kernels.layout import MAX_ROW_STRIDE, empty_like
from tilegen.launch.changes import Changes, Gradients, Wanted
from tilegen.launch.derivatives import refuse_second, refuse_tangents
from tilegen.masks.form import Shape
from tilegen.masks.score import Score
from tilegen.masks.tensors import tensors_of
from tilegen.private_torch import Function

if TYPE_CHECKING:
    from tilegen.launch.kernels import Kernels


NO_BACKWARD = "attention over pages has no backward: call it under torch.no_grad(), or detach"


def run(
    kernels: Kernels,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    changes: Changes,
    laid: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse), differentiable if any input needs a gradient. See `Kernels.forward` for
    `laid`."""
    read: tuple[torch.Tensor | None, ...] = ()  # tensors of the score
    if changes.score is not None:
        changes = changes.on(q.device)
        read = (changes.sinks, *changes.captured)
    refuse_tangents(q, k, v, *read)
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (read and any(x is not None and x.requires_grad for x in read))
    ):
        return _Attention.apply(q, k, v, (scale, changes, kernels, laid), *read)  # type: ignore
    return kernels.forward(q, k, v, scale, changes, None, laid)


class _Attention(Function):
    """Attention by kernels. The forward saves out and lse; the backward has no atomics, except on a
    GPU for the gradients of tensors that a score reads."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: tuple[float, Changes, Kernels, Any],
        *_: torch.Tensor | None,  # sinks and captured tensors: autograd must see them as inputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale, changes, kernels, laid = ctx.call = call  # one argument: autograd inspects each
        out, lse = kernels.forward(q, k, v, scale, changes, None, laid)
        read: list[torch.Tensor] = []
        if changes.given.tables or changes.kv_lengths is not None or changes.score is not None:
            # Saved for autograd to raise if they are changed in place before the backward.
            sinks = () if changes.sinks is None else (changes.sinks,)
            read = [
                x for x in (*changes.sources, *changes.captured, *sinks) if not x.is_inference()
            ]
        ctx.save_for_backward(q, k, v, out, lse, *read)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[Any, ...]:
        kernels: Kernels = ctx.call[2]
        if kernels.settings is not current():  # in another thread, or after a `with` block
            with using(kernels.settings):
                return _Attention.backward(ctx, dout, dlse)
        # Only under create_graph is a node needed that rejects second derivatives.
        if torch.is_grad_enabled():
            return _Gradients.apply(ctx, dout, dlse, *ctx.saved_tensors)  # type: ignore
        return _backward(ctx, dout, dlse)


class _Gradients(Function):
    """The gradients of a call as a node that rejects second derivatives.

    All tensors that the gradients depend on are inputs. `once_differentiable` would reject only
    derivatives by dout and dlse.
    """

    @staticmethod
    def forward(
        ctx: Any, of: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: torch.Tensor
    ) -> tuple[Any, ...]:
        return _backward(of, dout, dlse)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second()


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    """Compute the gradients of `_Attention.backward`."""
    refuse_tangents(dout, dlse)
    scale, changes, kernels, _ = cast("tuple[float, Changes, Kernels, Any]", ctx.call)
    needs, saved = ctx.needs_input_grad, ctx.saved_tensors[:5]
    wanted = Wanted(needs[0], needs[1] or needs[2])
    if changes.score is not None:
        wanted.sinks = needs[4]
        wanted.captured = tuple(slot for slot, need in enumerate(needs[5:]) if need)
    grads = gradients(kernels, saved, dout, dlse, scale, changes, wanted)
    if changes.score is None:
        return grads.dq, grads.dk, grads.dv, None
    captured = (grads.captured.get(slot) for slot, _ in enumerate(changes.captured))
    return grads.dq, grads.dk, grads.dv, None, grads.sinks, *captured


def gradients(
    kernels: Kernels,
    saved: tuple[torch.Tensor, ...],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    scale: float,
    changes: Changes,
    wanted: Wanted,
) -> Gradients:
    """Compute the gradients of a call with its kernels; `saved` are q, k, v, out and lse."""
    dout = torch.zeros_like(saved[3]) if dout is None else dout
    if (
        not addressable(dout)
        or (kernels.aligned and not is_aligned(dout))
        or (kernels.describable and not is_describable(dout))
    ):
        # `contiguous` would return a dense tensor at an odd address as it is.
        dout = dout.clone(memory_format=torch.contiguous_format)
    grads = kernels.backward(saved, dout, dlse, scale, changes, wanted)
    for slot, grad in grads.captured.items():
        grads.captured[slot] = grad.to(changes.captured[slot].dtype)
    return grads


def refuse_gradients(q: Any, k: Any, v: Any, score: Score | None) -> None:
    """Raise Unsupported if any input of a call over pages needs a gradient or has a tangent."""
    refuse_tangents(q, k, v, *(() if score is None else (*score.captured, score.sink_logits)))
    if needs_gradients(q, k, v, score):
        raise Unsupported(NO_BACKWARD)


def needs_gradients(q: Any, k: Any, v: Any, score: Score | None) -> bool:
    """Check whether any tensor that a call reads needs a gradient."""
    if not torch.is_grad_enabled():
        return False
    if score is None:
        return q.requires_grad or k.requires_grad or v.requires_grad
    read = (*score.captured, score.sink_logits)
    return any(x is not None and x.requires_grad for x in (q, k, v, *read))


def without_pairs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, changes: Changes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) of a call without queries or without keys: out and gradients are 0."""
    read = (q, k, v, *changes.captured, changes.sinks)
    refuse_tangents(*read)
    out = empty_like(q, v.shape[3]).zero_()
    lse = empty_lse(changes.sinks, q.device).expand(q.shape[:3])
    return reaching(out, lse, [x for x in read if x is not None])


def empty_lse(sinks: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return lse of rows without kept keys, (heads or 1, 1): the logits of sinks, or -inf."""
    if sinks is None:
        return torch.full((1, 1), float("-inf"), device=device)
    return sinks.to(device, torch.float32)[:, None]


def reaching(
    out: torch.Tensor, lse: torch.Tensor, read: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attach gradients of 0 for tensors that a call reads but that do not affect the output."""
    unused = [tensor for tensor in read if tensor.requires_grad]
    if not unused or not torch.is_grad_enabled():
        return out, lse
    return _Reaching.apply(out, lse, *unused)  # type: ignore


class _Reaching(torch.autograd.Function):
    """Pass out and lse on, and give all other inputs gradients of 0, as PyTorch does for
    `0 * bias[q]`."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, lse: torch.Tensor, *unused: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.unused = [(tensor.shape, tensor.dtype, tensor.device) for tensor in unused]
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[Any, ...]:
        zeros = (
            torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.unused
        )
        return dout, dlse, *zeros


def computes_by_torch(device: torch.device) -> bool:
    """Check whether PyTorch computes the calls of a device, and log once why.

    It does on a CPU for which kernels cannot be compiled, or if TILEGEN_CPU=torch is set.
    """
    if device.type != "cpu" or cpu.serves_calls():
        return False
    say_once(f"CPU tensors: computing with PyTorch, since {cpu.why_not()}")
    return True


def torch_run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, changes: Changes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) with PyTorch in fp32, the precision of the kernels' accumulators."""
    from tilegen.check.reference import attention_reference

    mask, score = changes.mask, changes.score
    tensors_of(mask, Shape.of(q, k), q.device)  # for its checks of sizes
    out, lse = attention_reference(
        *(x.float() for x in (q, k, v)),
        mask=mask,
        score=score,
        scale=scale,
        dropout=changes.dropout,
    )
    return out.to(q.dtype), lse


def addressable(tensor: torch.Tensor) -> bool:
    """Check whether kernels can address a tensor (batch, heads, seqlen, head_dim) without a
    copy."""
    *_, row, dense = tensor.stride()
    return (dense == 1 or tensor.shape[3] == 1) and row < MAX_ROW_STRIDE
