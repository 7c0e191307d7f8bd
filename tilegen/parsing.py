"""Python's own parser, for several threads at a time.

CPython 3.11 counts the depth of every syntax tree under construction in one variable of the
process. A garbage collection inside `ast.parse` runs finalizers, which lets another thread parse.
The count is then wrong, and the interrupted parse raises SystemError. While collection is paused,
nothing interrupts a parse.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_pauses = 0
_was_enabled = False


def parse_module(text: str) -> ast.Module:
    """Parse Python statements. Raises SyntaxError."""
    with collection_paused():
        return ast.parse(text)


def parse_expression(text: str) -> ast.expr:
    """Parse a Python expression. Raises SyntaxError."""
    with collection_paused():
        return ast.parse(text, mode="eval").body


@contextmanager
def collection_paused() -> Generator[None]:
    """Pause garbage collection in the process until the last thread leaves this context.

    Wrap Triton's front end in it: Triton calls `ast.parse` directly, and a function whose parse
    failed keeps a wrong cache key.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()
