"""Sizes of problems in tests/gpu: as large as a GPU needs, or as small as the interpreter does."""

from __future__ import annotations

import os
from typing import TypeVar

Size = TypeVar("Size")
IS_REHEARSED = os.environ.get("TRITON_INTERPRET") == "1"


def sized(on_gpu: Size, *, rehearsed: Size) -> Size:
    """Return a size for a GPU, or the one for tests/rehearsal.py, which has several tiles too."""
    return rehearsed if IS_REHEARSED else on_gpu
