"""Allocate uninitialised tensors, on the CPU or on the current GPU."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tilegen.private_torch import Empty

_is_poisoned = ContextVar("_is_poisoned", default=False)


@contextmanager
def poisoned() -> Generator[None]:
    """Fill what launches allocate inside the context with NaN.

    Otherwise, memory that a kernel fails to write may still hold the right result of an earlier
    launch.
    """
    token = _is_poisoned.set(True)
    try:
        yield
    finally:
        _is_poisoned.reset(token)


def allocator(*, is_cuda: bool) -> Empty:
    """Return PyTorch's fast allocation function, for the CPU or the current GPU. The device of the
    launch must be current."""
    return _poison(is_cuda) if _is_poisoned.get() else _allocator(is_cuda)


def uninitialised(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor without initialising it. Inside `poisoned`, fill it with NaN."""
    return tensor.fill_(float("nan")) if _is_poisoned.get() else tensor


@cache
def _allocator(is_cuda: bool) -> Empty:
    from tilegen.private_torch import empty_on

    return empty_on("cuda" if is_cuda else "cpu")


@cache
def _poison(is_cuda: bool) -> Empty:
    empty = _allocator(is_cuda)
    return lambda size, stride, dtype: empty(size, stride, dtype).fill_(float("nan"))
