"""Locations of records: own directory, shared locations, shipped `cache/`; reading and changing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import entry_points
from pathlib import Path, PurePath
from typing import Literal

from tilegen.disk import printable, say_once
from tilegen.errors import InvalidRecord, TilegenError, Unsupported
from tilegen.kernels.registry import KERNELS
from tilegen.resources import data_dir
from tilegen.settings import Settings, place, settings
from tilegen.store import files, remote
from tilegen.store.files import MAX_FILE_BYTES, Change
from tilegen.store.reach import Unreachable, ask, shown
from tilegen.store.trials import MAX_TRIALS_BYTES
from tilegen.tuning.measure import one_line

Origin = Literal["own", "shared", "shipped"]
ENTRY_POINTS = "tilegen.caches"
"""Group of entry points in which a package adds a shared location: each is the text of one."""
Kind = Literal["records", "trials", "broken"]
_NAMES: dict[Kind, tuple[str, str]] = {
    "records": ("", ".json"),
    "trials": ("trials/", ".jsonl"),
    "broken": ("", files.BROKEN),
}
AT_ONCE = 16
"""Number of requests to a remote location in flight, where many records are read."""


@dataclass(frozen=True)
class Location:
    """A folder or URL of records, laid out as cache/README.md says."""

    url: str
    origin: Origin

    @cached_property
    def folder(self) -> Path | None:
        """The folder, None if the location is behind a network protocol."""
        if self.url.startswith(("file://", "local://")):
            return Path(self.url.partition("://")[2])
        return None if "://" in self.url else Path(self.url)

    def address(self, path: PurePath | str = "") -> str:
        """Return where a file of the location is, for people."""
        return printable(f"{self._base.rstrip('/')}/{path}" if str(path) else self._base)

    @cached_property
    def _base(self) -> str:
        return str(self.folder or shown(self.url))


def locations(current: Settings | None = None) -> tuple[Location, ...]:
    """Return where records are looked for, in order."""
    current = current or settings()
    found = [Location(str(current.cache_dir), "own")]
    found += [Location(url, "shared") for url in (*current.cache_path, *_plugged_in())]
    with contextlib.suppress(Unsupported):  # an installation without records has none to offer
        found.append(Location(str(data_dir("cache")), "shipped"))
    return tuple(dict.fromkeys(found))


def read(
    location: Location, path: PurePath | str, limit: int = MAX_FILE_BYTES, *, fresh: bool = False
) -> bytes | None:
    """Read the file of a location at `path`; None if there is none. Raises InvalidRecord or
    Unreachable, the latter within seconds and for shared locations only."""
    if (folder := location.folder) is None:
        return remote.read(location.url, str(path), limit, fresh=fresh)
    if location.origin != "shared":
        return files.read_bytes(folder / path, limit)

    def from_folder() -> bytes | None:  # of a network, maybe, which can hang
        if not folder.is_dir():
            raise Unreachable("is not a folder")
        return files.read_bytes(folder / path, limit)

    return ask(location.url, from_folder, again=fresh)


def peek(location: Location, path: PurePath | str, limit: int = MAX_FILE_BYTES) -> bytes | None:
    """Read the file of a location at `path` now. Raises InvalidRecord or Unreachable."""
    if (folder := location.folder) is None:
        return remote.fetch(location.url, str(path), limit)
    return files.read_bytes(folder / path, limit)


def read_trials(location: Location, path: PurePath | str) -> bytes:
    """Return the lines of a location's file of trials; none if there is none that can be read."""
    try:
        return read(location, path, MAX_TRIALS_BYTES) or b""
    except Unreachable as error:
        pass_over(location, error)
    except InvalidRecord as error:
        say_once(f"trials {location.address(path)!r} passed over: {one_line(error)}")
    return b""


def update(
    location: Location, path: PurePath | str, change: Change, limit: int = MAX_FILE_BYTES
) -> str:
    """Change what a location holds at `path`, no other writer coming between; return what else
    happened. Raises Unreachable or Unsupported."""
    if (folder := location.folder) is None:
        return remote.update(location.url, str(path), change, limit)
    return files.update(files.inside(folder, path), change, limit)


def set_aside(location: Location, path: PurePath | str, parse: Callable[[bytes], object]) -> str:
    """Rename a file of the own directory that `parse` raises InvalidRecord for; return its new
    name, empty if it stays."""
    if location.origin != "own" or (folder := location.folder) is None:
        return ""
    with contextlib.suppress(Unsupported):  # it is another's, whom a link leads to, or is written
        aside = files.set_aside_if_broken(files.inside(folder, path), parse)
        return aside.name if aside else ""
    return ""


def names(location: Location, what: Kind) -> list[str]:
    """Return the names of all files of a kind, relative to the location. Raises Unreachable."""
    parents, suffix = _NAMES[what]
    if (folder := location.folder) is None:
        found = remote.names(location.url)
    else:
        try:
            found = [
                str(file.relative_to(folder))
                for kernel in KERNELS
                for file in sorted(folder.glob(f"{parents}*/{kernel}/*{suffix}"))
            ]
        except OSError as error:
            raise Unreachable(f"cannot be listed: {error.strerror}") from None
        if what != "trials":  # names of records are only shown: any may be
            return found
    # Others choose these names: only what `slug` leaves is taken, so that none leads elsewhere.
    one = r"[a-z0-9][a-z0-9_+.-]*"
    pattern = re.compile(rf"{parents}{one}/({'|'.join(KERNELS)})/{one}{re.escape(suffix)}")
    return [name for name in found if pattern.fullmatch(name)]


def read_all(
    location: Location, paths: list[str], limit: int = MAX_FILE_BYTES
) -> Iterator[tuple[str, bytes | TilegenError | None]]:
    """Yield each name with what is there now, or the error that reading it raises."""

    def one(path: str) -> bytes | TilegenError | None:
        try:
            return peek(location, path, limit)
        except TilegenError as error:
            return error

    if location.folder is not None:
        yield from ((path, one(path)) for path in paths)
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from zip(paths, pool.map(one, paths), strict=True)


def pass_over(location: Location, error: Unreachable) -> None:
    """Say once that a location is not used."""
    say_once(f"record location {location.address()!r} {error}; passed over")


@cache
def _plugged_in() -> tuple[str, ...]:
    """Return the locations that installed packages add; one that fails is named and passed over."""
    found: list[str] = []
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            value = entry.load()
            if not isinstance(value, str | Path):
                raise Unsupported(f"expected a text or path, found {type(value).__name__}")
            found.append(place(str(value)))
        except Exception as error:  # a plug-in may raise anything
            say_once(
                f"entry point {entry.value!r} of {ENTRY_POINTS} passed over: {one_line(error)}"
            )
    return tuple(found)
