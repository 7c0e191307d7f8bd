"""Record files in folders: read with suspicion, written whole or not at all, kept if broken."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Generator
from pathlib import Path, PurePath

from filelock import FileLock, Timeout

from tilegen.disk import cannot_write, say_once, write_whole
from tilegen.errors import InvalidRecord, Unsupported
from tilegen.tuning.measure import one_line

MAX_FILE_BYTES = 64 * 1024
"""Limit of a record's file [bytes]: a record has about 1.5 KiB, and at most 15 rivals of 1 KiB."""
BLOCK = 128 * 1024
"""Size of the pieces that a file is read in [bytes]."""
LOCK = ".tilegen.lock"
"""Name of the file whose lock writers hold; NFS has locks between machines for files alone."""
LOCK_SECONDS = 60.0
"""Time that the lock is waited for [seconds]: a writer holds it for milliseconds, and one that
hangs must not hang all others."""
NOT_LETTING_IN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT)
"""Errors about writing a file, not about locks."""
BROKEN = ".broken"
"""Ending of the names of files that were set aside."""

Change = Callable[[bytes | None], bytes | None]
"""Function from what is there (None: nothing) to what shall be there (None: leave it). It raises
InvalidRecord if what is there cannot be used, and is then called again with None."""


class Locked(Unsupported):
    """A lock that another process holds."""


class Unreadable(InvalidRecord):
    """The system would not hand the file over; what is in it may be in order."""


def inside(root: Path, path: PurePath | str) -> Path:
    """Return where `path` lies below `root`. Raises Unsupported if a link leads out of there."""
    for parent in reversed(PurePath(path).parents[:-1]):
        if (root / parent).is_symlink():
            raise Unsupported(
                f"expected a folder at {str(root / parent)!r}, found a link to another; "
                "name what it leads to as a location of its own, or remove it"
            )
    return root / path


def read_bytes(path: Path, limit: int = MAX_FILE_BYTES) -> bytes | None:
    """Read a file; None if there is none. Raises InvalidRecord or Unreadable.

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
        return read_to_end(lambda size: os.read(handle, size), limit)
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(handle)


def read_to_end(read: Callable[[int], bytes], limit: int) -> bytes:
    """Return all that `read` gives, which may hand out less than it is asked for before the end.

    Raises InvalidRecord beyond `limit` bytes, and takes no more than one further byte.
    """
    data = bytearray()
    while len(data) <= limit and (block := read(min(BLOCK, limit + 1 - len(data)))):
        data += block
    if len(data) > limit:
        raise InvalidRecord(f"expected at most {limit} bytes, found more")
    return bytes(data)


def text_of(data: bytes) -> str:
    """Return the text that `data` encodes. Raises InvalidRecord."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRecord(f"expected UTF-8, found {error.reason} at byte {error.start}") from None


def update(path: Path, change: Change, limit: int = MAX_FILE_BYTES) -> str:
    """Change a file in one step that no other writer can come between; return what else happened.

    A broken file in the way is set aside. Raises Unsupported when it cannot be written.
    """
    note = ""
    with only_writer(path.parent):
        try:
            new = change(read_bytes(path, limit))
        except InvalidRecord as error:
            aside = set_aside(path)
            kept = f"kept as {aside.name!r}" if aside else "could not be kept"
            note = f"what was there was no record ({one_line(error)}) and is {kept}"
            new = change(None)
        if new is not None:
            write_whole(path, new)
    return note


def check_writable(folder: Path) -> None:
    """Raise Unsupported for a folder that cannot be written to, or made. Changes nothing."""
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    wrong = errno.EACCES if there.is_dir() else errno.ENOTDIR
    if wrong == errno.ENOTDIR or not os.access(there, os.W_OK | os.X_OK):
        raise cannot_write(there, OSError(wrong, os.strerror(wrong)))


@contextlib.contextmanager
def only_writer(folder: Path) -> Generator[None, None, None]:
    """Make `folder`, and keep other processes, of all machines, from writing into it meanwhile.

    On a file system without locks every write is still whole; only one of two findings written at
    the same moment may then be lost. Raises Unsupported when the folder cannot be written to.
    """
    with locked(folder / LOCK, LOCK_SECONDS, f"to write into {str(folder)!r}"):
        yield
        _last(folder)


@contextlib.contextmanager
def locked(file: Path, seconds: float, wanted: str) -> Generator[None, None, None]:
    """Hold the lock of a file, which is made with its folder; a thread that holds the lock may take
    it again.

    On a file system without locks nobody is kept out, with a warning. Raises Locked if another
    process, which wanted the same, holds it for `seconds`; Unsupported if the file cannot be made.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(file.parent, error) from error
    lock = FileLock(file, mode=0o666, is_singleton=True)  # for all who may write into the folder
    held = False
    try:
        lock.acquire(timeout=seconds, poll_interval=0.01)
        held = True
    except Timeout:
        raise Locked(
            f"expected {wanted}, found {file.name!r} locked by another process for {seconds:g} s; "
            "end that process, or choose another location"
        ) from None
    except OSError as error:
        if error.errno in NOT_LETTING_IN:
            raise cannot_write(file, error) from error
        say_once(
            f"folder {str(file.parent)!r} has no locks ({one_line(error)}): "
            "of two findings written at the same moment one may be lost"
        )
    try:
        yield
    finally:
        if held:
            lock.release()


def _last(folder: Path) -> None:
    """Make what was renamed in a folder last, where folders can be synchronised."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def set_aside_if_broken(path: Path, parse: Callable[[bytes], object]) -> Path | None:
    """Set aside a file that `parse` raises InvalidRecord for; return its new name, None if it
    stays. Raises Unsupported where somebody writes into the folder, or nobody can."""
    with locked(path.parent / LOCK, 0, f"to tidy {str(path.parent)!r}"):
        try:
            # Read again: a writer may have repaired it since it was found to be broken.
            if (data := read_bytes(path)) is not None:
                parse(data)
        except Unreadable:
            return None
        except InvalidRecord:
            return set_aside(path)
    return None


def set_aside(path: Path) -> Path | None:
    """Rename a broken file to a free name ending in `.broken`; return it, None if impossible.
    Nobody else may write into the folder meanwhile."""
    names = [f"{path.name}{BROKEN}", *(f"{path.name}.{n}{BROKEN}" for n in range(2, 100))]
    for free in (path.with_name(name) for name in names):
        if not os.path.lexists(free):
            try:
                path.rename(free)
            except OSError:
                return None
            return free
    return None
