"""Run a pass with PyTorch's own attention kernels: cuDNN, FlashAttention, memory-efficient.

The operators used are those that return lse. A library computes only passes without score and
dropout, with a full mask, or a causal mask and as many queries as keys. For these `is_causal` means
the same in all libraries.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from tilegen.choose.choice import Choice
from tilegen.disk import log, say_once
from tilegen.kernels.layout import laid_like
from tilegen.kernels.spec import Backend
from tilegen.launch.changes import Gradients, Wanted
from tilegen.tuning.measure import one_line

Tensors = tuple[torch.Tensor, ...]
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Takes q, k, v, whether the mask is causal, and the scale; returns out and lse."""
Backward = Callable[..., Tensors]
"""Takes dout, q, k, v, out, lse, whether the mask is causal, and the scale; returns dq, dk and
dv."""

EFFICIENT_LSE = 32
"""The memory-efficient kernels pad lse to a multiple of this many rows."""


@dataclass(frozen=True)
class Operators:
    """The operators of one back end."""

    forward: Forward
    backward: Backward


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = op(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(dout: torch.Tensor, *saved: Any) -> Tensors:
    q, k, v, out, lse, causal, scale = saved
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    seed = _unused(q)
    lengths = None, None, q.shape[2], k.shape[2]
    return op(dout, q, k, v, out, lse, *lengths, 0.0, causal, seed, seed, scale=scale)


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = op(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.view(q.shape[:3])


def _cudnn_backward(dout: torch.Tensor, *saved: Any) -> Tensors:
    q, k, v, out, lse, causal, scale = saved
    op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    seed = _unused(q)
    lengths = None, None, q.shape[2], k.shape[2]
    given = (dout, q, k, v, out, lse.unsqueeze(-1), seed, seed, None)
    return op(*given, *lengths, 0.0, causal, scale=scale)


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = op(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[:, :, : q.shape[2]].contiguous()


def _efficient_backward(dout: torch.Tensor, *saved: Any) -> Tensors:
    q, k, v, out, lse, causal, scale = saved
    op = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    seed = _unused(q)
    lse = pad(lse, (0, -lse.shape[2] % EFFICIENT_LSE), value=float("inf"))
    wanted = [True, True, True, False]
    given = (dout, q, k, v, None, out, lse, seed, seed, 0.0, wanted, causal)
    dq, dk, dv, _ = op(*given, scale=scale)
    return dq, dk, dv


def _unused(like: torch.Tensor) -> torch.Tensor:
    """Return a seed for operators that need one although there is no dropout."""
    return torch.empty((), dtype=torch.int64, device=like.device)


OPERATORS: dict[Backend, Operators] = {
    "cudnn": Operators(_cudnn, _cudnn_backward),
    "flash": Operators(_flash, _flash_backward),
    "efficient": Operators(_efficient, _efficient_backward),
}

_inside = threading.local()
"""True if this thread is inside a library's operator. `tilegen.activate` may have overridden that
operator, which must not come back here."""


class Library:
    """A library that computes a pass. Methods return None if a call means something else to the
    library, or after the library has raised an error: then tilegen's kernels compute."""

    def __init__(self, backend: Backend, *, causal: bool) -> None:
        self.backend: Backend = backend
        self._causal = causal
        self._refused = False

    @classmethod
    def of(cls, choice: Choice) -> Library | None:
        """Return the library of a chosen kernel's pass; None if there is none."""
        if choice.library is None:
            return None
        task = choice.ranked.task
        log.info("%s of '%s': library %s", task.direction, task.problem, choice.library)
        return cls(choice.library, causal=task.problem.mask.is_causal)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Compute (out, lse) with the strides that tilegen's kernels give."""
        results = self._run(OPERATORS[self.backend].forward, (), (q, k, v), (), scale)
        return None if results is None else (laid_like(results[0], q), results[1].contiguous())

    def backward(
        self, saved: Tensors, dout: torch.Tensor, scale: float, wanted: Wanted
    ) -> Gradients | None:
        """Compute the gradients; `saved` are q, k, v, out and lse."""
        q, k, v, out, lse = saved
        grads = self._run(OPERATORS[self.backend].backward, (dout,), (q, k, v), (out, lse), scale)
        if grads is None:
            return None
        dq, dk, dv = (laid_like(grad, like) for grad, like in zip(grads, (q, k, v), strict=True))
        both = (dk, dv) if wanted.dkdv else (None, None)
        return Gradients(dq if wanted.dq else None, *both, None, {})

    def _run(
        self, operator: Callable[..., Tensors], first: Tensors, qkv: Tensors, last: Tensors,
        scale: float,
    ) -> Tensors | None:  # fmt: skip
        rows, columns = qkv[0].shape[2], qkv[1].shape[2]
        if (
            self._refused
            or getattr(_inside, "active", False)
            or (self._causal and rows != columns)
            or not scale > 0
            or torch.are_deterministic_algorithms_enabled()
        ):
            return None
        _inside.active = True
        try:
            return operator(*first, *qkv, *last, self._causal, scale)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:  # unsupported length or layout, another schema
            self._refused = True
            say_once(f"{self.backend} failed; using tilegen's kernels: {one_line(error)}")
            return None
        finally:
            _inside.active = False
