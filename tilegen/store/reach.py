"""Requests to locations that may not answer: each has a time limit, and failures are remembered."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from tilegen.disk import write_whole
from tilegen.environment import current
from tilegen.errors import TilegenError, Unsupported
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
