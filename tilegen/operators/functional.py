"""`attention` as a torch.autograd.Function, for the transforms of torch.func: these cannot use the
gradients that an operator registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from tilegen.launch.derivatives import refuse_forward_mode, refuse_second
from tilegen.operators.library import by_place, mapped

Call = tuple[str, float, float, bool]
"""The arguments of a call that are not tensors: text of the crossing, scale, dropout_p, and whether
dropout is on."""


class Attention(torch.autograd.Function):
    """The operators as one function. Arguments: a `Call`, then all tensors."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *rest: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.tilegen.forward(q, k, v, *_as_operator(call, rest))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the tensors for the backward."""
        ctx.call, *given = inputs
        ctx.save_for_backward(*given, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[Any, ...]:
        q, k, v, *rest, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        grads = _Gradients.apply(ctx.call, q, k, v, out, lse, dout, dlse, *rest)
        return None, *grads[:3], *by_place(ctx.call[0], grads[3:], len(rest))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        """Refuse forward mode."""
        refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Any, *given: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Call the function for each entry of the mapped dimension."""
        return mapped(lambda *entry: Attention.apply(call, *entry), info, in_dims[1:], given)


class _Gradients(torch.autograd.Function):
    """The gradients of a call, which cannot be differentiated again."""

    @staticmethod
    def forward(call: Call, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(torch.ops.tilegen.backward(*given[:7], *_as_operator(call, given[7:])))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        refuse_second()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        """Refuse forward mode."""
        refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Any, *given: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute the gradients for each entry of the mapped dimension."""
        return mapped(lambda *entry: _Gradients.apply(call, *entry), info, in_dims[1:], given)


def _as_operator(call: Call, rest: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return the arguments of an operator after q, k, v and gradients. `rest` holds the tensors of
    a crossing, then the state of dropout if it is on."""
    text, scale, dropout_p, drops = call
    tensors, state = list(rest[: len(rest) - drops]), rest[-1] if drops else None
    return text, tensors, scale, dropout_p, state
