"""Requests to locations that may not answer: each has a time limit, and silence is remembered."""

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
from tilegen.errors import TilegenError, Unsupported
from tilegen.settings import settings
from tilegen.store.record import slug
from tilegen.tuning.measure import one_line

ANSWER_SECONDS = 5.0
"""Time that a location may take to answer for one record [seconds]."""
DOWN_SECONDS = 300.0
"""Time for which nobody on this machine asks a location again that did not answer [seconds]."""

T = TypeVar("T")


class Unreachable(Unsupported):
    """A location that does not answer, or does not let us in."""


_PASSWORD = re.compile(r"(://[^:/@]*):(?!\d+/)(?:[^/]*|[^@]*)@")
"""User and password of a URL; a number before a slash is a port."""
_TOKEN = re.compile(r"^(https?://)[^/]*@")
"""User of a web address, which may be a token."""
_down: dict[str, tuple[float, str]] = {}
"""Locations that did not answer: when, by the clock of this process, and what happened."""


def ask(
    url: str, request: Callable[[], T], *, seconds: float | None = None, again: bool = False
) -> T:
    """Return `request()`, which talks to `url`, within `seconds`. Raises Unreachable, also at once
    for a location that did not answer a moment ago, unless `again`; errors of tilegen's own pass
    through."""
    if not again and (trouble := _trouble(url)):
        raise Unreachable(trouble)
    seconds = ANSWER_SECONDS if seconds is None else seconds
    answer: Future[T] = Future()

    def wait() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:  # is raised to who asked
            answer.set_exception(error)

    # A daemon: a request that hangs must neither hold up its caller nor the end of the process.
    threading.Thread(target=wait, name="tilegen-ask", daemon=True).start()
    try:
        return answer.result(seconds)
    except TilegenError:
        raise
    except TimeoutError:
        trouble = f"did not answer within {seconds:g} s"
    except ImportError as error:
        trouble = f"needs a package that is not installed: {one_line(error)}"
    except Exception as error:  # botocore's, aiohttp's and others' errors have nothing in common
        what = getattr(error, "strerror", None) or one_line(error)
        trouble = f"cannot be reached: {what}"
    _down[url] = time.monotonic(), trouble
    with contextlib.suppress(TilegenError):
        write_whole(_mark(url), trouble.encode())
    raise Unreachable(trouble)


def copies(url: str) -> Path:
    """Return the folder in the own directory where copies of a location's records are kept."""
    return settings().cache_dir / "remote" / slug(shown(url))


def shown(url: str) -> str:
    """Return a URL without the password or the token it may hold. The user before a password stays,
    which in Azure's URLs is the container: `abfs://container@account.dfs.core.windows.net/x`."""
    return _TOKEN.sub(r"\1", _PASSWORD.sub(r"\1@", url, count=1))


def _mark(url: str) -> Path:
    return copies(url) / "down"


def _trouble(url: str) -> str:
    """Return why a location should not be asked now; an empty text if it may be."""
    if url in _down:
        when, trouble = _down[url]
        if time.monotonic() - when < DOWN_SECONDS:
            return trouble
        del _down[url]
        return ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        mark = _mark(url)
        if abs(time.time() - mark.stat().st_mtime) < DOWN_SECONDS:
            return one_line(mark.read_text(encoding="utf-8"))
    return ""
