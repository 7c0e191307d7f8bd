"""Files and messages: a file is written whole or not at all, a message is said once."""

from __future__ import annotations

import errno
import logging
import os
import secrets
from pathlib import Path

from tilegen.bounded_cache import BoundedCache
from tilegen.errors import Unsupported

log = logging.getLogger("tilegen")
MAX_SAID = 1024


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step: readers see the old file or the new, even after a crash.

    Makes the folder. Raises Unsupported when it cannot be written to.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_char_device() or path.is_block_device():  # root would put a file in its place
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


def cannot_write(path: Path, error: OSError) -> Unsupported:
    """Return the error for a file that the system would not take."""
    return Unsupported(
        f"cannot write {str(path)!r}: {error.strerror}; "
        "choose a folder you can write to (for records and kernels: set TILEGEN_CACHE_DIR)"
    )


def printable(text: str) -> str:
    """Return a text for a terminal: escape sequences, line ends and bytes that are no text spelt
    out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class _SayOnce:
    """Logs each warning the first time only; of many messages, the last MAX_SAID are remembered."""

    def __init__(self) -> None:
        self._said: BoundedCache[str, None] = BoundedCache(MAX_SAID)

    def __call__(self, message: str) -> None:
        self._said.get(message, lambda: log.warning(message))

    def cache_clear(self) -> None:
        """Forget what was said."""
        self._said.clear()


say_once = _SayOnce()
