"""Threads that run a grid, and their scratch memory.

The threads are those of the OpenMP library that PyTorch has loaded. So `torch.set_num_threads`
applies here too, and no second pool competes with PyTorch's. If that library has no GOMP_parallel,
a pool of Python threads is used, since machine code runs without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

_LINE = 64
"""Alignment of a launch's memory [bytes]."""
_forked = False
"""True in a forked child, which has not inherited the OpenMP threads of its parent."""


def _note_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_note_fork)


def usable_threads(programs: int) -> int:
    """Return the number of threads for a grid: at most PyTorch's, and one in a forked child."""
    return 1 if _forked else min(torch.get_num_threads(), programs)


_PARALLEL = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, *[ctypes.c_uint32] * 2)


@cache
def parallel() -> Any:
    """Return `parallel(function, data, threads, flags)`, which calls the function at an address on
    several threads and waits for them; None if PyTorch has no such function."""
    return ctypes.cast(_openmp(), _PARALLEL) if _openmp() else None


def _openmp() -> Any:
    """Return GOMP_parallel of PyTorch's OpenMP library, or None."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return getattr(ctypes.CDLL(str(library)), "GOMP_parallel", None) if library.exists() else None


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "tilegen")


def by_pool(work: Callable[[int], None], data: int, threads: int) -> None:
    """Call `work(data)` on this thread and on threads of a pool, and wait for all that have begun.

    Machine code must not call this function: ctypes would ignore an exception, and programs would
    be skipped.
    """
    places, done = threading.Semaphore(threads - 1), threading.Semaphore(0)

    def help_out() -> None:
        # A helper that starts too late must do nothing: the data may be gone.
        if places.acquire(blocking=False):
            work(data)
            done.release()

    with contextlib.suppress(RuntimeError):  # at interpreter shutdown no thread can start
        for _ in range(threads - 1):
            _pool().submit(help_out)
    work(data)
    while places.acquire(blocking=False):
        threads -= 1
    for _ in range(threads - 1):
        done.acquire()


class Memory(NamedTuple):
    """Memory of a launch: the words that its threads share, then their scratch memory."""

    words: Any
    """The memory as a buffer, for `struct`."""
    address: int
    size: int


free: list[Memory] = []
"""Memory that no launch uses. A list, since a signal's handler may launch inside of a launch."""


def lent(size: int) -> Memory:
    """Lend memory of at least `size` bytes to a launch, which appends it to `free` at its end."""
    try:
        memory = free.pop()
    except IndexError:
        return _new(size)
    return memory if memory[2] >= size else _new(size)


def _new(size: int) -> Memory:
    memory = np.empty(size + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return Memory(memory[start : start + size], memory.ctypes.data + start, size)
