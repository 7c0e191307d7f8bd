"""The lock of a process for symbolic work. SymPy is not thread-safe, so only one thread at a time
traces, proposes or renders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import RLock
from typing import ParamSpec, TypeVar

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
