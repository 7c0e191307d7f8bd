"""The process-wide lock for symbolic work. SymPy is not thread-safe: one thread at a time may
trace, propose or render."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import RLock
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

lock = RLock()
"""Held during symbolic work, never while a kernel is compiled, run or timed."""


def one_at_a_time(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to hold the lock while it runs."""

    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return function(*args, **kwargs)

    return locked
