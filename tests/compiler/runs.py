"""Processors whose code this machine can execute, and launches of the small kernels for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tilegen.cpu.direct import DirectFunction
from tilegen.cpu.target import SSE2, Target, host

HOST = host()
WIDE = replace(
    HOST,
    name="wide",
    lanes=16,
    rows=4,
    vectors=4,
    pairs="emulated",
    masked16=False,
    scalef=False,
)
"""The layout of AVX-512 with products of bf16 pairs, without its instructions."""
TARGETS = {"host": HOST, "wide": WIDE}
if HOST.triple.startswith("x86"):
    TARGETS["sse2"] = SSE2

_functions: dict[Any, DirectFunction] = {}


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, target: Target = HOST) -> None:
    """Launch a small kernel compiled for a processor."""
    key = kernel, target
    if key not in _functions:
        _functions[key] = DirectFunction(kernel, target=target)
    _functions[key][grid](*given)


def at_once(work: Callable[[int], None]) -> None:
    """Call a function from four Python threads at once, with their numbers."""
    started = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
