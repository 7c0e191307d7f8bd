"""Atomic writes of files, a temporary folder of this process, and warnings that are logged once."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import secrets
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tilegen.bounded_cache import BoundedCache
from tilegen.errors import Unsupported

log = logging.getLogger("tilegen")
MAX_SAID = 1024


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see the old file or the new, even after a crash.

    The folder is created. Raises Unsupported if the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_char_device() or path.is_block_device():  # root could replace it by a file
            raise OSError(errno.ENOTSUP, "expected a file, found a device")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise cannot_write(path, error) from error


@cache
def own_folder() -> Path | None:
    """Create a folder for this process, which only this user can enter and which is removed at the
    end; None if there is no place for one."""
    try:
        folder = tempfile.mkdtemp(prefix="tilegen-")
    except OSError:
        return None
    atexit.register(_remove, folder, os.getpid())
    return Path(folder)


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # children that were forked end earlier
        shutil.rmtree(folder, ignore_errors=True)


def cannot_write(path: Path, error: OSError) -> Unsupported:
    """Return the error for a file that the system cannot write."""
    return Unsupported(
        f"cannot write {str(path)!r}: {error.strerror}; "
        "choose a folder you can write to (for records and kernels: set TILEGEN_CACHE_DIR)"
    )


def printable(text: str) -> str:
    """Escape a text for a terminal: control characters, line ends and undecodable bytes become
    escape sequences."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class _SayOnce:
    """Logger that logs each warning once; it remembers the last MAX_SAID messages."""

    def __init__(self) -> None:
        self._said: BoundedCache[str, None] = BoundedCache(MAX_SAID)

    def __call__(self, message: str) -> None:
        self._said.get(message, lambda: log.warning(message))

    def cache_clear(self) -> None:
        """Forget all messages, so that they are logged again."""
        self._said.clear()


say_once = _SayOnce()
