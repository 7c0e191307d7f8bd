"""SymPy promises nothing to several threads: tracing, proposing and rendering are done by one at a
time, in the whole process."""

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
    """Return a function that holds the lock while it runs."""

    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return function(*args, **kwargs)

    return locked


@contextmanager
def tracing() -> Generator[None]:
    """Hold the lock, and let an `autograd.Function` mark traced values as it marks tensors.

    PyTorch refuses what is no tensor there; marks mean nothing to a trace, which takes the
    derivative itself. Marks of tensors, which other threads may set meanwhile, stay.
    """
    import torch
    from torch.autograd.function import FunctionCtx

    with lock:
        original = FunctionCtx.mark_non_differentiable

        def mark(self: Any, *marked: Any) -> None:
            original(self, *(one for one in marked if isinstance(one, torch.Tensor)))

        FunctionCtx.mark_non_differentiable = mark
        try:
            yield
        finally:
            FunctionCtx.mark_non_differentiable = original
