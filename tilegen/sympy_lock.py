"""The lock of a process for symbolic work. SymPy is not thread-safe, so only one thread at a time
traces, proposes or renders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import RLock
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

lock = RLock()
"""Held for symbolic work, never while a kernel is compiled, run or timed."""


def one_at_a_time(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to hold the lock while it runs."""

    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return function(*args, **kwargs)

    return locked


@contextmanager
def tracing() -> Generator[None]:
    """Hold the lock, and let an `autograd.Function` mark traced values as non-differentiable.

    PyTorch allows such marks for tensors only. A trace ignores marks, since it differentiates by
    itself. Marks of tensors still work, as other threads may set them meanwhile.
    """
    import torch
    from torch.autograd.function import FunctionCtx

    with lock:
        original = FunctionCtx.mark_non_differentiable

        def mark(self: Any, *marked: Any) -> None:
            original(self, *(value for value in marked if isinstance(value, torch.Tensor)))

        FunctionCtx.mark_non_differentiable = mark
        try:
            yield
        finally:
            FunctionCtx.mark_non_differentiable = original
