"""Run of a call whose kernels are known: forward and backward as one differentiable step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from tilegen import cpu
from tilegen.disk import say_once
from tilegen.emit.identity import is_aligned
from tilegen.kernels.descriptors import is_describable
from tilegen.launch.changes import Changes, Gradients, Wanted
from tilegen.launch.derivatives import refuse_second, refuse_tangents
from tilegen.launch.launch_text import MAX_ROW_STRIDE
from tilegen.masks.score import Score
from tilegen.masks.shapes import Shape
from tilegen.masks.tensors import tensors_of

if TYPE_CHECKING:
    from tilegen.launch.kernels import Kernels


def run(
    kernels: Kernels,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    changes: Changes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse), differentiable where anything needs a gradient."""
    read: tuple[torch.Tensor | None, ...] = ()  # by a score
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
        return _Attention.apply(q, k, v, (scale, changes, kernels), *read)  # type: ignore
    return kernels.forward(q, k, v, scale, changes)


# `Function` without what transforms of torch.func need: their tensors have no addresses and are
# refused before. PyTorch does not document it; it takes a quarter less time, and where it is
# missing, `Function` does the same.
_Function: Any = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)


class _Attention(_Function):
    """Attention by kernels, as autograd knows it: the forward keeps out and lse, the backward has
    no atomics, but on a GPU for tensors that a score reads."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: tuple[float, Changes, Kernels],
        *_: torch.Tensor | None,  # sinks and captured tensors, for autograd to see
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale, changes, kernels = ctx.call = call  # one argument, since autograd looks at each
        out, lse = kernels.forward(q, k, v, scale, changes)
        read: list[torch.Tensor] = []
        if changes.given.values or changes.kv_lengths is not None or changes.score is not None:
            # What mask and score read is saved too, for autograd to refuse what has changed since.
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
        # What refuses a second derivative is needed only where one can be asked for.
        if torch.is_grad_enabled():
            return _Gradients.apply(ctx, dout, dlse, *ctx.saved_tensors)  # type: ignore
        return _backward(ctx, dout, dlse)


class _Gradients(_Function):
    """The gradients of a call, which hang on all that they are computed from, and have none of
    their own: `once_differentiable` would see the cotangents alone."""

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
    scale, changes, kernels = cast("tuple[float, Changes, Kernels]", ctx.call)
    needs, saved = ctx.needs_input_grad, ctx.saved_tensors[:5]
    wanted = Wanted(needs[0], needs[1] or needs[2])
    if changes.score is not None:
        wanted.sinks = needs[4]
        wanted.captured = tuple(slot for slot, need in enumerate(needs[5:]) if need)
    found = gradients(kernels, saved, dout, dlse, scale, changes, wanted)
    if changes.score is None:
        return found.dq, found.dk, found.dv, None
    captured = (found.captured.get(slot) for slot, _ in enumerate(changes.captured))
    return found.dq, found.dk, found.dv, None, found.sinks, *captured


def gradients(
    kernels: Kernels,
    saved: tuple[torch.Tensor, ...],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    scale: float,
    changes: Changes,
    wanted: Wanted,
) -> Gradients:
    """Return the gradients of a call by its kernels; `saved` are q, k, v, out and lse."""
    dout = torch.zeros_like(saved[3]) if dout is None else dout
    if (
        not addressable(dout)
        or (kernels.aligned and not is_aligned(dout))
        or (kernels.describable and not is_describable(dout))
    ):
        # A clone, since `contiguous` leaves a dense tensor at an odd address where it is.
        dout = dout.clone(memory_format=torch.contiguous_format)
    found = kernels.backward(saved, dout, dlse, scale, changes, wanted)
    for slot, one in found.captured.items():
        found.captured[slot] = one.to(changes.captured[slot].dtype)
    return found


def reaching(
    out: torch.Tensor, lse: torch.Tensor, score: Score
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse, from which gradients of 0 reach what the score reads in vain."""
    unused = [one for one in score.unused if one.requires_grad]
    if not unused or not torch.is_grad_enabled():
        return out, lse
    return _Reaching.apply(out, lse, *unused)  # type: ignore


class _Reaching(torch.autograd.Function):
    """A function that passes out and lse on, and gives gradients of 0 to all else, as PyTorch does
    for `0 * bias[q]`."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, lse: torch.Tensor, *unused: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.unused = [(one.shape, one.dtype, one.device) for one in unused]
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
    """Return True where PyTorch computes calls on a device: on a CPU where kernels cannot be
    compiled, or TILEGEN_CPU=torch is set. The reason is logged once."""
    if device.type != "cpu" or cpu.serves_calls():
        return False
    say_once(f"CPU tensors: computing with PyTorch, since {cpu.why_not()}")
    return True


def torch_run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, changes: Changes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) as PyTorch computes them, in fp32 as the kernels' accumulators are."""
    from tilegen.check.reference import attention_reference

    mask, score = changes.mask, changes.score
    tensors_of(mask, Shape.of(q, k), q.device)  # which checks their sizes
    out, lse = attention_reference(
        *(x.float() for x in (q, k, v)),
        mask=mask,
        score=score,
        scale=scale,
        dropout=changes.dropout,
    )
    return out.to(q.dtype), lse


def addressable(tensor: torch.Tensor) -> bool:
    """Whether kernels can address a tensor (batch, heads, seqlen, head_dim) as it is."""
    *_, row, dense = tensor.stride()
    return (dense == 1 or tensor.shape[3] == 1) and row < MAX_ROW_STRIDE
