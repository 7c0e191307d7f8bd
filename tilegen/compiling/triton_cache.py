"""Triton's cache on disk: where it cannot be written, a temporary folder of this process replaces
it, so that no call fails because of a disk."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

from tilegen.disk import own_folder, say_once
from tilegen.errors import Unsupported

T = TypeVar("T")
UNWRITABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
)
"""Numbers of the errors of folders that are missing, read-only or full."""


def written(compile: Callable[[], T]) -> T:
    """Compile by Triton, a second time into a temporary folder if its cache cannot be written.
    Raises Unsupported if that cannot be written either."""
    from tilegen.private_triton import knobs

    try:
        return compile()
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        full, folder = error, own_folder()
    before = knobs.cache.dir
    reason = f"Triton's cache {before!r} cannot be written ({full.strerror})"
    if folder is not None and before != (other := str(folder / "triton")):
        try:
            knobs.cache.dir = other
            result = compile()
            say_once(
                f"{reason}; it lies in {other!r} until this process ends; set TRITON_CACHE_DIR to "
                "a folder you can write to"
            )
            return result
        except OSError:
            knobs.cache.dir = before
    raise Unsupported(
        f"{reason}, nor can a temporary folder; set TILEGEN_CACHE_DIR and TRITON_CACHE_DIR to "
        "folders you can write to"
    ) from full
