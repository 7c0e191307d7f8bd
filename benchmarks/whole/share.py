"""Measure the part of a model's step that attention takes, forward and backward."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Watch:
    """Sums times between `start` and `stop`: events on a GPU, else the clock."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note the time: a start, then a stop, and so on."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> float:
        """Return the sum of all times between a start and the stop after it."""
        starts, stops = self._marks[::2], self._marks[1::2]
        if self._on_gpu:
            torch.cuda.synchronize()
            times = [1e-3 * a.elapsed_time(b) for a, b in zip(starts, stops, strict=True)]
        else:
            times = [b - a for a, b in zip(starts, stops, strict=True)]
        return sum(times)


class _Inputs(torch.autograd.Function):
    """Pass q, k and v on. The backward runs when all three gradients are there."""

    @staticmethod
    def forward(ctx: Any, watch: Watch, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.watch = watch
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.watch.mark()
        return None, *gradients


class _Output(torch.autograd.Function):
    """Pass out on. Autograd runs the latest nodes first: what follows in the backward, up to that
    of `_Inputs`, is attention alone."""

    @staticmethod
    def forward(ctx: Any, watch: Watch, out: torch.Tensor) -> torch.Tensor:
        ctx.watch = watch
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.watch.mark()
        return None, gradient


@contextmanager
def watched(attention: str, device: str) -> Iterator[Watch]:
    """Time the calls of an attention implementation of transformers within a `with` block."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    watch = Watch(device)
    known = ALL_ATTENTION_FUNCTIONS.get(attention)

    def timed(module: Any, q: Any, k: Any, v: Any, *given: Any, **named: Any) -> Any:
        compute = known or sys.modules[type(module).__module__].eager_attention_forward
        if torch.is_grad_enabled():
            q, k, v = _Inputs.apply(watch, q, k, v)  # type: ignore
        watch.mark()
        out, weights = compute(module, q, k, v, *given, **named)
        watch.mark()
        if torch.is_grad_enabled():
            out = _Output.apply(watch, out)
        return out, weights

    ALL_ATTENTION_FUNCTIONS[attention] = timed  # before the global entry, in this process
    try:
        yield watch
    finally:
        del ALL_ATTENTION_FUNCTIONS[attention]
