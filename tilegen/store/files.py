"""Record files: read with suspicion, written whole or not at all, set aside when broken."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Generator
from pathlib import Path

from tilegen.disk import cannot_write, write_whole
from tilegen.errors import InvalidRecord

MAX_FILE_BYTES = 64 * 1024
"""A record has about 1.5 KiB."""

BROKEN = ".broken"


class Unreadable(InvalidRecord):
    """The system would not hand the file over; what is in it may be in order."""


def read_text(path: Path) -> str | None:
    """Return the text of a record file, None if there is none. Raises InvalidRecord or Unreadable.

    A link is followed, to a regular file only: a pipe or device would block or never end.
    """
    try:
        # Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise InvalidRecord("expected a file, found a link to nothing") from None
        return None
    except OSError as error:
        raise Unreadable(f"cannot be opened: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise InvalidRecord("expected a regular file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(handle)
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRecord(f"expected at most {MAX_FILE_BYTES} bytes, found more")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRecord(f"expected UTF-8, found {error.reason} at byte {error.start}") from None


def write_text(path: Path, text: str) -> None:
    """Put `text` at `path` in one step. Raises Unsupported when it cannot be written."""
    write_whole(path, text.encode("utf-8"))


@contextlib.contextmanager
def only_writer(folder: Path) -> Generator[None, None, None]:
    """Make `folder`, and keep other processes from writing records into it meanwhile.

    On a file system without locks every write is still whole; only the better of two written at
    the same moment may then lose. Raises Unsupported when the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
        with contextlib.suppress(OSError):
            os.fsync(handle)  # makes the rename last, where folders can be synchronised
    finally:
        os.close(handle)


def set_aside(path: Path) -> Path | None:
    """Rename a broken file to a free name ending in `.broken`; return it, None if impossible."""
    names = [f"{path.name}{BROKEN}", *(f"{path.name}.{n}{BROKEN}" for n in range(2, 100))]
    for free in (path.with_name(name) for name in names):
        if not os.path.lexists(free):
            try:
                path.rename(free)
            except OSError:
                return None
            return free
    return None
