"""Records at URLs that fsspec opens: object stores, HTTP and further protocols. Each request has a
time limit, and locations that did not answer are remembered."""

from __future__ import annotations

import contextlib
import errno
import random
import re
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from tilegen.disk import write_whole
from tilegen.environment import current
from tilegen.errors import InvalidRecord, TilegenError, Unsupported
from tilegen.store.files import BROKEN, Change, read_bytes, read_to_end
from tilegen.store.record import slug
from tilegen.tuning.measure import one_line

ANSWER_SECONDS = 5.0
"""Time limit of the request for a record [seconds]."""
DOWN_SECONDS = 300.0
"""Time for which processes of this machine skip a location that did not answer [seconds]."""

T = TypeVar("T")


class Unreachable(Unsupported):
    """A location that does not answer, or denies access."""


_PASSWORD = re.compile(r"(://[^:/@]*):(?!\d+/)(?:[^/]*|[^@]*)@")
"""User and password in a URL; digits before a slash are a port."""
_TOKEN = re.compile(r"^(https?://)[^/]*@")
"""User in a web address, which may be a token."""
_down: dict[str, tuple[float, str]] = {}
"""Locations that did not answer: the time, by `time.monotonic`, and the error."""


def ask(
    url: str, request: Callable[[], T], *, seconds: float | None = None, again: bool = False
) -> T:
    """Call `request`, which contacts `url`, and return its result, within `seconds`.

    Raises Unreachable if the request fails, or at once if the location failed within DOWN_SECONDS;
    `again` ignores earlier failures. A TilegenError of the request passes through.
    """
    if not again and (reason := _why_not_contacted(url)):
        raise Unreachable(reason)
    seconds = ANSWER_SECONDS if seconds is None else seconds
    answer: Future[T] = Future()

    def wait() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:  # `answer.result` raises it in the caller
            answer.set_exception(error)

    # A daemon thread: a request that hangs must block neither its caller nor the process's exit.
    threading.Thread(target=wait, name="tilegen-ask", daemon=True).start()
    try:
        return answer.result(seconds)
    except TilegenError:
        raise
    except TimeoutError:
        reason = f"did not answer within {seconds:g} s"
    except ImportError as error:
        reason = f"needs a package that is not installed: {one_line(error)}"
    except Exception as error:  # errors of botocore, aiohttp and others share no base class
        message = getattr(error, "strerror", None) or one_line(error)
        reason = f"cannot be reached: {message}"
    _down[url] = time.monotonic(), reason
    with contextlib.suppress(TilegenError):
        write_whole(_mark(url), reason.encode())
    raise Unreachable(reason)


def copies(url: str) -> Path:
    """Return the folder of the local cache that holds copies of a location's files."""
    return current().cache_dir / "remote" / slug(shown(url))


def shown(url: str) -> str:
    """Remove passwords from a URL, and from web addresses the user too, who may be a token.

    Users of other URLs stay; in Azure's they are containers:
    `abfs://container@account.dfs.core.windows.net/x`.
    """
    return _TOKEN.sub(r"\1", _PASSWORD.sub(r"\1@", url, count=1))


def _mark(url: str) -> Path:
    return copies(url) / "down"


def _why_not_contacted(url: str) -> str:
    """Explain why a location should not be contacted now; empty if it may be."""
    if url in _down:
        when, reason = _down[url]
        if time.monotonic() - when < DOWN_SECONDS:
            return reason
        del _down[url]
        return ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        mark = _mark(url)
        if abs(time.time() - mark.stat().st_mtime) < DOWN_SECONDS:
            return one_line(mark.read_text(encoding="utf-8"))
    return ""


# --------------------------------------------------------------------------------------------------
# Files

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
