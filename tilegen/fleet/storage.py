"""Optuna's storages by URL, and patience with one that is away for a while."""

from __future__ import annotations

import contextlib
import math
import random
import time
import warnings
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import optuna

from tilegen.disk import log
from tilegen.errors import TilegenError, Unsupported
from tilegen.fleet.faults import in_words, is_operation, lasting, may_pass
from tilegen.store.reach import shown
from tilegen.tuning.measure import one_line

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
TABLES_LOCK = int.from_bytes(b"tilegen", "big")
"""Number of the lock that whoever makes tables in a database of PostgreSQL's holds."""
LOCK_SECONDS = 10
"""Time after which the lock of a journal belongs to a killed worker [seconds]: a living one holds
it for milliseconds."""


class StorageAway(TilegenError):
    """A fleet's storage does not answer."""


class StorageBroken(Unsupported):
    """A fleet's storage that waiting does not help: a full disk, a database that is not there."""


class Patient:
    """A storage whose calls are made again, ever later, while it does not answer.

    A call may have been done although its answer was lost. `queue` is made for that: what is put in
    twice is measured once, and a claim that nobody knows of goes stale.
    """

    def __init__(self, storage: BaseStorage, where: str, journal: Path | None = None) -> None:
        self._storage, self._where, self._journal = storage, where, journal
        self.failed_at = -math.inf
        """Time at which the storage last did not answer, by `time.monotonic` [seconds]."""
        self._until = math.inf
        """Time after which no call is made again, by the same clock [seconds]."""

    @contextlib.contextmanager
    def in_a_hurry(self, seconds: float) -> Generator[None, None, None]:
        """Make calls that begin in the block again for that long at the most."""
        self._until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._until = math.inf

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._storage, name)
        return partial(self._call, value) if callable(value) else value

    def _call(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        def again() -> Any:
            try:
                return call(*args, **options)
            except Exception as error:
                if may_pass(error):
                    self.failed_at = time.monotonic()
                raise

        left = min(PATIENCE_SECONDS, self._until - time.monotonic())
        return patiently(again, self._where, left, self._journal)


def in_a_hurry(storage: object, seconds: float) -> contextlib.AbstractContextManager[None]:
    """Return a block in which a storage is asked for that long at the most."""
    is_patient = isinstance(storage, Patient)
    return storage.in_a_hurry(seconds) if is_patient else contextlib.nullcontext()


def last_failure(storage: object) -> float:
    """Return when a storage last did not answer, by `time.monotonic`."""
    return storage.failed_at if isinstance(storage, Patient) else -math.inf


def patiently(
    call: Callable[[], Any], where: str, seconds: float, journal: Path | None = None
) -> Any:
    """Call a function, again and again while the storage is away.

    Raises StorageAway, or StorageBroken at once where waiting does not help.
    """
    started, pause, said = time.monotonic(), 0.1, False
    while True:
        try:
            return call()
        except Exception as error:
            if trouble := lasting(error, journal):
                raise StorageBroken(
                    f"expected the storage {where} to be in order; {trouble}"
                ) from error
            if not may_pass(error):
                raise
            waited = time.monotonic() - started
            if waited + pause > seconds:
                raise StorageAway(
                    f"expected the storage {where} to answer, got for {waited:.0f} s: "
                    f"{in_words(error)}; start it, or name another with --storage"
                ) from error
            if not said and waited > 1:
                log.warning("the storage %s does not answer; trying again", where)
                said = True
        # Not all workers at the same moment, when a server comes back.
        time.sleep(pause * random.uniform(0.5, 1))
        pause = min(2 * pause, LONGEST_PAUSE)


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
    """Return a function that makes the storage, and fails if nobody answers there. Raises
    Unsupported."""
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
        if first and not (is_operation(first) if first.endswith(b"\n") else first[:1] == b"{"):
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

    # Who is first makes the tables, which PostgreSQL lets two do at the same time, and fails one.
    with _making_tables(url) if url.startswith("postgresql") else contextlib.nullcontext():
        return get_storage(RDBStorage(url, engine_kwargs={"pool_pre_ping": True}))


@contextlib.contextmanager
def _making_tables(url: str) -> Generator[None, None, None]:
    """Keep other workers from making tables in a database of PostgreSQL's meanwhile."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(url)
    try:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{OPENING_SECONDS / 3:g}s'")
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({TABLES_LOCK})")
            yield
    finally:
        engine.dispose()
