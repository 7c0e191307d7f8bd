"""Threads that run a grid, and the scratch memory that they work in.

Threads are those of the OpenMP library that PyTorch has loaded, so that `torch.set_num_threads`
holds here too and no second pool competes with PyTorch's. Where that library has no GOMP_parallel,
a pool of Python threads serves: machine code runs without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

_LINE = 64
"""Bytes to which scratch memory is aligned."""
_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32
)
_forked = False
"""True in a child of a process that had OpenMP threads, which the child has not."""


def _note_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_note_fork)


def usable_threads(programs: int) -> int:
    """Return the number of threads for a grid: at most those of PyTorch, and one in a forked
    child."""
    return 1 if _forked else min(torch.get_num_threads(), programs)


@cache
def parallel() -> int:
    """Return the address of `parallel(function, data, threads, flags)`, which calls the function
    on some threads and waits for all of them."""
    address = ctypes.cast(_openmp() or _by_pool, ctypes.c_void_p).value
    assert address
    return address


def _openmp() -> Any:
    """Return GOMP_parallel of PyTorch's OpenMP library; None where it has none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return getattr(ctypes.CDLL(str(library)), "GOMP_parallel", None) if library.exists() else None


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "tilegen")


@_PARALLEL
def _by_pool(function: int, data: int, threads: int, flags: int) -> None:
    work = _WORK(function)
    others = [_pool().submit(work, data) for _ in range(threads - 1)]
    work(data)
    for other in others:
        other.result()


class _Scratch(threading.local):
    """Scratch memory of the threads that one Python thread starts, kept from launch to launch."""

    size = 0
    address = 0
    memory: Any = None


_scratch = _Scratch()


def scratch(size: int) -> int:
    """Return the address of at least `size` bytes that no other Python thread uses."""
    if size > _scratch.size:
        memory = np.empty(size + _LINE, np.uint8)
        _scratch.memory, _scratch.size = memory, size
        _scratch.address = (memory.ctypes.data + _LINE - 1) // _LINE * _LINE
    return _scratch.address
