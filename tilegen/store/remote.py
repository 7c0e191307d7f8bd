"""Records at URLs that fsspec opens: object stores, HTTP and further protocols."""

from __future__ import annotations

import contextlib
import errno
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

from tilegen.disk import write_whole
from tilegen.errors import InvalidRecord, TilegenError, Unsupported
from tilegen.store.files import BROKEN, Change, read_bytes, read_to_end
from tilegen.store.reach import Unreachable, ask, copies, shown
from tilegen.tuning.measure import one_line

FRESH_SECONDS = 3600.0
"""Time for which a local copy, or the knowledge that there is no file, is current [seconds]."""
LIST_SECONDS = 120.0
"""Time limit for listing the files of a location [seconds]."""
WRITE_SECONDS = 30.0
"""Time limit for reading a file, and for one step of an update [seconds]."""
TRIES = 100
"""Maximum number of attempts at an update, or a read, that other writers interrupt."""

S3, AZURE, GOOGLE = ("s3", "s3a"), ("abfs", "abfss", "az"), ("gs", "gcs")
CREATING = (*S3, *AZURE, *GOOGLE)
"""Protocols with puts that fail if the object already exists."""
ONE_PUT = (*CREATING, "memory", "oci", "oss")
"""Protocols with atomic puts; with others a file is written under another name, then renamed."""
UNTAGGED = "untagged"
"""Placeholder for objects without an ETag."""


def read(url: str, path: str, limit: int, *, fresh: bool = False) -> bytes | None:
    """Read the file of a location at `path`; None if there is no file.

    Unless `fresh`, a copy younger than FRESH_SECONDS is read instead, and an older copy if the
    location does not answer. Raises Unreachable without such a copy, and InvalidRecord.
    """
    copy = copies(url) / path
    age = None
    with contextlib.suppress(OSError):
        age = abs(time.time() - copy.stat().st_mtime)
    if age is not None and age < FRESH_SECONDS and not fresh:
        return read_bytes(copy, limit) or None
    try:
        data = ask(url, lambda: _get(url, path, limit)[0], again=fresh)
    except Unreachable:
        if fresh or age is None:
            raise
        return read_bytes(copy, limit) or None  # an old copy is better than none
    # A response without a length may be cut unnoticed; files of tilegen end with a newline.
    if data is None or data.endswith(b"\n"):
        with contextlib.suppress(TilegenError):  # a missing copy costs only time
            write_whole(copy, data or b"")  # an empty copy stands for a missing file
    return data


def fetch(url: str, path: str, limit: int) -> bytes | None:
    """Read the file of a location at `path` itself, never a copy; None if there is no file. Raises
    Unreachable, InvalidRecord."""
    return ask(url, lambda: _get(url, path, limit)[0], seconds=WRITE_SECONDS, again=True)


def names(url: str) -> list[str]:
    """List the paths of all files, relative to the location. Raises Unreachable."""

    def is_there() -> bool:
        fs, root = _open(url)
        fs.invalidate_cache()
        try:
            fs.ls(root, detail=False)
        except FileNotFoundError:
            if _protocol(url).startswith("http"):
                raise Unreachable("has no index page that lists its files") from None
            _check_bucket(fs, url, root)
            return False  # nobody has written to it yet
        return True

    def find() -> list[str]:
        fs, root = _open(url)
        return sorted(str(name)[len(root) + 1 :] for name in fs.find(root))

    if not ask(url, is_there, again=True):
        return []
    return ask(url, find, seconds=LIST_SECONDS, again=True)


def _check_bucket(fs: Any, url: str, root: str) -> None:
    """Check that the bucket of an object store exists. Raises Unreachable."""
    bucket = root.partition("/")[0]
    with contextlib.suppress(PermissionError):  # some users may list only a part of the bucket
        if _protocol(url) in CREATING and not fs.exists(bucket):
            raise Unreachable(f"has no bucket {bucket!r}; check how it is spelt, or make it first")


def update(url: str, path: str, change: Change, limit: int) -> str:
    """Apply `change` to the file of a location at `path`; return a note on an invalid file.

    With conditional puts no other writer can intervene. Elsewhere `change` is repeated until a read
    shows its result, and one of two simultaneous changes may be lost. Raises Unreachable;
    Unsupported after `TRIES` attempts.
    """
    note = ""

    def step() -> bool:
        nonlocal note
        reason = ""
        data, tag = None, None
        try:
            data, tag = _get(url, path, limit)
            new = change(data)
        except InvalidRecord as error:
            reason = one_line(error)
            new = change(None)
        if new is None or new == data:
            return True
        if reason:
            note = f"the earlier file was not a record ({reason})"
            if data is not None:
                _put(url, path + BROKEN, data, None)
                note += f" and is kept as {path + BROKEN!r}"
        try:
            return _put(url, path, new, tag)
        except PermissionError as error:
            raise _read_only(url, one_line(error)) from error

    for attempt in range(TRIES):
        if ask(url, step, seconds=WRITE_SECONDS, again=True):
            return note
        time.sleep(random.uniform(0, min(1.0, 0.01 * 2 ** min(attempt, 7))))
    raise Unsupported(
        f"expected to write {shown(url)}/{path}, found others writing it {TRIES} times; try again"
    )


def _get(url: str, path: str, limit: int) -> tuple[bytes | None, str]:
    """Read a file and its ETag; None and an empty text if there is no file. Raises InvalidRecord,
    and the errors of fsspec."""
    for _ in range(TRIES):
        try:
            return _get_once(url, path, limit)
        except OSError as error:
            if error.errno != errno.EBUSY:  # s3fs: the object was replaced between two requests
                raise
    raise TimeoutError(f"{path} was replaced {TRIES} times while it was read")


def _get_once(url: str, path: str, limit: int) -> tuple[bytes | None, str]:
    fs, root = _open(url)
    fs.invalidate_cache()  # cached listings: other writers may have added the file
    # Block size 0 reads HTTP as a stream: any server can do that, and no byte is read in advance.
    options = {"block_size": 0} if _protocol(url).startswith("http") else {}
    try:
        with fs.open(f"{root}/{path}", "rb", **options) as file:
            if (getattr(file, "size", None) or 0) > limit:  # do not read even one block of it
                raise InvalidRecord(f"expected at most {limit} bytes, found {file.size}")
            data = read_to_end(_until(time.monotonic() + WRITE_SECONDS, file.read), limit)
            details = getattr(file, "details", None) or {}
    except (FileNotFoundError, NotADirectoryError) as error:
        cause = error.__cause__
        is_missing = isinstance(cause, FileNotFoundError) or getattr(cause, "status", 0) == 404
        if options and cause is not None and not is_missing:
            raise cause from None  # fsspec also raises FileNotFoundError without an HTTP server
        return None, ""
    return data, str(details.get("ETag") or details.get("etag") or UNTAGGED)


def check_writable(url: str) -> None:
    """Raise Unsupported for a URL whose protocol has no writes."""
    if _protocol(url).startswith("http"):
        raise _read_only(url, "HTTP has no writes")


def _read_only(url: str, why: object) -> Unsupported:
    return Unsupported(
        f"{shown(url)} can only be read ({why}); write to another location, such as a folder"
    )


def _until(deadline: float, read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Make `read` fail after a deadline: a server that sends a byte now and then would otherwise
    keep this thread forever, long after its caller gave up."""

    def in_time(size: int) -> bytes:
        if time.monotonic() > deadline:
            raise TimeoutError(f"sent no end within {WRITE_SECONDS:g} s")
        return read(size)

    return in_time


def _put(url: str, path: str, data: bytes, tag: str | None) -> bool:
    """Write `data` to `path`; return True if no other writer can have overwritten it unnoticed.

    `tag` is the ETag of the object to replace: empty if none exists, None to replace any object.
    """
    fs, root = _open(url)
    protocol, name = _protocol(url), f"{root}/{path}"
    check_writable(url)
    if only := _condition(protocol, tag):
        try:
            fs.pipe_file(name, data, **only)
        except Exception as error:  # Azure's error shares no base class with others
            if _was_overtaken(error):
                return False
            raise
        return True
    if protocol in ONE_PUT:
        fs.pipe_file(name, data)
    else:
        temporary = f"{name}.{secrets.token_hex(4)}.tmp"
        fs.makedirs(name.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(temporary, data)
        fs.mv(temporary, name)
    return tag is None  # otherwise the caller reads again, and compares


def _condition(protocol: str, tag: str | None) -> dict[str, Any]:
    """Return the options that make a put fail if the object's ETag is no longer `tag`. Empty if
    fsspec has no such put: gcsfs, for example, has a condition only for new objects."""
    if tag in (None, UNTAGGED) or protocol not in CREATING:
        return {}
    if not tag:
        return {"mode": "create"}
    if protocol in S3:
        return {"IfMatch": tag}
    if protocol in AZURE:
        # Installed with adlfs.
        from azure.core import MatchConditions  # pyright: ignore[reportMissingImports]

        return {"etag": tag, "match_condition": MatchConditions.IfNotModified}
    return {}


def _was_overtaken(error: Exception) -> bool:
    """Return True if a put failed by its condition: EINVAL from s3fs, status 412 from Azure."""
    return (
        isinstance(error, FileExistsError)
        or getattr(error, "errno", None) == errno.EINVAL
        or getattr(error, "status_code", None) == 412
    )


def _open(url: str) -> tuple[Any, str]:
    """Open a URL; return its file system and the path in it. Raises the errors of fsspec."""
    import fsspec  # slow to import, and most installations have no remote location

    # fsspec caches the file system, and opens another after a fork.
    fs, root = fsspec.core.url_to_fs(url)
    return fs, root.rstrip("/")


def _protocol(url: str) -> str:
    return url.partition("://")[0].lower()
