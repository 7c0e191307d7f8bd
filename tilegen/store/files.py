"""Record files in local folders: checked when read, written atomically, set aside if broken."""

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
"""Maximum size of a record's file [bytes]. A record has about 1.5 KiB, each of at most 15 rivals
1 KiB."""
BLOCK = 128 * 1024
"""Maximum size of one read [bytes]."""
LOCK = ".tilegen.lock"
"""Name of the file that writers lock. NFS locks files between machines, but not folders."""
LOCK_SECONDS = 60.0
"""Longest wait for the lock [seconds]. A writer holds it for milliseconds, and a writer that hangs
must not block all others."""
NOT_LETTING_IN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT)
"""Errors of creating the lock file; any other error means that the file system has no locks."""
BROKEN = ".broken"
"""Suffix of files that were set aside."""

Change = Callable[[bytes | None], bytes | None]
"""Function from a file's content (None: no file) to the new content (None: leave the file). It
raises InvalidRecord for unusable content, and is then called again with None."""


class Locked(Unsupported):
    """A lock that another process holds."""


class Unreadable(InvalidRecord):
    """A file that the system cannot read; its content may be valid."""


def inside(root: Path, path: PurePath | str) -> Path:
    """Join `root` and `path`. Raises Unsupported if a folder between them is a symbolic link."""
    for parent in reversed(PurePath(path).parents[:-1]):
        if (root / parent).is_symlink():
            raise Unsupported(
                f"expected a folder at {str(root / parent)!r}, found a link to another; "
                "add the link's target as a location, or remove the link"
            )
    return root / path


def read_bytes(path: Path, limit: int = MAX_FILE_BYTES) -> bytes | None:
    """Read a file of at most `limit` bytes; None if there is no file.

    A symbolic link is followed to a regular file only: a pipe or device could block or never end.
    Raises Unreadable for errors of the system, InvalidRecord for anything else.
    """
    try:
        # Without O_NONBLOCK, opening a pipe without a writer would block forever.
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
    """Call `read` until the end of the file; it may return fewer bytes than requested.

    Raises InvalidRecord if there are more than `limit` bytes, after at most one byte beyond them.
    """
    data = bytearray()
    while len(data) <= limit and (block := read(min(BLOCK, limit + 1 - len(data)))):
        data += block
    if len(data) > limit:
        raise InvalidRecord(f"expected at most {limit} bytes, found more")
    return bytes(data)


def text_of(data: bytes) -> str:
    """Decode UTF-8. Raises InvalidRecord."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRecord(f"expected UTF-8, found {error.reason} at byte {error.start}") from None


def update(path: Path, change: Change, limit: int = MAX_FILE_BYTES) -> str:
    """Apply `change` to a file while holding the folder's lock, and replace the file atomically.

    A broken file is set aside first. Return a note about that file, empty if there was none. Raises
    Unsupported if the file cannot be written.
    """
    note = ""
    with only_writer(path.parent):
        try:
            new = change(read_bytes(path, limit))
        except InvalidRecord as error:
            aside = set_aside(path)
            kept = f"kept as {aside.name!r}" if aside else "could not be kept"
            note = f"the earlier file was not a record ({one_line(error)}) and is {kept}"
            new = change(None)
        if new is not None:
            write_whole(path, new)
    return note


def check_writable(folder: Path) -> None:
    """Check that a folder can be written, or created. Writes nothing; raises Unsupported."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    code = errno.EACCES if existing.is_dir() else errno.ENOTDIR
    if code == errno.EACCES and os.statvfs(existing).f_flag & os.ST_RDONLY:
        code = errno.EROFS
    if code != errno.EACCES or not os.access(existing, os.W_OK | os.X_OK):
        raise cannot_write(existing, OSError(code, os.strerror(code)))


@contextlib.contextmanager
def only_writer(folder: Path) -> Generator[None, None, None]:
    """Create `folder`, and exclude the writers of all machines from it during the block.

    On a file system without locks each write is still atomic, but of two findings written at the
    same moment one may be lost. Raises Unsupported if the folder cannot be written.
    """
    with locked(folder / LOCK, LOCK_SECONDS, f"to write into {str(folder)!r}"):
        yield
        _last(folder)


@contextlib.contextmanager
def locked(file: Path, seconds: float, wanted: str) -> Generator[None, None, None]:
    """Create a lock file with its folder, and hold the lock during the block. A thread may take a
    lock that it already holds.

    On a file system without locks, log a warning and exclude nobody. Raises Locked, with `wanted`
    as the purpose, if another process holds the lock for `seconds`. Raises Unsupported if the file
    cannot be created.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(file.parent, error) from error
    lock = FileLock(file, mode=0o666, is_singleton=True)  # every user of the folder may lock it
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
    """Fsync a folder, where its file system can, so that renames survive a crash."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def set_aside_if_broken(path: Path, parse: Callable[[bytes], object]) -> Path | None:
    """Set aside a file for which `parse` raises InvalidRecord; return its new path, None if the
    file stays. Raises Unsupported if the folder is locked, or cannot be written."""
    with locked(path.parent / LOCK, 0, f"to tidy {str(path.parent)!r}"):
        try:
            # Read again under the lock: a writer may have repaired the file meanwhile.
            if (data := read_bytes(path)) is not None:
                parse(data)
        except Unreadable:
            return None
        except InvalidRecord:
            return set_aside(path)
    return None


def set_aside(path: Path) -> Path | None:
    """Rename a broken file to a free name ending in `.broken`; return the new path, None if that
    fails. The caller must hold the folder's lock."""
    names = [f"{path.name}{BROKEN}", *(f"{path.name}.{n}{BROKEN}" for n in range(2, 100))]
    for free in (path.with_name(name) for name in names):
        if not os.path.lexists(free):
            try:
                path.rename(free)
            except OSError:
                return None
            return free
    return None
