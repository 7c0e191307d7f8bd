"""Sizes of problems in tests/gpu: as large as a GPU needs, or as small as the interpreter does."""

from __future__ import annotations

import os
from typing import TypeVar

Size = TypeVar("Size")
IS_REHEARSED = os.environ.get("TRITON_INTERPRET") == "1"


def sized(on_gpu: Size, *, rehearsed: Size) -> Size:
    """Return the size for a GPU, or in the interpreter the size for tests/rehearsal.py.

    The model gives few rows whole tiles of 64 to 256 keys: a rehearsed problem with less than 257
    keys has a tail, but not several tiles of keys.
    """
    return rehearsed if IS_REHEARSED else on_gpu
