"""Errors of storages: temporary errors, and errors that waiting does not cure."""

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
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), f"free some space, or {ANOTHER}"),
    errno.EFBIG: f"raise the limit (ulimit -f), or {ANOTHER}",
    **dict.fromkeys(
        (
            *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR),
            *(errno.ENAMETOOLONG, errno.ELOOP),
        ),
        ANOTHER,
    ),
}
"""System errors that last, each with advice. Other system errors may be a network's, and pass."""
SQLITE = {
    **dict.fromkeys(("SQLITE_NOTADB", "SQLITE_CORRUPT"), "the file is not a SQLite database"),
    **dict.fromkeys(("SQLITE_CANTOPEN", "SQLITE_PERM"), "the database cannot be opened"),
    "SQLITE_READONLY": "the database cannot be written",
    "SQLITE_FULL": "the disk is full",
    # SQLite's name for a full quota and for the limit of a file's size.
    "SQLITE_IOERR_WRITE": "the database cannot grow",
}
POSTGRES = ("3D", "28", "42501", "53100")
"""Prefixes of PostgreSQL's error codes: no database, login refused, no permission, disk full."""
NOT_LET_IN = re.compile(
    r'FATAL: +(database|role) ".*" does not exist|FATAL: .*(authentication failed|pg_hba\.conf'
    r"|not permitted to log in)|no password supplied"
)
"""Messages of refused connections, which have no error code."""


def may_pass(error: Exception) -> bool:
    """Return True if an error may be temporary; `why_not_recovering` tells lasting errors apart.

    Base classes are compared by name, so that no driver needs to be installed.
    """
    names = {f"{base.__module__}.{base.__name__}" for base in type(error).__mro__}
    if names & {"grpc.RpcError"}:
        code: Any = getattr(error, "code", lambda: None)()
        return getattr(code, "name", "") in ("UNAVAILABLE", "UNKNOWN", "DEADLINE_EXCEEDED")
    return bool(
        names & {"sqlalchemy.exc.DBAPIError", "optuna.exceptions.StorageInternalError"}
    ) or isinstance(error, OSError)


def why_not_recovering(error: Exception, journal: Path | None) -> str:
    """Explain why a storage will not recover, with advice; empty if waiting may help. `journal` is
    the file of a storage that is a journal."""
    # Optuna does not check a journal's lines: broken lines raise errors of other classes.
    explicit = OSError | OptunaError | TilegenError
    if journal is not None and not isinstance(error, explicit):
        return _flaw(journal)
    for cause in _causes(error):
        code = str(getattr(cause, "sqlite_errorname", ""))
        for start, reason in SQLITE.items():
            if code.startswith(start):
                return f"{reason} ({cause}); {ANOTHER}"
        state = str(getattr(cause, "sqlstate", None) or "")
        if state.startswith(POSTGRES) or (
            type(cause).__module__.startswith("psycopg") and NOT_LET_IN.search(str(cause))
        ):
            return f"{one_line(str(cause))}; correct the URL or the server, or {ANOTHER}"
        if isinstance(cause, OSError) and cause.errno in LASTING:
            file = cause.filename or journal
            named = f"{str(file)!r}: " if file else ""
            return f"{named}{cause.strerror}; {LASTING[cause.errno]}"
    return ""


def in_words(error: Exception) -> str:
    """Describe the innermost cause of an error in one line; the errors around it add nothing."""
    *_, last = _causes(error)
    return one_line(str(last) or type(last).__name__)


def is_operation(line: bytes) -> bool | None:
    """Return True if a journal's line is an operation of Optuna's, None if it is no JSON."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return isinstance(value, dict) and "op_code" in value


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes: Optuna wraps SQLAlchemy's errors, which wrap the driver's."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = getattr(cause, "orig", None) or cause.__cause__


def _flaw(journal: Path) -> str:
    """Name the first broken line of a journal. Empty if there is none, or only the last line is cut
    short, as a killed writer leaves it."""
    with journal.open("rb") as lines:
        verdicts = [is_operation(line) for line in lines]
    broken = [number for number, verdict in enumerate(verdicts, start=1) if not verdict]
    if not broken or (broken == [len(verdicts)] and verdicts[-1] is None):
        return ""
    return (
        f"line {broken[0]} is not an operation of a study; keep only the lines before it "
        f"(head -n {broken[0] - 1}), or name a new file with --storage to start over"
    )
