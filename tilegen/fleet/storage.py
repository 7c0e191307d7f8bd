"""Optuna's storages by URL, and patience with one that is away for a while."""

from __future__ import annotations

import json
import math
import random
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import optuna

from tilegen.disk import log
from tilegen.errors import TilegenError, Unsupported
from tilegen.measure import one_line
from tilegen.store.reach import shown

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

FORMS = (
    "postgresql://user@host/database, journal:FILE on a shared folder, grpc://host:port of a "
    "tilegen fleet proxy, or sqlite:///FILE on one machine"
)
OPENING_SECONDS = 30.0
"""Time that a storage may take to answer at first [seconds]; a wrong address ends by then."""
PATIENCE_SECONDS = 600.0
"""Time that workers wait for a storage that answered before [seconds]: a restart, an upgrade."""
LONGEST_PAUSE = 10.0
"""Longest pause between two calls [seconds]."""
MAX_LINE = 2**20
"""Limit of a journal's first line [bytes]; the longest is a few hundred."""
SQLITE_BROKEN = ("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_CANTOPEN")
LOCK_SECONDS = 10
"""Time after which the lock of a journal belongs to a killed worker [seconds]: a living one holds
it for milliseconds."""


class StorageAway(TilegenError):
    """A fleet's storage does not answer."""


class Patient:
    """A storage whose calls are made again, ever later, while it does not answer.

    A call may have been done although its answer was lost. `queue` is made for that: what is put in
    twice is measured once, and a claim that nobody knows of goes stale.
    """

    def __init__(self, storage: BaseStorage, where: str, journal: Path | None = None) -> None:
        self._storage, self._where, self._journal = storage, where, journal
        self.failed_at = -math.inf
        """Time at which the storage last did not answer, by `time.monotonic` [seconds]."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._storage, name)
        return partial(self._call, value) if callable(value) else value

    def _call(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        def again() -> Any:
            try:
                return call(*args, **options)
            except Exception as error:
                if _is_away(error):
                    self.failed_at = time.monotonic()
                raise

        return patiently(again, self._where, PATIENCE_SECONDS, self._journal)


def last_failure(storage: object) -> float:
    """Return when a storage last did not answer, by `time.monotonic`."""
    return storage.failed_at if isinstance(storage, Patient) else -math.inf


def patiently(
    call: Callable[[], Any], where: str, seconds: float, journal: Path | None = None
) -> Any:
    """Return what `call` returns, called again while the storage is away.

    Raises StorageAway, or Unsupported if its file, maybe a `journal`, is broken: waiting does not
    help then.
    """
    started, pause, said = time.monotonic(), 0.1, False
    while True:
        try:
            return call()
        except Exception as error:
            if trouble := _damage(error, journal):
                raise Unsupported(
                    f"expected the storage {where} to be in order; {trouble}"
                ) from error
            if not _is_away(error):
                raise
            waited = time.monotonic() - started
            if waited + pause > seconds:
                raise StorageAway(
                    f"expected the storage {where} to answer, got for {waited:.0f} s: "
                    f"{one_line(error)}; start it, or name another with --storage"
                ) from error
            if not said and waited > 1:
                log.warning("the storage %s does not answer; trying again", where)
                said = True
        # Not all workers at the same moment, when a server comes back.
        time.sleep(pause * random.uniform(0.5, 1))
        pause = min(2 * pause, LONGEST_PAUSE)


def _is_away(error: Exception) -> bool:
    """True for an error that may pass. Bases are compared by name: no driver need be installed."""
    names = {f"{base.__module__}.{base.__name__}" for base in type(error).__mro__}
    if names & {"grpc.RpcError"}:
        code: Any = getattr(error, "code", lambda: None)()
        return getattr(code, "name", "") in ("UNAVAILABLE", "UNKNOWN", "DEADLINE_EXCEEDED")
    return bool(
        names & {"sqlalchemy.exc.DBAPIError", "optuna.exceptions.StorageInternalError"}
    ) or isinstance(error, OSError)


def _damage(error: Exception, journal: Path | None) -> str:
    """Return what is broken in the file of a storage that raised `error`, and what to do; an empty
    text if nothing is."""
    told = OSError | optuna.exceptions.OptunaError | TilegenError
    if journal is not None and not isinstance(error, told):
        return _flaw(journal)
    if journal and isinstance(error, IsADirectoryError | NotADirectoryError | PermissionError):
        return f"cannot open {error.filename!r}: {error.strerror}; name another with --storage"
    for cause in (getattr(error, "orig", None), getattr(error.__cause__, "orig", None)):
        if str(getattr(cause, "sqlite_errorname", "")).startswith(SQLITE_BROKEN):
            return f"found no SQLite database there ({cause}); name another with --storage"
    return ""


def _flaw(journal: Path) -> str:
    """Return which line of a journal is broken, an empty text if none is but the last, which a
    writer that was killed may have left torn."""
    with journal.open("rb") as lines:
        verdicts = [_is_operation(line) for line in lines]
    broken = [number for number, verdict in enumerate(verdicts, start=1) if not verdict]
    if not broken or (broken == [len(verdicts)] and verdicts[-1] is None):
        return ""
    return (
        f"line {broken[0]} is no operation of a study: keep the lines before it "
        f"(head -n {broken[0] - 1}), or name a new file, in which the studies begin anew"
    )


def _is_operation(line: bytes) -> bool | None:
    """True for a journal's line that is an operation, None for one that is no JSON."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return isinstance(value, dict) and "op_code" in value


def open_storage(url: str, *, make: bool = True) -> BaseStorage:
    """Return the storage of a URL, which has answered; `make` makes its file where there is none.
    Raises Unsupported or StorageAway."""
    # Optuna tells everybody what a study does; here many are made, by whoever comes first.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    where = shown(url)
    scheme, _, rest = url.partition(":")
    # Absolute: Optuna's lock is a link to it, and a relative one would lead nowhere.
    path = Path(rest.removeprefix("//")).expanduser().absolute()
    journal = path if scheme == "journal" and rest else None
    file = Path(rest[3:].partition("?")[0]) if scheme == "sqlite" and rest[3:] else journal
    if file and not make and not _is_there(file):
        raise Unsupported(
            f"expected the storage {where}, found no file there; check how it is spelt, and "
            "whether it is mounted"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            storage = patiently(
                _opener(scheme, rest, url, journal), where, OPENING_SECONDS, journal
            )
    except ImportError as error:
        extra = "grpc" if scheme == "grpc" else "postgres"
        raise Unsupported(
            f"expected the client of {where} to be installed ({one_line(error)}); "
            f"pip install 'tilegen[{extra}]'"
        ) from error
    return cast("BaseStorage", Patient(storage, where, journal))


def _is_there(file: Path) -> bool:
    """True for a file, and where the system will not tell: opening it says why."""
    try:
        return file.exists()
    except OSError:
        return True


def _opener(scheme: str, rest: str, url: str, journal: Path | None) -> Callable[[], BaseStorage]:
    """Return what makes the storage, and fails if nobody answers there. Raises Unsupported."""
    if journal is not None:
        return partial(_journal, journal)
    if scheme == "grpc":
        host, _, port = rest.removeprefix("//").rstrip("/").rpartition(":")
        if host and port.isdecimal():
            return partial(_proxy, host, int(port))
    if scheme.partition("+")[0] in ("postgresql", "mysql", "sqlite") and rest.startswith("//"):
        return partial(_database, f"postgresql+psycopg:{rest}" if scheme == "postgresql" else url)
    raise Unsupported(f"storage must be {FORMS}; got {shown(url)!r}")


def _journal(file: Path) -> BaseStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        if not file.is_file():
            raise Unsupported(f"expected a file for a journal at {str(file)!r}, found none")
        # Optuna takes a first line that it cannot read for one that was torn.
        with file.open("rb") as lines:
            first = lines.readline(MAX_LINE)
        if first and not (_is_operation(first) if first.endswith(b"\n") else first[:1] == b"{"):
            raise Unsupported(
                f"expected a journal of Optuna's at {str(file)!r}, found something else; "
                "name another file with --storage"
            )
    lock = JournalFileSymlinkLock(str(file), grace_period=LOCK_SECONDS)
    return JournalStorage(JournalFileBackend(str(file), lock_obj=lock))


def _proxy(host: str, port: int) -> BaseStorage:
    from optuna.storages import GrpcStorageProxy

    storage = GrpcStorageProxy(host=host, port=port)
    storage.wait_server_ready(timeout=OPENING_SECONDS / 3)  # its ConnectionError is an OSError
    return storage


def _database(url: str) -> BaseStorage:
    from optuna.storages import RDBStorage, get_storage

    return get_storage(RDBStorage(url, engine_kwargs={"pool_pre_ping": True}))
