"""Optuna's storages by URL, with retries while a storage does not answer."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import optuna

from tilegen.compiling.background import Background
from tilegen.disk import log
from tilegen.errors import TilegenError, Unsupported
from tilegen.fleet.faults import in_words, is_operation, may_pass, why_not_recovering
from tilegen.store.reach import shown
from tilegen.tuning.measure import one_line

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

FORMS = (
    "postgresql://user@host/database, journal:FILE on a shared folder, grpc://host:port of a "
    "tilegen fleet proxy, or sqlite:///FILE on one machine"
)
OPENING_SECONDS = 30.0
"""Time limit for the first answer of a storage [seconds]; a wrong address fails by then."""
PATIENCE_SECONDS = 600.0
"""Time for which workers retry a storage that answered before [seconds]: a restart, an upgrade."""
SILENT_SECONDS = 10.0
"""Time after which a call without an answer is logged [seconds]."""
LONGEST_PAUSE = 10.0
"""Longest pause between two attempts at a call [seconds]."""
MAX_LINE = 2**20
"""Maximum length of a journal's first line [bytes]; usual lines have a few hundred."""
TABLES_LOCK = int.from_bytes(b"tilegen", "big")
"""Number of the PostgreSQL lock that a worker holds while it creates tables."""
LOCK_SECONDS = 10
"""Age at which a journal's lock must be a killed worker's [seconds]: a running worker holds it for
milliseconds."""


class StorageAway(TilegenError):
    """A fleet's storage that does not answer."""


class StorageBroken(Unsupported):
    """A fleet's storage that waiting does not repair: a full disk, a missing database."""


class Patient:
    """A storage that retries its calls, at growing intervals, while it does not answer.

    A call may have taken effect although its answer was lost. `queue` allows for that: a config
    that was enqueued twice is measured once, and a claim that no worker knows of goes stale.
    """

    def __init__(self, storage: BaseStorage, where: str, journal: Path | None = None) -> None:
        self._storage, self._where, self._journal = storage, where, journal
        self.failed_at = -math.inf
        """Time at which the storage last did not answer, by `time.monotonic` [seconds]."""
        self._until = math.inf
        """Time after which no call is retried, by the same clock [seconds]."""

    @contextlib.contextmanager
    def in_a_hurry(self, seconds: float) -> Generator[None, None, None]:
        """Retry calls of the block for at most `seconds`."""
        self._until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._until = math.inf

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._storage, name)
        return partial(self._call, value) if callable(value) else value

    def _call(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        def attempt() -> Any:
            try:
                return call(*args, **options)
            except Exception as error:
                if may_pass(error):
                    self.failed_at = time.monotonic()
                raise

        left = min(PATIENCE_SECONDS, self._until - time.monotonic())
        return patiently(attempt, self._where, left, self._journal)


def in_a_hurry(storage: object, seconds: float) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a Patient storage retries calls for at most `seconds`."""
    is_patient = isinstance(storage, Patient)
    return storage.in_a_hurry(seconds) if is_patient else contextlib.nullcontext()


def last_failure(storage: object) -> float:
    """Return the time when a storage last did not answer, by `time.monotonic` [seconds]."""
    return storage.failed_at if isinstance(storage, Patient) else -math.inf


def patiently(
    call: Callable[[], Any], where: str, seconds: float, journal: Path | None = None
) -> Any:
    """Call a function, and retry it for `seconds` while the storage `where` does not answer.

    Raises StorageAway after that time, and StorageBroken at once if waiting does not help.
    """
    started, pause, is_logged = time.monotonic(), 0.1, False
    while True:
        waited = time.monotonic() - started
        try:
            return _answer(call, where, seconds - waited)
        except Exception as error:
            if reason := why_not_recovering(error, journal):
                raise StorageBroken(f"cannot use the storage {where}: {reason}") from error
            if not may_pass(error):
                raise
            waited = time.monotonic() - started
            if waited + pause > seconds:
                raise StorageAway(
                    f"the storage {where} has not answered for {waited:.0f} s: {in_words(error)}; "
                    "start it, or name another with --storage"
                ) from error
            if not is_logged and waited > 1:
                log.warning("the storage %s does not answer; trying again", where)
                is_logged = True
        # Random pauses keep workers from retrying all at once when a server comes back.
        time.sleep(pause * random.uniform(0.5, 1))
        pause = min(2 * pause, LONGEST_PAUSE)


def _answer(call: Callable[[], Any], where: str, seconds: float) -> Any:
    """Call a function, and wait for its result for `seconds`. Raises TimeoutError.

    The main thread waits for another thread, so that Ctrl-C ends the wait for a call that hangs:
    psycopg would first try for 10 s to cancel the query.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    with contextlib.closing(Background(1)) as thread:
        answer = thread.submit(call)
        if not wait([answer], min(SILENT_SECONDS, seconds)).done:
            log.warning("the storage %s has not answered for %g s; waiting", where, SILENT_SECONDS)
            if not wait([answer], seconds - SILENT_SECONDS).done:
                raise TimeoutError("a call did not end")
        return answer.result()


def open_storage(url: str, *, make: bool = True) -> BaseStorage:
    """Open the storage of a URL, and wait for its first answer.

    With `make`, a missing file is created; otherwise it raises Unsupported. Raises StorageAway if
    there is no answer, and Unsupported for any other failure.
    """
    # Optuna logs each study that it creates, and workers create many.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    where = shown(url)
    scheme, _, rest = url.partition(":")
    # Absolute: Optuna's lock is a symbolic link to the file, and a relative link would dangle.
    path = Path(rest.removeprefix("//")).expanduser().absolute()
    journal = path if scheme == "journal" and rest else None
    file = Path(rest[3:].partition("?")[0]) if scheme == "sqlite" and rest[3:] else journal
    if file and not make and not _is_there(file):
        raise Unsupported(
            f"the storage {where} has no file; check how it is spelt, and whether it is mounted"
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
    """Return True if a file exists, or the system raises an error: opening then reports it."""
    try:
        return file.exists()
    except OSError:
        return True


def _opener(scheme: str, rest: str, url: str, journal: Path | None) -> Callable[[], BaseStorage]:
    """Return a function that opens the storage, and fails if there is no answer. Raises Unsupported
    for unknown forms of URLs."""
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
            raise Unsupported(
                f"{str(file)!r} is not a regular file; name another file with --storage"
            )
        # Optuna takes any unreadable first line for a line that was cut, whatever the file is.
        with file.open("rb") as lines:
            first = lines.readline(MAX_LINE)
        if first and not (is_operation(first) if first.endswith(b"\n") else first[:1] == b"{"):
            raise Unsupported(
                f"{str(file)!r} is not a journal of Optuna's; name another file with --storage"
            )
    lock = JournalFileSymlinkLock(str(file), grace_period=LOCK_SECONDS)
    return JournalStorage(JournalFileBackend(str(file), lock_obj=lock))


def _proxy(host: str, port: int) -> BaseStorage:
    from optuna.storages import GrpcStorageProxy

    storage = GrpcStorageProxy(host=host, port=port)
    # Its ConnectionError is an OSError, so opening is retried.
    storage.wait_server_ready(timeout=OPENING_SECONDS / 3)
    return storage


def _database(url: str) -> BaseStorage:
    from optuna.storages import RDBStorage, get_storage

    # The first worker creates the tables; PostgreSQL would let two workers begin, and fail one.
    with _making_tables(url) if url.startswith("postgresql") else contextlib.nullcontext():
        return get_storage(RDBStorage(url, engine_kwargs={"pool_pre_ping": True}))


@contextlib.contextmanager
def _making_tables(url: str) -> Generator[None, None, None]:
    """Keep other workers from creating tables in a PostgreSQL database during the block."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(url)
    try:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{OPENING_SECONDS / 3:g}s'")
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({TABLES_LOCK})")
            yield
    finally:
        engine.dispose()
