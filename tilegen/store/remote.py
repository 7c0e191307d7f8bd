"""Records behind a URL, opened through fsspec: object stores, HTTP, and whatever else it knows."""

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
"""Time for which a copy stands for a record, and a miss for there being none [seconds]."""
LIST_SECONDS = 120.0
"""Time that a location may take to list its files [seconds]."""
WRITE_SECONDS = 30.0
"""Time that a location may take for one step of an update [seconds]."""
TRIES = 100
"""Number of attempts at one update that other writers get in the way of."""

S3, AZURE, GOOGLE = ("s3", "s3a"), ("abfs", "abfss", "az"), ("gs", "gcs")
CREATING = (*S3, *AZURE, *GOOGLE)
"""Stores where a put can be made to fail if somebody has put something there before."""
ONE_PUT = (*CREATING, "memory", "oci", "oss")
"""Stores where a put is seen whole or not at all; elsewhere a file gets its name afterwards."""
UNTAGGED = "untagged"
"""Tag of what has none."""


def read(url: str, path: str, limit: int, *, fresh: bool = False) -> bytes | None:
    """Read the file of a location at `path`, from a copy that is new enough unless `fresh`; None if
    there is no file. Raises Unreachable if there is no copy either, InvalidRecord."""
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
    # A body without a length may end early, unseen; what tilegen writes ends with a line's end.
    if data is None or data.endswith(b"\n"):
        with contextlib.suppress(TilegenError):  # without a copy it is only slower
            write_whole(copy, data or b"")
    return data


def fetch(url: str, path: str, limit: int) -> bytes | None:
    """Read the file of a location at `path` now. Raises Unreachable, InvalidRecord."""
    return ask(url, lambda: _get(url, path, limit)[0], seconds=WRITE_SECONDS, again=True)


def names(url: str) -> list[str]:
    """Return the names of all files, relative to the location. Raises Unreachable."""

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
    """Raise Unreachable where a store has no such bucket: its name may be misspelt."""
    bucket = root.partition("/")[0]
    with contextlib.suppress(PermissionError):  # of who may list a part of it alone
        if _protocol(url) in CREATING and not fs.exists(bucket):
            raise Unreachable(f"has no bucket {bucket!r}; check how it is spelt, or make it first")


def update(url: str, path: str, change: Change, limit: int) -> str:
    """Change what a location holds at `path`; return what else happened.

    Where fsspec has conditional puts, no other writer can come between. Elsewhere the change is
    repeated until it is seen to be there, and of two made at the same moment one may be lost.
    Raises Unreachable, or Unsupported if that never happens.
    """
    note = ""

    def step() -> bool:
        nonlocal note
        trouble = ""
        data, tag = None, None
        try:
            data, tag = _get(url, path, limit)
            new = change(data)
        except InvalidRecord as error:
            trouble = one_line(error)
            new = change(None)
        if new is None or new == data:
            return True
        if trouble:
            note = f"what was there was no record ({trouble})"
            if data is not None:
                _put(url, path + BROKEN, data, None)
                note += f" and is kept as {path + BROKEN!r}"
        return _put(url, path, new, tag)

    for attempt in range(TRIES):
        if ask(url, step, seconds=WRITE_SECONDS, again=True):
            return note
        time.sleep(random.uniform(0, min(1.0, 0.01 * 2 ** min(attempt, 7))))
    raise Unsupported(
        f"expected to write {shown(url)}/{path}, found others writing it {TRIES} times; try again"
    )


def _get(url: str, path: str, limit: int) -> tuple[bytes | None, str]:
    """Read a file (None if there is none) and its tag. Raises InvalidRecord, and the errors of
    fsspec."""
    for _ in range(TRIES):
        try:
            return _get_once(url, path, limit)
        except OSError as error:
            if error.errno != errno.EBUSY:  # s3fs's for: replaced between its two requests
                raise
    raise TimeoutError(f"{path} was replaced {TRIES} times while it was read")


def _get_once(url: str, path: str, limit: int) -> tuple[bytes | None, str]:
    fs, root = _open(url)
    fs.invalidate_cache()  # of listings: others write meanwhile
    # Without blocks HTTP is read as a stream, of any server, and never beyond what is asked for.
    options = {"block_size": 0} if _protocol(url).startswith("http") else {}
    try:
        with fs.open(f"{root}/{path}", "rb", **options) as file:
            if (getattr(file, "size", None) or 0) > limit:  # do not even ask for a block of it
                raise InvalidRecord(f"expected at most {limit} bytes, found {file.size}")
            data = read_to_end(_until(time.monotonic() + WRITE_SECONDS, file.read), limit)
            details = getattr(file, "details", None) or {}
    except (FileNotFoundError, NotADirectoryError) as error:
        cause = error.__cause__
        if options and cause is not None and not isinstance(cause, FileNotFoundError):
            raise cause from None  # fsspec finds nothing where no HTTP server is, either
        return None, ""
    return data, str(details.get("ETag") or details.get("etag") or UNTAGGED)


def _until(deadline: float, read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Return `read` with a time limit: who asked has gone, and a server that sends a byte now and
    then would keep this thread for ever."""

    def in_time(size: int) -> bytes:
        if time.monotonic() > deadline:
            raise TimeoutError(f"sent no end within {WRITE_SECONDS:g} s")
        return read(size)

    return in_time


def _put(url: str, path: str, data: bytes, tag: str | None) -> bool:
    """Put `data` at `path`; return whether that is certain to last. `tag` is that of what is to be
    replaced, empty if nothing is, None if it may be anything."""
    fs, root = _open(url)
    protocol, name = _protocol(url), f"{root}/{path}"
    if protocol.startswith("http"):
        raise Unsupported(f"{shown(url)} can only be read; write to another location")
    if only := _condition(protocol, tag):
        try:
            fs.pipe_file(name, data, **only)
        except Exception as error:  # Azure's has no base but its own
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
    return tag is None  # otherwise look again


def _condition(protocol: str, tag: str | None) -> dict[str, Any]:
    """Return the options of a put that fails if `tag` is no longer that of what is there; none
    where fsspec has no such put: gcsfs can only create on condition."""
    if tag in (None, UNTAGGED) or protocol not in CREATING:
        return {}
    if not tag:
        return {"mode": "create"}
    if protocol in S3:
        return {"IfMatch": tag}
    if protocol in AZURE:
        # adlfs brings it.
        from azure.core import MatchConditions  # pyright: ignore[reportMissingImports]

        return {"etag": tag, "match_condition": MatchConditions.IfNotModified}
    return {}


def _was_overtaken(error: Exception) -> bool:
    """True for a put that failed by its condition: s3fs says EINVAL, Azure's client 412."""
    return (
        isinstance(error, FileExistsError)
        or getattr(error, "errno", None) == errno.EINVAL
        or getattr(error, "status_code", None) == 412
    )


def _open(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the location in it. Raises what fsspec raises."""
    import fsspec  # takes a while, and most installations have no remote location

    # fsspec remembers the file system, and knows that one does not survive a fork.
    fs, root = fsspec.core.url_to_fs(url)
    return fs, root.rstrip("/")


def _protocol(url: str) -> str:
    return url.partition("://")[0].lower()
