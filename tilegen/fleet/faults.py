"""Errors of storages: those that may pass, and those that waiting does not help."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna.exceptions import OptunaError

from tilegen.errors import TilegenError
from tilegen.tuning.measure import one_line

ANOTHER = "name another with --storage"
LASTING: dict[int, str] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), f"free some, or {ANOTHER}"),
    errno.EFBIG: f"raise the limit (ulimit -f), or {ANOTHER}",
    **dict.fromkeys(
        (
            *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR),
            *(errno.ENAMETOOLONG, errno.ELOOP),
        ),
        ANOTHER,
    ),
}
"""Errors of the system that last, each with what to do. One that is not here may be a network's."""
SQLITE = {
    **dict.fromkeys(("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_CANTOPEN"), "no SQLite database"),
    "SQLITE_READONLY": "a database that cannot be written to",
    "SQLITE_FULL": "a full disk",
    "SQLITE_PERM": "a database that nobody here may open",
}
POSTGRES = ("3D", "28", "42501", "53100")
"""Starts of PostgreSQL's codes for: no such database, not let in, not allowed, disk full."""
NOT_LET_IN = re.compile(
    r'FATAL: +(database|role) ".*" does not exist|FATAL: .*(authentication failed|pg_hba\.conf'
    r"|not permitted to log in)|no password supplied"
)
"""Messages of a connection that was refused, which bears no code."""


def may_pass(error: Exception) -> bool:
    """True for an error that may pass, unless `lasting` says why it does not. Bases are compared by
    name: no driver need be installed."""
    names = {f"{base.__module__}.{base.__name__}" for base in type(error).__mro__}
    if names & {"grpc.RpcError"}:
        code: Any = getattr(error, "code", lambda: None)()
        return getattr(code, "name", "") in ("UNAVAILABLE", "UNKNOWN", "DEADLINE_EXCEEDED")
    return bool(
        names & {"sqlalchemy.exc.DBAPIError", "optuna.exceptions.StorageInternalError"}
    ) or isinstance(error, OSError)


def lasting(error: Exception, journal: Path | None) -> str:
    """Return why a storage, maybe a `journal`, stays as it is, and what to do; an empty text where
    waiting may help."""
    told = OSError | OptunaError | TilegenError
    if journal is not None and not isinstance(error, told):
        return _flaw(journal)
    for cause in _causes(error):
        code = str(getattr(cause, "sqlite_errorname", ""))
        for start, trouble in SQLITE.items():
            if code.startswith(start):
                return f"found {trouble} there ({cause}); {ANOTHER}"
        state = str(getattr(cause, "sqlstate", None) or "")
        if state.startswith(POSTGRES) or (
            type(cause).__module__.startswith("psycopg") and NOT_LET_IN.search(str(cause))
        ):
            return f"got {one_line(str(cause))}; put that right, or {ANOTHER}"
        if isinstance(cause, OSError) and cause.errno in LASTING:
            file = cause.filename or journal
            named = f"{str(file)!r}: " if file else ""
            return f"got {named}{cause.strerror}; {LASTING[cause.errno]}"
    return ""


def in_words(error: Exception) -> str:
    """Return the innermost error as a line, without the layers that add nothing."""
    *_, last = _causes(error)
    return one_line(str(last) or type(last).__name__)


def is_operation(line: bytes) -> bool | None:
    """True for a journal's line that is an operation, None for one that is no JSON."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return isinstance(value, dict) and "op_code" in value


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from: SQLAlchemy wraps a driver's, and Optuna that."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = getattr(cause, "orig", None) or cause.__cause__


def _flaw(journal: Path) -> str:
    """Return which line of a journal is broken, an empty text if none is but the last, which a
    writer that was killed may have left torn."""
    with journal.open("rb") as lines:
        verdicts = [is_operation(line) for line in lines]
    broken = [number for number, verdict in enumerate(verdicts, start=1) if not verdict]
    if not broken or (broken == [len(verdicts)] and verdicts[-1] is None):
        return ""
    return (
        f"line {broken[0]} is no operation of a study: keep the lines before it "
        f"(head -n {broken[0] - 1}), or name a new file, in which the studies begin anew"
    )
