"""Locations of records (local cache, shared locations, shipped `cache/`): reading and updating."""

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
from tilegen.environment import Settings, current, place
from tilegen.errors import InvalidRecord, TilegenError, Unsupported
from tilegen.kernels.registry import KERNELS
from tilegen.resources import data_dir
from tilegen.store import files, remote
from tilegen.store.files import MAX_FILE_BYTES, Change
from tilegen.store.remote import Unreachable, ask, shown
from tilegen.store.trials import MAX_TRIALS_BYTES
from tilegen.tuning.measure import one_line

Owner = Literal["own", "shared", "shipped"]
ENTRY_POINTS = "tilegen.caches"
"""Group of entry points through which packages add shared locations: each is a text or a path."""
FileKind = Literal["records", "trials", "broken"]
_NAMES: dict[FileKind, tuple[str, str]] = {
    "records": ("", ".json"),
    "trials": ("trials/", ".jsonl"),
    "broken": ("", files.BROKEN),
}
AT_ONCE = 16
"""Number of concurrent requests to a remote location when many files are read."""


@dataclass(frozen=True)
class Location:
    """A folder or URL of records, laid out as cache/README.md describes."""

    url: str
    origin: Owner

    @cached_property
    def folder(self) -> Path | None:
        """Path of a folder; None if fsspec opens the location."""
        if self.url.startswith(("file://", "local://")):
            return Path(self.url.partition("://")[2])
        return None if "://" in self.url else Path(self.url)

    def address(self, path: PurePath | str = "") -> str:
        """Return the address of a file, or of the location, for messages; it shows no password."""
        return printable(f"{self._base.rstrip('/')}/{path}" if str(path) else self._base)

    @cached_property
    def _base(self) -> str:
        return str(self.folder or shown(self.url))


def locations(of: Settings | None = None) -> tuple[Location, ...]:
    """List the locations of records, in the order of look-up."""
    of = of or current()
    ordered = [Location(str(of.cache_dir), "own")]
    ordered += [Location(url, "shared") for url in (*of.cache_path, *_plugged_in())]
    with contextlib.suppress(Unsupported):  # this installation ships no records
        ordered.append(Location(str(data_dir("cache")), "shipped"))
    return tuple(dict.fromkeys(ordered))


def read(
    location: Location, path: PurePath | str, limit: int = MAX_FILE_BYTES, *, fresh: bool = False
) -> bytes | None:
    """Read the file of a location at `path`; None if there is no file.

    `fresh` bypasses copies of remote files, and asks again a location that did not answer lately.
    Raises InvalidRecord; Unreachable, within seconds and for shared locations only.
    """
    if (folder := location.folder) is None:
        return remote.read(location.url, str(path), limit, fresh=fresh)
    if location.origin != "shared":
        return files.read_bytes(folder / path, limit)

    def from_folder() -> bytes | None:  # may be a network mount, which can hang
        if not folder.is_dir():
            raise Unreachable("is not a folder")
        return files.read_bytes(folder / path, limit)

    return ask(location.url, from_folder, again=fresh)


def peek(location: Location, path: PurePath | str, limit: int = MAX_FILE_BYTES) -> bytes | None:
    """Read the file of a location at `path` itself, never a copy; None if there is no file. Raises
    InvalidRecord or Unreachable."""
    if (folder := location.folder) is None:
        return remote.fetch(location.url, str(path), limit)
    return files.read_bytes(folder / path, limit)


def read_trials(location: Location, path: PurePath | str) -> bytes:
    """Read a location's file of trials; empty if it is missing, or unreadable and logged."""
    try:
        return read(location, path, MAX_TRIALS_BYTES) or b""
    except Unreachable as error:
        pass_over(location, error)
    except InvalidRecord as error:
        say_once(f"trials {location.address(path)!r} skipped: {one_line(error)}")
    return b""


def update(
    location: Location,
    path: PurePath | str,
    change: Change,
    limit: int = MAX_FILE_BYTES,
    *,
    dry_run: bool = False,
) -> str:
    """Apply `change` to the file of a location at `path`; return a note on an invalid file. With
    `dry_run`, call `change` and write nothing.

    Other writers are excluded as far as `files.update` and `remote.update` can. Raises Unreachable
    or Unsupported.
    """
    try:
        if not dry_run:
            if (folder := location.folder) is None:
                return remote.update(location.url, str(path), change, limit)
            return files.update(files.inside(folder, path), change, limit)
        try:
            change(peek(location, path, limit))
        except InvalidRecord as error:
            change(None)
            return f"the existing file is not a record ({one_line(error)}) and would be kept"
        return ""
    except Unreachable as error:
        raise Unreachable(f"location {location.address()!r} {error}") from error


def check_writable(location: Location) -> None:
    """Raise Unsupported for a location that can only be read, as far as that shows before a
    write."""
    if location.folder is None:
        remote.check_writable(location.url)
    else:
        files.check_writable(location.folder)


def set_aside(location: Location, path: PurePath | str, parse: Callable[[bytes], object]) -> str:
    """Set aside a file for which `parse` raises InvalidRecord; return its new name, empty if the
    file stays. Files outside the local cache stay."""
    if location.origin != "own" or (folder := location.folder) is None:
        return ""
    with contextlib.suppress(Unsupported):  # behind a link, or being written
        aside = files.set_aside_if_broken(files.inside(folder, path), parse)
        return aside.name if aside else ""
    return ""


def names(location: Location, what: FileKind) -> list[str]:
    """List the files of a kind by their paths, relative to the location. Raises Unreachable."""
    parents, suffix = _NAMES[what]
    if (folder := location.folder) is None:
        paths = remote.names(location.url)
    else:
        try:
            paths = [
                str(file.relative_to(folder))
                for kernel in KERNELS
                for file in sorted(folder.glob(f"{parents}*/{kernel}/*{suffix}"))
            ]
        except OSError as error:
            raise Unreachable(f"cannot be listed: {error.strerror}") from None
        if what != "trials":  # any name may stay: a record's path comes from its fields
            return paths
    # Others chose these names: keep names as `slug` makes them, so that no path leads elsewhere.
    part = r"[a-z0-9][a-z0-9_+.-]*"
    pattern = re.compile(rf"{parents}{part}/({'|'.join(KERNELS)})/{part}{re.escape(suffix)}")
    return [path for path in paths if pattern.fullmatch(path)]


def read_all(
    location: Location, paths: list[str], limit: int = MAX_FILE_BYTES
) -> Iterator[tuple[str, bytes | TilegenError | None]]:
    """Yield each path with the file's content, or the error of reading the file."""

    def read_now(path: str) -> bytes | TilegenError | None:
        try:
            return peek(location, path, limit)
        except TilegenError as error:
            return error

    if location.folder is not None:
        yield from ((path, read_now(path)) for path in paths)
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from zip(paths, pool.map(read_now, paths), strict=True)


def pass_over(location: Location, error: Unreachable) -> None:
    """Warn once that a location is skipped."""
    say_once(f"record location {location.address()!r} {error}; skipped")


@cache
def _plugged_in() -> tuple[str, ...]:
    """Load the locations that installed packages add; skip a failing package with a warning."""
    urls: list[str] = []
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            value = entry.load()
            if not isinstance(value, str | Path):
                raise Unsupported(f"expected a text or path, found {type(value).__name__}")
            urls.append(place(str(value)))
        except Exception as error:  # a plug-in may raise anything
            say_once(f"entry point {entry.value!r} of {ENTRY_POINTS} skipped: {one_line(error)}")
    return tuple(urls)
